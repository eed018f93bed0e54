"""Replay = decode, round by round, for drafters other than EAGLE-3: blocks and multi-token heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbench.drafters.dflash import DFlashConfig, DFlashModel
from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.mtp import MtpConfig, MtpModel
from specbench.drafters.mtp_drafter import MtpDrafter
from specbench.runners.agreement import Agreement
from specbench.runners.decode import DecodeRunner
from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import RunSettings, Work
from specbench.runners.targets import Target
from specbench.types import Drafter, RenderedPrompt, Sampler, Sampling, Span

from .test_agreement import VOCAB, prompts

DEPTH = 4


def short_prompts(count: int) -> list[RenderedPrompt]:
    """``count`` different prompts of at most 16 tokens."""
    return [
        replace(p, token_ids=p.token_ids[: 5 + i % 12], spans=(Span(kind="user", start=0, end=5 + i % 12),))
        for i, p in enumerate(prompts(count))
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A tiny vocabulary, so that random drafters are accepted now and then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("agreement") / "target"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)

    class Tokenizer:
        bos_token_id, eos_token_id = 1, 2

    return Target.wrap(model, Tokenizer(), name="tiny", path=path)


def dflash(target: Target, seed: int, **changes: Any) -> Drafter:
    weights = target.weights()
    sizes: dict[str, Any] = {
        "taps": (2, 4), "num_layers": 2, "block_size": 5, "mask_token_id": 3, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "intermediate_size": 24,
    }  # fmt: skip
    model = DFlashModel(DFlashConfig.for_target(weights.info, **(sizes | changes)), weights)
    model.init_weights(torch.Generator().manual_seed(seed), std=0.5)
    return DFlashDrafter(model, weights.info, f"dflash-{seed}")


def mtp(target: Target, seed: int) -> Drafter:
    weights = target.weights()
    config = MtpConfig.for_target(
        weights.info, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24, mask_first=seed % 2 == 0
    )
    model = MtpModel(config, weights)
    model.init_weights(torch.Generator().manual_seed(seed), std=0.5)
    return MtpDrafter(model, weights.info, f"mtp-{seed}")


KINDS: dict[str, Callable[[Target, int], Drafter]] = {
    "dflash": lambda target, seed: dflash(target, seed),
    "dflash-window": lambda target, seed: dflash(target, seed, windows=(6, 6), causal=(True, True)),
    "mtp": mtp,
    "dflash-defect": lambda target, seed: dflash(target, seed, context_norm="layer0"),
}


def settings(sampler: Sampler) -> RunSettings:
    return RunSettings(
        depths=(DEPTH,),
        sampling=Sampling(temperature=0.0 if sampler == "greedy" else 0.9),
        sampler=sampler,
        max_new_tokens=12,
        batch_size=8,
    )


def candidates(target: Target, kind: str) -> Iterator[Drafter]:
    """Random drafters: rounds of one that is never right would prove nothing."""
    return (KINDS[kind](target, seed) for seed in range(40))


def rounds(target: Target, drafter: Drafter, count: int, sampler: Sampler, runner: Any) -> list[Any]:
    work = [Work(prompt=p, drafters=("it",)) for p in short_prompts(count)]
    outcomes = list(runner(target, settings(sampler)).run(work, {"it": drafter}, lambda _n: None))
    assert not any(o.errors for o in outcomes)
    return outcomes


def num_accepted(outcomes: list[Any]) -> int:
    return sum(r.num_accepted for o in outcomes for r in o.rounds["it", DEPTH])


@pytest.mark.parametrize("sampler", ["greedy", "match"])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_decode_on_forty_prompts(target: Target, kind: str, sampler: Sampler) -> None:
    drafter = next(
        d for d in candidates(target, kind) if num_accepted(rounds(target, d, 4, "greedy", ReplayRunner)) > 2
    )
    count = 40 if sampler == "greedy" else 6
    replayed = {o.work.prompt.key: o for o in rounds(target, drafter, count, sampler, ReplayRunner)}
    for decoded in rounds(target, drafter, count, sampler, DecodeRunner):
        assert Agreement().add(replayed[decoded.work.prompt.key], decoded, "it", DEPTH) is None
        emitted = sum(r.num_emitted for r in decoded.rounds["it", DEPTH])
        assert 1 + emitted == len(decoded.answer_ids)
    assert num_accepted(list(replayed.values())) > 0
