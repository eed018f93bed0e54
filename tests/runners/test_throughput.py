"""Throughput: hand-counted steps, a scripted engine whose costs are known, and what a run directory keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbench.cli.throughput import throughput_table
from specbench.config import RunConfig
from specbench.drafters.ngram import NgramDrafter
from specbench.errors import UserError
from specbench.runners import throughput, vllm_start
from specbench.runners.pace import Meter, Pace
from specbench.runners.runner import RunSettings
from specbench.runners.targets import Target
from specbench.runners.throughput import (
    Level,
    measure,
    measure_run,
    read_levels,
    speed_up,
    with_speed_ups,
    write_levels,
)
from specbench.runners.vllm_engine import VllmRunner
from specbench.runners.vllm_start import EngineAnswer, EngineOptions, Request, VllmEngine
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span

CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")
SETTINGS = RunSettings(depths=(3,), sampling=Sampling(), sampler="greedy", max_new_tokens=9, batch_size=4)


def prompts(count: int) -> list[RenderedPrompt]:
    return [
        RenderedPrompt(
            prompt_id=f"t/{i}", suite="t", category="", turn=0, condition=CLEAN, token_ids=(1, 30, 31 + i),
            spans=(Span(kind="user", start=0, end=3),), bos_count=1, template_hash="",
        )
        for i in range(count)
    ]  # fmt: skip


def test_a_meter_counts_what_all_users_share() -> None:
    meter = Meter(users=2)
    meter.step(10.0, 11.0, drafting=0.1, num_tokens=1, serving=2, decoding=False)  # a prompt is read
    meter.step(11.0, 11.5, drafting=0.2, num_tokens=4, serving=2, decoding=True)
    meter.step(11.5, 12.5, drafting=0.3, num_tokens=3, serving=2, decoding=True)
    meter.step(13.0, 14.0, drafting=0.4, num_tokens=2, serving=1, decoding=False)  # the last one alone
    assert meter.pace(told=True) == Pace(
        users=2, window_seconds=2.5, window_tokens=8, steps=2, step_seconds=1.5, draft_seconds=0.5
    )
    assert meter.pace(told=False).draft_seconds is None


class Stepping:
    """As much of vLLM's engine as a loop over steps needs: one token a request and step."""

    def __init__(self) -> None:
        self.left: dict[str, tuple[int, list[int]]] = {}
        self.most = 0

    def add_request(self, key: str, _prompt: Any, limit: int) -> None:
        self.left[key] = (limit, [])
        self.most = max(self.most, len(self.left))

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        outputs = []
        for key, (limit, tokens) in list(self.left.items()):
            tokens.append(len(tokens))
            done = len(tokens) == limit
            if done:
                del self.left[key]
            completion = SimpleNamespace(token_ids=list(tokens), finish_reason="length" if done else None)
            outputs.append(
                SimpleNamespace(request_id=key, outputs=[completion], finished=done, prompt_token_ids=[1])
            )
        return outputs


def test_so_many_users_are_served_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start, "_params", lambda request, _sampling, _stops: request.max_tokens)
    engine = VllmEngine.__new__(VllmEngine)
    inner = Stepping()
    clock = SimpleNamespace(seconds=0.0, wait=False, installed=True, on_device=False)
    monkeypatch.setattr(engine, "_engine", inner, raising=False)
    monkeypatch.setattr(engine, "_clock", clock, raising=False)
    monkeypatch.setattr(engine, "_counts_only", False, raising=False)
    lengths = (2, 5, 3, 1, 4)
    requests = [Request(key=str(i), token_ids=(1,), max_tokens=n, seed=None) for i, n in enumerate(lengths)]
    answers, pace = engine.measure(requests, Sampling(), (), users=2, costs=False)
    assert inner.most == 2
    assert {a.key: len(a.token_ids) for a in answers} == {str(i): n for i, n in enumerate(lengths)}
    #   step    1  2  3  4  5  6  7  8  9
    #   user A  0  0  2  2  2  3
    #   user B  1  1  1  1  1  4  4  4  4
    assert pace.window_tokens == 12
    # steps 2, 4 and 5; in 1, 3 and 6 somebody's prompt is read
    assert pace.steps == 3
    assert [len(a.token_ids) for a in engine.answer(requests, Sampling(), ())] == sorted(lengths)
    assert inner.most == 5


class Paced:
    """An engine whose round costs 2 ms, 0.5 of them drafting, and accepts 2 of 3; without drafts a token costs 1 ms."""

    def __init__(self, options: EngineOptions) -> None:
        self.depth = 0 if options.speculative is None else 3
        self.options = options
        self.passes: list[tuple[int, int]] = []
        self.closed = False

    def measure(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        users: int,
        costs: bool,
    ) -> tuple[list[EngineAnswer], Pace]:
        self.passes.append((users, len(requests)))
        slow = 9.0 if len(self.passes) == 1 else 1.0
        size = 3 if self.depth else 1
        rounds = [size] * (9 // size)
        step = 0.002 if self.depth else 0.001
        seconds = slow * step * len(rounds)
        answers = [
            EngineAnswer(
                key=r.key, prompt_ids=r.token_ids, token_ids=tuple(range(100, 110)), finish="length",
                emitted=(1, *rounds), records=tuple((2, 3) for _ in rounds) if self.depth else (),
                first_token_seconds=0.25, seconds=0.25 + seconds,
            )
            for r in requests
        ]  # fmt: skip
        pace = Pace(
            users=users, window_seconds=seconds, window_tokens=9 * users, steps=len(rounds),
            step_seconds=seconds, draft_seconds=0.0005 * slow * len(rounds) if self.depth else 0.0,
        )  # fmt: skip
        return answers, pace

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu", dtype="float32")


@pytest.fixture
def started() -> list[Paced]:
    return []


@pytest.fixture
def runner(target: Target, started: list[Paced]) -> VllmRunner:
    def start(options: EngineOptions, _defects: Any) -> Any:
        assert all(engine.closed for engine in started), "one engine at a time"
        if options.speculative is not None and options.speculative["prompt_lookup_min"] == 2:
            raise UserError("vLLM does not start")
        started.append(Paced(options))
        return started[-1]

    return VllmRunner(target, SETTINGS, start=start, version="0.32.0")


def test_costs_and_speed_ups_of_a_known_engine(runner: VllmRunner, started: list[Paced]) -> None:
    levels = list(measure(runner, prompts(3), {"ngram": NgramDrafter(1, 3)}, users=(4, 1, 16), depths=(3,)))
    assert [(level.drafter, level.users) for level in levels] == [
        (name, u) for name in ("", "ngram") for u in (1, 4, 16)
    ]
    plain, fast = levels[1], levels[4]
    assert len(plain.total) == len(fast.per_user) == throughput.REPEATS == 3
    # the warm-up pass was nine times as slow, and is in none of the numbers
    assert plain.per_user == pytest.approx([1000.0] * 3) and fast.per_user == pytest.approx([1500.0] * 3)
    assert plain.total == pytest.approx([4000.0] * 3) and fast.total == pytest.approx([6000.0] * 3)
    assert fast.first_token_ms == pytest.approx([250.0] * 3)
    assert fast.accepted_per_round == pytest.approx(2.0)
    faster = speed_up(fast, plain)
    assert faster is not None
    assert (faster.c_verify, faster.c_draft) == (pytest.approx(1.5), pytest.approx(0.5 / 3))
    assert faster.predicted == pytest.approx(3 / 2) and faster.per_user == pytest.approx(1.5)
    assert speed_up(plain, plain) is None
    assert started[0].passes == [(1, 8)] * 4 + [(4, 8)] * 4 + [(16, 32)] * 4
    assert {engine.options.max_num_seqs for engine in started} == {16}, "the same engine but for the drafter"
    assert len({engine.options.max_model_len for engine in started}) == 1
    assert started[0].options.speculative is None and all(engine.closed for engine in started)


def test_an_engine_that_fails_leaves_the_others(runner: VllmRunner) -> None:
    drafters = {"bad": NgramDrafter(2, 3), "good": NgramDrafter(1, 3)}
    levels = list(measure(runner, prompts(1), drafters, users=(1,), depths=(3,)))
    assert [(level.drafter, level.error) for level in levels] == [
        ("", None),
        ("bad", "vLLM does not start"),
        ("good", None),
    ]
    assert throughput_table(levels).row_count == 3


def test_a_run_keeps_its_levels_and_measures_only_what_is_missing(
    runner: VllmRunner, started: list[Paced], tmp_path: Path
) -> None:
    config = RunConfig(runner="vllm", throughput=(1,), depth=(3,))
    notes: list[str] = []

    def once(**drafters: NgramDrafter) -> dict[str, str]:
        return measure_run(runner, prompts(2), drafters, config, tmp_path, notes.append)

    failed = once(bad=NgramDrafter(2, 3), good=NgramDrafter(1, 3))
    assert failed == {"throughput, bad, k 3, 1 users": "vLLM does not start"}
    assert [engine.depth for engine in started] == [0, 3]
    assert once(bad=NgramDrafter(1, 3), good=NgramDrafter(1, 3)) == {}
    assert len(started) == 4, (
        "only the one that failed is tried again, beside a fresh engine without speculation"
    )
    assert notes[-2:] == ["throughput without speculation", "throughput of bad at k = 3"]
    levels = [(level.drafter, level.session) for level in read_levels(tmp_path)]
    assert sorted(levels) == [("", 0), ("", 1), ("bad", 1), ("good", 0)]
    assert all(faster is not None for level, faster in with_speed_ups(read_levels(tmp_path)) if level.drafter)
    assert once(bad=NgramDrafter(1, 3), good=NgramDrafter(1, 3)) == {} and len(started) == 4


def test_levels_are_read_back(tmp_path: Path) -> None:
    assert read_levels(tmp_path) == []
    levels = [
        Level(drafter="", k=0, users=2, per_user=(1.0, 2.0)),
        Level(drafter="a", k=3, users=2, error="why"),
    ]
    write_levels(tmp_path, levels, {"version": "0.32.0"})
    assert read_levels(tmp_path) == levels
    (tmp_path / throughput.FILE).write_text("{}")
    with pytest.raises(UserError, match="remove it"):
        read_levels(tmp_path)


@pytest.mark.parametrize("options", [{"throughput": (1,)}, {"runner": "vllm", "throughput": (0, 4)}])
def test_throughput_needs_an_engine_and_users(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--throughput takes numbers of users"):
        RunConfig(**options)


def test_throughput_does_not_change_what_a_run_is() -> None:
    assert RunConfig(runner="vllm").identity() == RunConfig(runner="vllm", throughput=(1, 4)).identity()
