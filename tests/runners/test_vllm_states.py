"""Traces from an engine: a fake one writes the files that vLLM writes, and the traces must be the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specbench.config import RunConfig
from specbench.errors import UserError
from specbench.runners import packed, vllm_engine
from specbench.runners.answers import Answerer
from specbench.runners.pipeline import Observer
from specbench.runners.runner import RunSettings
from specbench.runners.targets import Target
from specbench.runners.trace_pack import TracePack
from specbench.runners.vllm_engine import VllmRunner
from specbench.runners.vllm_start import EngineAnswer, EngineOptions, Request
from specbench.runners.vllm_states import EngineAnswerer
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span, Trace

CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")
SETTINGS = RunSettings(depths=(3,), sampling=Sampling(), sampler="greedy", max_new_tokens=12, batch_size=4)
TAPS = (2, 5)


def prompts(count: int) -> list[RenderedPrompt]:
    return [
        RenderedPrompt(
            prompt_id=f"t/{i}", suite="t", category="", turn=0, condition=CLEAN, token_ids=(1, *range(30, 34 + i)),
            spans=(Span(kind="user", start=0, end=5 + i),), bos_count=1, template_hash="",
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu", dtype="float32")


class Writing:
    """Answers with the target's own model and writes its states as the connector does."""

    target: Target
    wrong_tokens = False

    def __init__(self, options: EngineOptions, defects: Mapping[str, str] | None = None) -> None:
        speculative = options.speculative
        assert speculative is not None and speculative["method"] == "extract_hidden_states"
        self.layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        connector = options.extra["kv_transfer_config"]
        self.folder = Path(connector["kv_connector_extra_config"]["shared_storage_path"])
        self.closed = False

    def answer(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: Callable[[int], None] = lambda _n: None,
    ) -> Iterator[EngineAnswer]:
        asked = {r.key: r for r in requests}
        shape = prompts(1)[0]
        made = [
            replace(shape, prompt_id=key, token_ids=r.token_ids, max_new_tokens=r.max_tokens)
            for key, r in asked.items()
        ]
        for trace in Answerer(self.target, taps=self.layers, max_new_tokens=12).answer(made):
            request = asked[trace.prompt.prompt_id]
            kept = trace.ids[:-1] if request.states == "answer" else request.token_ids
            states = torch.stack([trace.taps[layer][: len(kept)] for layer in self.layers], dim=1)
            file = self.folder / f"{request.key}.safetensors"
            ids = torch.tensor(kept) + int(self.wrong_tokens)
            save_file({"hidden_states": states.contiguous(), "token_ids": ids}, file)
            Path(f"{file}.lock").touch()
            on_tokens(len(trace.answer_ids))
            yield EngineAnswer(
                key=request.key, prompt_ids=request.token_ids, token_ids=trace.answer_ids, finish=trace.finish,
                emitted=(), records=None, states=str(file),
            )  # fmt: skip

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def answerer(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineAnswerer]:
    monkeypatch.setattr(Writing, "target", target, raising=False)
    runner = VllmRunner(target, SETTINGS, start=Writing, version="0.32.0")  # type: ignore[arg-type]
    made = EngineAnswerer(runner, TAPS)
    yield made
    made.close()


def check_same(found: Trace, expected: Trace) -> None:
    assert (found.answer_ids, found.finish, found.path) == (
        expected.answer_ids,
        expected.finish,
        expected.path,
    )
    assert set(found.taps) == set(TAPS)
    for tap in TAPS:
        torch.testing.assert_close(found.taps[tap], expected.taps[tap], rtol=1e-5, atol=1e-5)
    for name in ("logprobs", "margins", "entropies"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


def test_traces_are_the_models_own(target: Target, answerer: EngineAnswerer) -> None:
    expected = {t.prompt.key: t for t in Answerer(target, taps=TAPS, max_new_tokens=12).answer(prompts(3))}
    found = list(answerer.answer(prompts(3)))
    assert len(found) == 3
    for trace in found:
        check_same(trace, expected[trace.prompt.key])
    folder = Path(answerer._folder.name)
    assert not list(folder.iterdir()), "states are large: none stays behind"
    answerer.close()
    assert not folder.exists()


def test_a_given_answer_is_traced_in_one_pass(target: Target, answerer: EngineAnswerer) -> None:
    answer = (40, 41, 42)
    expected = Answerer(target, taps=TAPS, max_new_tokens=12).force(prompts(1)[0], answer, "stop")
    found = answerer.force(prompts(1)[0], answer, "stop")
    assert bool((found.margins < 0).any()), "the target would have said something else"
    check_same(found, expected)


def test_an_answer_ends_at_its_stop_strings(target: Target, answerer: EngineAnswerer) -> None:
    (plain,) = Answerer(target, taps=TAPS, max_new_tokens=12).answer(prompts(1))
    text = target.tokenizer.decode(list(plain.answer_ids[3:5]))
    asked = [replace(prompts(1)[0], stop_strings=(text,))]
    (expected,) = Answerer(target, taps=TAPS, max_new_tokens=12).answer(asked)
    assert len(expected.answer_ids) < len(plain.answer_ids)
    (found,) = answerer.answer(asked)
    check_same(found, expected)


def test_states_of_other_tokens_are_refused(
    answerer: EngineAnswerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writing, "wrong_tokens", True)
    with pytest.raises(UserError, match="gave the states of"):
        list(answerer.answer(prompts(1)))


def test_an_engine_that_does_not_start_is_tried_once(target: Target) -> None:
    tries = []

    def start(_options: EngineOptions, _defects: Mapping[str, str]) -> Any:
        tries.append(1)
        raise UserError("vLLM does not start")

    answerer = EngineAnswerer(VllmRunner(target, SETTINGS, start=start, version="0.32.0"), TAPS)
    for _ in range(3):
        with pytest.raises(UserError, match="does not start"):
            list(answerer.answer(prompts(1)))
    assert len(tries) == 1
    answerer.close()


def test_a_law_behind_the_head_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.model.config, "final_logit_softcapping", 30.0, raising=False)
    with pytest.raises(UserError, match="sets final_logit_softcapping"):
        EngineAnswerer(VllmRunner(target, SETTINGS, version="0.32.0"), TAPS)


def test_a_pack_made_by_an_engine_is_the_pack_made_here(
    tiny_target_path: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writing, "target", target, raising=False)
    monkeypatch.setattr(vllm_engine, "RemoteEngine", Writing)
    monkeypatch.setattr(vllm_engine, "engine_version", lambda: "0.32.0")
    packs = []
    for name in ("replay", "vllm"):
        config = RunConfig(
            suite=("mini",), perturb=("template/regular",), target=str(tiny_target_path), limit=2, dtype="float32",
            max_new_tokens=6, runner=name, device="cpu", out=str(tmp_path / name),
        )  # fmt: skip
        report = packed.trace(config, Observer(), taps=TAPS)
        assert report is not None and not report.failures
        packs.append(TracePack(tmp_path / name))
    ours, theirs = packs
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.prompt.key == other.prompt.key
        check_same(other, one)
