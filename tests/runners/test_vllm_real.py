"""The engine itself: its rounds against replay's, its sampled law against the target's. Two starts, more on request."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.dflash import DFlashConfig, DFlashModel
from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.ngram import NgramDrafter
from specbench.drafters.resolve import load_drafter
from specbench.runners.answers import Answerer
from specbench.runners.cross_check import Pair, cross_check, make_runners
from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.targets import Target
from specbench.runners.vllm_engine import VllmRunner
from specbench.runners.vllm_process import RemoteEngine
from specbench.runners.vllm_start import EngineOptions
from specbench.runners.vllm_states import EngineAnswerer
from specbench.types import ConditionInfo, Drafter, RenderedPrompt, Sampling
from tests.conftest import make_llama, make_tokenizer
from tests.runners.test_verdict import edit_config, remove_fc_norm, shift_map

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")
VOCAB, DEPTH, ANSWER = 24, 3, 4
GREEDY = RunSettings(depths=(DEPTH,), sampling=Sampling(), sampler="greedy", max_new_tokens=24, batch_size=4)
SAMPLED = RunSettings(
    depths=(DEPTH,), sampling=Sampling(temperature=1.0, seed=5), sampler="rejection", max_new_tokens=ANSWER,
    batch_size=64, options={"workaround": "expand-batch", "max_num_seqs": "64"},
)  # fmt: skip


def prompt(name: str, token_ids: tuple[int, ...]) -> RenderedPrompt:
    return RenderedPrompt(
        prompt_id=name, suite="t", category="", turn=0, condition=CLEAN, token_ids=token_ids, spans=(),
        bos_count=0, template_hash="",
    )  # fmt: skip


def chats(target: Target) -> list[RenderedPrompt]:
    asked = []
    for i, text in enumerate(("Name the days of the week.", "What is 12 times 7?", "Count to ten, twice.")):
        chat = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        asked.append(prompt(f"t/{i}", tuple(chat)))
    return asked


def compared(target: Target, drafters: dict[str, Drafter]) -> Iterator[Pair]:
    """Replay and the engine on three chats."""
    runners = make_runners(("replay", "vllm"), target, GREEDY)
    yield from cross_check(target, chats(target), drafters, GREEDY, runners)


def check_agreement(pair: Pair) -> None:
    assert pair.agrees, (pair.failures, pair.differences)
    assert pair.agreement.answers == 3
    assert pair.agreement.equal >= pair.agreement.rounds - len(pair.differences) > 10


def test_the_engine_counts_what_replay_counts(smollm2_path: Path) -> None:
    target = Target.load(str(smollm2_path), device="cpu", dtype="float32")
    drafter = load_drafter("zoo:eagle3.1", target.weights())
    (pair,) = compared(target, {"zoo:eagle3.1": drafter})
    check_agreement(pair)


@pytest.mark.slow
def test_prompt_lookup_counts_silent_rounds_in_the_engine_too(smollm2_path: Path) -> None:
    target = Target.load(str(smollm2_path), device="cpu", dtype="float32")
    (pair,) = compared(target, {"ngram": NgramDrafter(1, 3)})
    check_agreement(pair)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's synthetic mode needs a GPU")
def test_a_chosen_acceptance_length_comes_out(smollm2_path: Path) -> None:
    """vLLM accepts by decree; the scripted engine of test_vllm_engine.py does the same without a GPU."""
    target = Target.load(str(smollm2_path), device="cuda", dtype="float32")
    drafter = load_drafter(f"draft-lm={smollm2_path}", target.weights())

    def start(options: EngineOptions, defects: Mapping[str, str]) -> RemoteEngine:
        decree = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
        return RemoteEngine(replace(options, speculative={**(options.speculative or {}), **decree}), defects)

    longer = replace(GREEDY, max_new_tokens=256)
    runner = VllmRunner(target, longer, start=start)
    work = [Work(prompt=p, drafters=("draft-lm",)) for p in chats(target)]
    try:
        outcomes = list(runner.run(work, {"draft-lm": drafter}, lambda _n: None))
    finally:
        runner.close()
    rounds = [r for o in outcomes for r in o.rounds["draft-lm", DEPTH] if not r.cut]
    assert len(rounds) > 100
    assert sum(r.num_accepted for r in rounds) / len(rounds) + 1 == pytest.approx(2.5, abs=0.25)


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "taps": (edit_config(eagle_aux_hidden_state_layer_ids=[3, 16, 28]), "taps", "taps (3, 16, 28)"),
    "d2t": (shift_map, "vocabulary map", "d2t off by +1"),
    "norm_output": (edit_config(norm_output=False), "norm flags", "norm_output read as false"),
    "fc_norm": (remove_fc_norm, "norm flags", "fc_norm not applied"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_export_is_caught_on_the_engine(smollm2_path: Path, tmp_path: Path, name: str) -> None:
    """The engine gets a damaged copy of the files; ``agree`` must say which damage."""
    break_it, kind, text = BROKEN[name]
    target = Target.load(str(smollm2_path), device="cpu", dtype="float32")
    drafter = load_drafter("zoo:eagle3.1", target.weights())
    assert drafter.info.taps == (2, 15, 27)
    broken = tmp_path / "broken"

    def start(options: EngineOptions, defects: Mapping[str, str]) -> RemoteEngine:
        assert options.speculative is not None
        shutil.copytree(options.speculative["model"], broken)
        break_it(broken)
        return RemoteEngine(
            replace(options, speculative={**options.speculative, "model": str(broken)}), defects
        )

    longer = replace(GREEDY, max_new_tokens=48)
    runners = {"replay": ReplayRunner(target, longer), "vllm": VllmRunner(target, longer, start=start)}
    (pair,) = cross_check(target, chats(target), {"zoo:eagle3.1": drafter}, longer, runners)
    assert broken.is_dir() and not pair.failures
    wrong = [d for d in pair.differences if not d.explained]
    assert wrong, "the break changed nothing: this test would prove nothing"
    assert {d.kind for d in wrong} == {kind}, wrong
    assert all(text in d.verdict for d in wrong)


# ---- sampling, on a target small enough to know every answer's probability


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and another model of the same vocabulary."""
    made = {}
    for name, seed in (("target", 1), ("drafter", 2)):
        made[name] = tmp_path_factory.mktemp("sampled") / name
        model = make_llama(
            VOCAB,
            seed,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.2,
        )
        model.save_pretrained(made[name])
        make_tokenizer().save_pretrained(made[name])
    return made


def sampled(target: Target, drafter: Drafter, count: int) -> list[Outcome]:
    runner = VllmRunner(target, SAMPLED)
    work = [Work(prompt=prompt(f"t/{i}", (1, 7, 9)), drafters=("draft-lm",)) for i in range(count)]
    try:
        outcomes = list(runner.run(work, {"draft-lm": drafter}, lambda _n: None))
    finally:
        runner.close()
    assert not any(o.errors for o in outcomes), outcomes[0].errors
    assert runner.record()["defects"] == {"expand-batch": "worked round"}
    return outcomes


def answer_law(
    target: Target, ids: tuple[int, ...], answer: tuple[int, ...] = ()
) -> Iterator[tuple[Any, float]]:
    """Every answer and its probability, from the model alone."""
    if len(answer) == ANSWER - 1 or (answer and answer[-1] in target.stop_ids):
        yield answer, 1.0
        return
    with torch.inference_mode():
        law = torch.softmax(target.model(torch.tensor([[*ids, *answer]])).logits[0, -1].double(), -1)
    for token, p in enumerate(law.tolist()):
        # answers below this are pooled anyway
        if p > 1e-3:
            yield from ((rest, p * q) for rest, q in answer_law(target, ids, (*answer, token)))


def test_sampled_answers_follow_the_targets_law(tiny: dict[str, Path]) -> None:
    """Another model drafts: its accepted tokens and the residual draws together must have the target's law."""
    from scipy import stats

    target = Target.load(str(tiny["target"]), device="cpu", dtype="float32")
    drafter = load_drafter(f"draft-lm={tiny['drafter']}", target.weights())
    count = 2000
    outcomes = sampled(target, drafter, count)
    rounds = [r for o in outcomes for r in o.rounds["draft-lm", DEPTH]]
    accepted = sum(r.num_accepted for r in rounds) / len(rounds)
    assert 0.1 < accepted < 2, "both ways of making a token must have been taken"
    seen = Counter(o.answer_ids[: ANSWER - 1] for o in outcomes)
    expected = {a: p * count for a, p in answer_law(target, (1, 7, 9)) if p * count >= 5}
    observed = [seen[a] for a in expected]
    rest = count - sum(observed), count - sum(expected.values())
    found = stats.chisquare([*observed, rest[0]], [*expected.values(), rest[1]])
    assert len(expected) > 20
    assert found.pvalue > 1e-3, found


@pytest.mark.slow
def test_dflash_counts_what_replay_counts(tiny: dict[str, Path]) -> None:
    """A drafter of random weights: with so few tokens it is right now and then. Modelled as this engine runs it."""
    target = Target.load(str(tiny["target"]), device="cpu", dtype="float32")
    weights = target.weights()
    config = DFlashConfig.for_target(
        weights.info, taps=(1, 2), num_layers=2, block_size=DEPTH + 1, mask_token_id=3, num_heads=2,
        num_kv_heads=1, head_dim=32, intermediate_size=64, context_norm="layer0",
    )  # fmt: skip
    model = DFlashModel(config, weights)
    model.init_weights(torch.Generator().manual_seed(3), std=0.2)
    drafter = DFlashDrafter(model.requires_grad_(False), weights.info, "dflash")
    longer = replace(GREEDY, max_new_tokens=60)
    asked = [prompt(f"t/{i}", (1, 7 + i, 9, 11 + i)) for i in range(6)]
    runners = make_runners(("replay", "vllm"), target, longer)
    (pair,) = cross_check(target, asked, {"dflash": drafter}, longer, runners)
    assert pair.agrees, (pair.failures, pair.differences)
    assert pair.agreement.rounds > 100
    assert 60 * pair.agreement.answers > 1.05 * pair.agreement.rounds, "some drafts must have been right"


@pytest.mark.slow
def test_traces_of_the_engine_are_those_of_the_model(tiny: dict[str, Path]) -> None:
    target = Target.load(str(tiny["target"]), device="cpu", dtype="float32")
    asked = [prompt(f"t/{i}", (1, 7 + i, *range(3, 3 + 6 * i))) for i in range(3)]
    taps = (0, 1, 2)
    ours = {t.prompt.key: t for t in Answerer(target, taps=taps, max_new_tokens=24).answer(asked)}
    runner = VllmRunner(target, GREEDY)
    answerer = EngineAnswerer(runner, taps)
    try:
        for trace in [*answerer.answer(asked), answerer.force(asked[1], (5, 6, 7, 8), "length")]:
            expected = ours[trace.prompt.key]
            if trace.path == "forced":
                expected = Answerer(target, taps=taps, max_new_tokens=24).force(
                    asked[1], (5, 6, 7, 8), "length"
                )
            assert trace.answer_ids == expected.answer_ids and trace.finish == expected.finish
            for tap in taps:
                torch.testing.assert_close(trace.taps[tap], expected.taps[tap], rtol=1e-4, atol=1e-4)
            for name in ("logprobs", "margins", "entropies"):
                torch.testing.assert_close(
                    getattr(trace, name), getattr(expected, name), rtol=1e-3, atol=1e-3
                )
    finally:
        answerer.close()


@pytest.mark.slow
def test_a_target_that_drafts_for_itself_accepts_everything(tiny: dict[str, Path]) -> None:
    target = Target.load(str(tiny["target"]), device="cpu", dtype="float32")
    drafter = load_drafter(f"draft-lm={tiny['target']}", target.weights())
    for outcome in sampled(target, drafter, 64):
        for entry in outcome.rounds["draft-lm", DEPTH]:
            assert entry.engine_accepted == entry.num_drafted
