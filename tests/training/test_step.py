"""The training step against a naive drafter: values, gradients, what is left out, and what scoring says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.training.data import load_batch
from specbench.drafters.training.evaluate import evaluate, to_trace
from specbench.drafters.training.recipe import ARMS as ALL_ARMS
from specbench.drafters.training.step import ChainSetting, chain_loss
from specbench.types import ScoreRequest

from ..drafters.eagle3_reference import Naive  # noqa: TID252 - tests are no package
from .toy import HALF, TAPS, VOCAB, Memory, make_example, make_model, make_target

ARMS = {name: switches for name, switches in ALL_ARMS.items() if name.startswith("eagle3")}

CPU = torch.device("cpu")
SETTING = ChainSetting(depth=3)


def naive_loss(
    model: Any, target: Any, examples: list[Any], source: Memory, setting: ChainSetting
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss written out: one chain, one position, one token at a time."""
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    head = weights.get("lm_head.weight", target.head[list(HALF)])
    total = torch.zeros((), dtype=torch.float64)
    num_rows = sum(len(e.answer_ids) - 1 for e in examples)
    for example in examples:
        states = source.read(example)
        size, length = len(example.prompt_ids), len(example.ids)
        for row in range(size - 1, length - 2):
            naive = Naive(model.config, weights, target.embed, head, (0, 0))
            feed = list(example.ids[row + 2 : length - 1])
            steps = naive.chain(
                list(example.ids), list(states.taps), row + 1, setting.depth, feed, list(HALF)
            )
            for i, logits in enumerate(steps, start=1):
                # step i of the chain on this row foresees the token after position row + i
                if int(states.top[row + i]) not in HALF:
                    continue
                p = (states.final[row + i] @ target.head[list(HALF)].T).softmax(-1)
                kl = (p * (p.log() - logits.log_softmax(-1))).sum()
                total = total + setting.decay ** (i - 1) * kl / num_rows
    return total, weights


@pytest.mark.parametrize("arm", [*ARMS, "own-head"])
def test_loss_and_gradients_equal_the_naive_ones(arm: str) -> None:
    target, source = make_target(torch.float64), Memory(torch.float64)
    switches = {"head": "own"} if arm == "own-head" else dict(ARMS[arm])
    model = make_model(target, **switches)
    examples = [make_example(4, 5, 1), make_example(2, 6, 2)]
    batch = load_batch(examples, source, [0, 1], device=CPU)
    report = chain_loss(model, batch, target.head[list(HALF)], SETTING, normaliser=len(batch.rows))
    report.loss.backward()
    expected, weights = naive_loss(model, target, examples, source, SETTING)
    expected.backward()
    torch.testing.assert_close(report.loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = float(weights[name].grad.abs().max())
        # rotary tables and row weights are float32
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_tokens_outside_the_draft_vocabulary_teach_nothing() -> None:
    target, source = make_target(), Memory()
    model = make_model(target)
    example = make_example(3, 8, 5)
    even = type(example)(id="even", prompt_ids=example.prompt_ids, answer_ids=tuple(range(0, VOCAB, 2))[:8])
    batch = load_batch([even], source, [0], device=CPU)
    report = chain_loss(model, batch, target.head[list(HALF)], SETTING, normaliser=1.0)
    report.loss.backward()
    assert float(report.loss.detach()) == 0.0
    assert all(not p.grad.any() for p in model.parameters())
    assert report.hits.sum() == 0 and report.counts.tolist() == [7, 6, 5]


def test_dropping_chains_keeps_the_expected_gradient() -> None:
    target, source = make_target(), Memory()
    model = make_model(target)
    examples = [make_example(3, 12, seed) for seed in range(4)]
    batch = load_batch(examples, source, [0, 1, 2, 3], device=CPU)
    head = target.head[list(HALF)]

    def gradient(keep: float, seed: int) -> torch.Tensor:
        model.zero_grad()
        chain_loss(
            model,
            batch,
            head,
            ChainSetting(depth=3, keep=keep),
            normaliser=len(batch.rows),
            generator=torch.Generator().manual_seed(seed),
        ).loss.backward()
        return model.layers[0].mlp.down_proj.weight.grad.clone()

    full = gradient(1.0, 0)
    draws = torch.stack([gradient(0.6, seed) for seed in range(120)])
    error = (draws.mean(0) - full).norm() / full.norm()
    # the spread of single draws, over the square root of their number
    spread = (draws - full).flatten(1).norm(dim=1).mean() / full.norm() / 120**0.5
    assert spread > 0.005
    assert error < 3 * spread


@pytest.mark.parametrize("arm", ARMS)
def test_training_accuracy_is_replays_forced_accuracy(arm: str) -> None:
    target, source, depth = make_target(), Memory(), 5
    model = make_model(target, seed=3, **ARMS[arm])
    # answers that the drafter sometimes foresees: greedy continuations of its own at step 1
    examples = [make_example(4, 30, seed) for seed in range(6)]
    batch = load_batch(examples, source, range(6), device=CPU)
    report = chain_loss(
        model, batch, target.head[list(HALF)], ChainSetting(depth=depth), normaliser=len(batch.rows)
    )
    drafter = Eagle3Drafter(model, target.info, "toy")
    traces = [to_trace(e, source, TAPS, torch.float32) for e in examples]
    forced = torch.cat([s.forced for s in drafter.score(traces, ScoreRequest(depth=depth, full_chains=True))])
    assert report.hits.tolist() == (forced == 1).sum(0).tolist()
    assert report.counts.tolist() == (forced >= 0).sum(0).tolist()
    assert report.hits.sum() > 10
    held_out = evaluate(model, target.info, examples, source, depth=depth)
    expected = (report.hits / report.counts).tolist()
    assert held_out.accuracy == pytest.approx(expected)


def test_held_out_rounds_cover_the_answer() -> None:
    target, source = make_target(), Memory()
    examples = [make_example(4, 20, seed) for seed in range(5)]
    report = evaluate(make_model(target), target.info, examples, source, depth=4)
    tokens = sum(len(e.answer_ids) for e in examples)
    accepted = report.accepted_per_round * report.rounds
    # the prefill gives one token an answer; each round its accepted ones and one more, unless the answer ends inside
    assert tokens - 2 * len(examples) <= accepted + report.rounds <= tokens
    assert report.accepted_per_round == pytest.approx(sum(report.marginal))
    assert len(report.rms) == 4 and report.growth == pytest.approx(report.rms[-1] / report.rms[0])
