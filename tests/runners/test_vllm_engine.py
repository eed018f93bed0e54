"""The vLLM runner: with scripted engines everywhere, with the engine itself where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specbench
from specbench.drafters.checkpoints.dflash import load_dflash
from specbench.drafters.dflash import DFlashConfig, DFlashModel
from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.ngram import NgramDrafter
from specbench.errors import UserError
from specbench.runners import engine_defects, vllm_start
from specbench.runners.engine_spec import check_block, engine_spec
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.targets import Target
from specbench.runners.vllm_engine import VllmRunner, read_options
from specbench.runners.vllm_process import RemoteEngine
from specbench.runners.vllm_start import (
    EngineAnswer,
    EngineOptions,
    Request,
    VllmEngine,
    engine_version,
    start_failure,
)
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span, TargetWeights

CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")


def prompts(count: int) -> list[RenderedPrompt]:
    return [
        RenderedPrompt(
            prompt_id=f"t/{i}", suite="t", category="", turn=0, condition=CLEAN, token_ids=(1, 30, 31 + i),
            spans=(Span(kind="user", start=0, end=3),), bos_count=1, template_hash="",
        )
        for i in range(count)
    ]  # fmt: skip


def settings(**changes: Any) -> RunSettings:
    made = RunSettings(depths=(4,), sampling=Sampling(), sampler="greedy", max_new_tokens=20, batch_size=4)
    return replace(made, **changes)


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu", dtype="float32")


class Scripted:
    """An engine that accepts by script, and counts as vLLM does: behind the answer's end, too."""

    def __init__(self, options: EngineOptions, script: Sequence[int], stop_after: int | None = None) -> None:
        assert options.speculative is not None
        self.options, self.script, self.stop_after = options, script, stop_after
        self.depth = int(options.speculative["num_speculative_tokens"])
        self.closed = False

    def answer(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: Callable[[int], None] = lambda _n: None,
    ) -> Iterator[EngineAnswer]:
        for request in requests:
            length = min(request.max_tokens, self.stop_after or request.max_tokens)
            emitted, records, turn = [1], [], 0
            while sum(emitted) < length:
                accepted = min(self.script[turn % len(self.script)], self.depth)
                turn += 1
                records.append((accepted, self.depth))
                emitted.append(min(accepted + 1, length - sum(emitted)))
            on_tokens(length)
            yield EngineAnswer(
                key=request.key, prompt_ids=request.token_ids, token_ids=tuple(range(100, 100 + length)),
                finish="stop" if self.stop_after else "length", emitted=tuple(emitted), records=tuple(records),
            )  # fmt: skip

    def close(self) -> None:
        self.closed = True


def run(runner: VllmRunner, drafters: Mapping[str, Any], count: int = 2) -> list[Outcome]:
    work = [Work(prompt=p, drafters=tuple(drafters)) for p in prompts(count)]
    return list(runner.run(work, drafters, lambda _n: None))


@pytest.mark.parametrize("length", [1.4, 2.0, 3.6])
def test_the_chosen_acceptance_length_comes_out_of_the_runner(target: Target, length: float) -> None:
    """What vLLM's synthetic mode does on a GPU: acceptance by decree, and the rows must say the same."""
    tenths = round((length - 1) * 10)
    script = [tenths // 10 + (i < tenths % 10) for i in range(10)]
    tokens = 1 + sum(a + 1 for a in script) * 2
    runner = VllmRunner(
        target,
        settings(max_new_tokens=tokens),
        start=lambda options, _d: Scripted(options, script),
        version="0.32.0",
    )
    rounds = [r for o in run(runner, {"ngram": NgramDrafter()}) for r in o.rounds["ngram", 4]]
    assert sum(r.num_accepted for r in rounds) / len(rounds) + 1 == pytest.approx(length)


def test_tokens_behind_the_end_are_the_engines_own(target: Target) -> None:
    runner = VllmRunner(
        target, settings(), start=lambda o, _d: Scripted(o, [4], stop_after=8), version="0.32.0"
    )
    (outcome,) = run(runner, {"ngram": NgramDrafter()}, count=1)
    first, last = outcome.rounds["ngram", 4]
    assert (first.num_accepted, first.engine_accepted) == (4, 4)
    assert (last.num_accepted, last.engine_accepted, last.num_emitted, last.cut) == (2, 4, 2, True)


def test_every_depth_has_its_engine_and_one_is_alive(target: Target) -> None:
    started: list[Scripted] = []

    def start(options: EngineOptions, _defects: Mapping[str, str]) -> Scripted:
        assert all(engine.closed for engine in started)
        started.append(Scripted(options, [1]))
        return started[-1]

    runner = VllmRunner(target, settings(depths=(2, 4)), start=start, version="0.32.0")
    made = {"a": NgramDrafter(1, 3), "b": NgramDrafter(2, 3)}
    outcomes = run(runner, made)
    assert [o.work.drafters for o in outcomes] == [("a",), ("a",), ("b",), ("b",)]
    assert all(set(o.rounds) == {(o.work.drafters[0], 2), (o.work.drafters[0], 4)} for o in outcomes)
    assert len(started) == 4
    assert [o.work.drafters for o in run(runner, made)][0] == ("b",), "the engine that is alive goes first"
    assert len(started) == 7
    runner.close()
    assert all(engine.closed for engine in started)


def test_a_drafter_that_fails_leaves_the_others(target: Target) -> None:
    def start(options: EngineOptions, _defects: Mapping[str, str]) -> Scripted:
        assert options.speculative is not None
        if options.speculative["prompt_lookup_min"] == 1:
            raise UserError("vLLM does not start")
        return Scripted(options, [1])

    runner = VllmRunner(target, settings(), start=start, version="0.32.0")
    good, bad = run(runner, {"a": NgramDrafter(1, 3), "b": NgramDrafter(2, 3)}, count=1)
    assert good.rounds["b", 4] and not good.errors
    assert bad.errors == {"a": "vLLM does not start"}, "failures come last: the answer is there already"


def test_the_engine_is_told_what_the_drafter_is(target: Target, tmp_path: Path) -> None:
    weights = target.weights()
    spec = engine_spec(NgramDrafter(2, 4), weights, tmp_path)
    assert spec.config == {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    drafter = eagle3(weights, feedback="post")
    spec = engine_spec(drafter, weights, tmp_path)
    path = Path(spec.config["model"])
    assert (path / "model.safetensors").is_file() and path.name == drafter.info.fingerprint
    before = (path / "config.json").stat().st_mtime_ns
    engine_spec(drafter, weights, tmp_path)
    assert (path / "config.json").stat().st_mtime_ns == before, "written once"
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing half-written is left"


@pytest.mark.parametrize(
    ("switches", "match"),
    [({"gate": True}, "gated"), ({"windows": (64,), "sink": "bos"}, "sinks"), ({"fc_bias": True}, "fc bias")],
)
def test_what_vllm_cannot_express_is_refused(
    target: Target, tmp_path: Path, switches: dict[str, Any], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        engine_spec(eagle3(target.weights(), **switches), target.weights(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_dflash_is_exported_and_run_as_declared(target: Target, tmp_path: Path) -> None:
    weights = target.weights()

    def dflash(**switches: Any) -> DFlashDrafter:
        config = DFlashConfig.for_target(
            weights.info, taps=(2, 5), num_layers=2, mask_token_id=3, num_heads=4, num_kv_heads=2, head_dim=16,
            intermediate_size=32, **({"block_size": 5} | switches),
        )  # fmt: skip
        model = DFlashModel(config, weights)
        model.init_weights(torch.Generator().manual_seed(0))
        return DFlashDrafter(model, weights.info, "mine")

    # what an engine does by itself is in no file, so both come out the same
    for norm in ("own", "layer0"):
        spec = engine_spec(dflash(context_norm=norm), weights, tmp_path)
        assert spec.config["method"] == "dflash"
        again = load_dflash(spec.config["model"], weights).model
        assert again.config == dflash().model.config
        for name, tensor in dflash().model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)
    check_block(dflash(), 4, ())
    check_block(dflash(block_size=8, causal=(True, True)), 4, ())
    check_block(dflash(context_norm="layer0"), 4, ("dflash-k-norm",))
    with pytest.raises(UserError, match=r"vLLM runs depth \+ 1 = 4; give --depth 4, or the drafter @block=4"):
        check_block(dflash(), 3, ())
    with pytest.raises(UserError, match="leave context_norm=layer0 out"):
        check_block(dflash(context_norm="layer0"), 4, ())


def eagle3(weights: TargetWeights, **switches: Any) -> Eagle3Drafter:
    sizes = {"intermediate_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head": "target"}
    model = Eagle3Model(Eagle3Config.for_target(weights.info, **(sizes | switches)), weights)
    model.init_weights(torch.Generator().manual_seed(0))
    return Eagle3Drafter(model, weights.info, "mine")


def test_sampled_speculation_on_a_cpu_is_refused_or_named(target: Target) -> None:
    sampled = settings(sampling=Sampling(temperature=1.0), sampler="match")
    with pytest.raises(UserError, match="workaround=expand-batch"):
        VllmRunner(target, sampled, version="0.32.0")
    repaired = replace(sampled, options={"workaround": "expand-batch"})
    record = VllmRunner(target, repaired, version="0.32.0").record()
    assert record["defects"] == {"expand-batch": "worked round"}
    assert VllmRunner(target, sampled, version="0.99.0").record()["defects"] == {}


def test_defects_of_the_drafters_are_known_before_they_run(target: Target) -> None:
    runner = VllmRunner(target, settings(), version="0.32.0")
    runner.expect([NgramDrafter()])
    assert runner.record()["defects"] == {}
    runner.expect([SimpleNamespace(info=SimpleNamespace(kind="dflash"))])  # type: ignore[list-item]
    assert runner.record()["defects"]["dflash-k-norm"].startswith("present: ")


def test_the_workaround_expands_what_the_kernel_should_have() -> None:
    x, ends = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([2, 5, 6])
    found = engine_defects._expand_batch(x, ends, 6, replace_from=0, replace_to=1)
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7, 1.3]))
    top_k = engine_defects._expand_batch(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1, 3]), 3)
    assert top_k.tolist() == [0, 5, 5] and top_k.dtype == torch.int32


def test_defects_by_version_device_and_use() -> None:
    sampled = engine_defects.Use(method="eagle3", sampled=True)
    assert [d.name for d in engine_defects.known("0.32.0+cpu", "cpu", sampled)] == ["expand-batch"]
    assert not engine_defects.known("0.32.0", "cuda", sampled)
    dflash = engine_defects.check("0.32.0", "cpu", engine_defects.Use(method="dflash"), ())
    assert dflash["dflash-k-norm"].startswith("present: ")
    with pytest.raises(UserError, match="stops with an assertion"):
        engine_defects.check("0.32.0", "cpu", engine_defects.Use(synthetic=True), ())
    with pytest.raises(UserError, match="unknown workaround 'expand-bach'; did you mean 'expand-batch'"):
        engine_defects.check("0.32.0", "cpu", sampled, ("expand-bach",))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_num_seq": "4"}, "did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "0"}, "whole number"),
        ({"prefix_cache": "yes"}, "on or off"),
        ({"kv_gib": "much"}, "above 0"),
    ],
)
def test_bad_engine_options(options: dict[str, str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        read_options(options)


def test_without_vllm_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise vllm_start.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_start.metadata, "version", missing)
    with pytest.raises(UserError, match="pip install vllm"):
        engine_version()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_detail_is_asked_for_where_there_is_speculation_and_an_option(
    speculative: dict[str, Any] | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses the option without speculation; older versions do not have it."""
    names = ["model", *(["per_request_spec_decode_metrics"] if known else [])]
    module = SimpleNamespace(EngineArgs=make_dataclass("EngineArgs", names))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    made = vllm_start._arguments(replace(OPTIONS, speculative=speculative))
    assert ("per_request_spec_decode_metrics" in made) == (known and speculative is not None)


def test_a_failed_start_names_the_likely_cause() -> None:
    text = "operator torchvision::nms does not exist"
    assert "pip uninstall torchvision" in str(start_failure("RuntimeError", text, ["loading", ""]))
    assert "likely cause" not in str(start_failure("RuntimeError", "something else", []))
    pydantic = (
        "1 validation error for VllmConfig\n  Value error, too long [type=value_error, input_value=7]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
    )
    assert "(ValidationError: Value error, too long)" in str(start_failure("ValidationError", pydantic, []))


class Counting:
    """An engine of a version that keeps counters only: every step accepts 2 of 4, whatever the answer takes."""

    def __init__(self) -> None:
        self.left: dict[str, list[int]] = {}
        self.totals = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 7}

    def add_request(self, key: str, _prompt: Any, limit: int) -> None:
        assert not self.left, "counters tell nothing of two at a time"
        self.left[key] = [limit]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        ((key, (limit, *tokens)),) = self.left.items()
        if tokens:
            for name, count in (("drafts", 1), ("draft_tokens", 4), ("accepted_tokens", 2)):
                self.totals[name] += count
        tokens = [*tokens, *range(50, 53)][:limit] if tokens else [49]
        self.left[key] = [limit, *tokens]
        done = len(tokens) == limit
        if done:
            del self.left[key]
        completion = SimpleNamespace(token_ids=tokens, finish_reason="length")
        return [SimpleNamespace(request_id=key, outputs=[completion], finished=done, prompt_token_ids=[])]

    def get_metrics(self) -> list[Any]:
        return [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=count)
            for name, count in self.totals.items()
        ]


def test_counters_serve_where_there_is_nothing_better(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_start, "_params", lambda request, _sampling, _stops: request.max_tokens)

    def start(_options: EngineOptions, _defects: Mapping[str, str]) -> VllmEngine:
        engine = VllmEngine.__new__(VllmEngine)
        engine._engine = engine.llm = Counting()
        engine._clock = SimpleNamespace(seconds=0.0)  # type: ignore[assignment]
        engine._counts_only = True
        engine.close = lambda: None  # type: ignore[attr-defined]
        return engine

    drafter = eagle3(target.weights())
    runner = VllmRunner(target, settings(max_new_tokens=9), start=start, version="0.32.0")  # type: ignore[arg-type]
    for outcome in run(runner, {"mine": drafter}):
        assert not outcome.errors
        # nine tokens: 1 + 3 + 3 + 2, and the engine accepted one draft more than the user got
        rounds = [
            (r.num_accepted, r.engine_accepted, r.num_emitted, r.num_drafted)
            for r in outcome.rounds["mine", 4]
        ]
        assert rounds == [(2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 2, 4)]


# ---- the child process, with fake engines in it


CHILDREN = """
import os, time
from pathlib import Path

def dies(pipe, options, defects, log):
    Path(log).write_text("allocating\\ngone\\n")
    pipe.send(("ready",))
    pipe.recv()
    os.kill(os.getpid(), 9)

def refuses(pipe, options, defects, log):
    pipe.send(("failed", "ValueError", "No available memory for the cache blocks", ["profiling"]))

def hangs(pipe, options, defects, log):
    time.sleep(60)

def works(pipe, options, defects, log):
    Path(log).with_name("child.pid").write_text(str(os.getpid()))
    pipe.send(("ready",))
    time.sleep(300)
"""
KILLED = """
import os, tempfile
from specbench.runners.vllm_process import RemoteEngine
from specbench.runners.vllm_start import EngineOptions
import engine_children

if __name__ == "__main__":
    options = EngineOptions(
        model="m", dtype="float32", device="cpu", max_model_len=64, max_num_seqs=1, speculative=None
    )
    engine = RemoteEngine(options, {}, serve=engine_children.works)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a child runs must be a module it can import."""
    (tmp_path / "engine_children.py").write_text(CHILDREN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "engine_children", raising=False)
    return importlib.import_module("engine_children")


OPTIONS = EngineOptions(
    model="m", dtype="float32", device="cpu", max_model_len=64, max_num_seqs=1, speculative=None
)


def test_a_killed_engine_is_one_sentence(children: Any) -> None:
    engine = RemoteEngine(OPTIONS, {}, serve=children.dies)
    with pytest.raises(UserError, match="killed, most likely for memory.*allocating [|] gone"):
        list(engine.answer([], Sampling(), ()))
    engine.close()


def test_an_engine_that_refuses_is_one_sentence(children: Any) -> None:
    with pytest.raises(UserError, match="No available memory.*likely cause: too little memory.*profiling"):
        RemoteEngine(OPTIONS, {}, serve=children.refuses)


def test_an_engine_that_hangs_is_stopped(children: Any) -> None:
    with pytest.raises(UserError, match="no sign of life"):
        RemoteEngine(OPTIONS, {}, serve=children.hangs, start_seconds=1.0)


def test_the_engine_ends_with_a_run_that_is_killed(children: Any, tmp_path: Path) -> None:
    script = tmp_path / "killed_run.py"
    script.write_text(KILLED)
    path = os.pathsep.join((str(tmp_path), str(Path(specbench.__file__).parents[1])))
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        timeout=120,
    )
    assert ended.returncode == -9
    pid = int((tmp_path / "child.pid").read_text())
    deadline = time.monotonic() + 60
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid), "the engine outlives its run"
    assert not list(tmp_path.glob("specbench-engine-*.log"))


def _lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_environment_of_the_run_stays_as_it_was(children: Any) -> None:
    before = dict(os.environ)
    with pytest.raises(UserError):
        RemoteEngine(OPTIONS, {}, serve=children.refuses)
    assert dict(os.environ) == before
