"""Training MTP heads and DFlash drafters: losses against plain formulas, and the loop with either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.dflash import DFlashConfig, DFlashModel
from specbench.drafters.mtp import MtpConfig
from specbench.drafters.resolve import load_drafter
from specbench.drafters.training.data import load_batch
from specbench.drafters.training.kinds import LastState, TrainConfig, choose_mask, make_model, save
from specbench.drafters.training.step import ChainSetting, block_loss, chain_loss
from specbench.drafters.training.trainer import Trainer, TrainingData, TrainSetting
from specbench.types import TargetWeights

from .test_trainer import Killed, kill_at
from .toy import HALF, SIZES, Memory, make_example, make_target

SHARED: dict[str, Any] = {"head": "target_rows", "draft_vocab_size": len(HALF)}
EXAMPLES = [make_example(4, 10, seed) for seed in range(8)]
SETTING = TrainSetting(
    steps=6, chain=ChainSetting(depth=3, keep=0.7), batch_rows=40, precision="fp32", log_every=2, eval_every=3
)


def dflash_config(target: TargetWeights, **changes: Any) -> DFlashConfig:
    return DFlashConfig.for_target(
        target.info, **({"num_layers": 2, "block_size": 4, "mask_token_id": 3} | SIZES | SHARED | changes)
    )


def mtp_config(target: TargetWeights) -> MtpConfig:
    return MtpConfig.for_target(target.info, **{k: v for k, v in SIZES.items() if k != "taps"}, **SHARED)


def random_model(config: TrainConfig, target: TargetWeights) -> Any:
    model = make_model(config, target, HALF, torch.float64)
    model.init_weights(torch.Generator().manual_seed(1), 0.4)
    return model


def forward_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    p = teacher.softmax(-1)
    return (p * (p.log() - logits.log_softmax(-1))).sum(-1)


def test_block_loss_is_the_weighted_sum_of_divergences() -> None:
    target = make_target(torch.float64)
    model = random_model(dflash_config(target), target)
    assert isinstance(model, DFlashModel)
    source = Memory(torch.float64)
    examples = [make_example(3, 5, 1), make_example(2, 6, 2)]
    batch = load_batch(examples, source, [0, 1], device=torch.device("cpu"))
    head = target.head[list(HALF)]
    setting = ChainSetting(depth=3, decay=0.7)
    report = block_loss(model, batch, head, setting, normaliser=5.0)
    report.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}

    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    hits, counts = [0] * 3, [0] * 3
    for example in examples:
        states = source.read(example)
        for row in example.loss_rows("answer"):
            alone = load_batch([example], source, [0], device=torch.device("cpu"))
            context = model.context([t[: row + 1] for t in states.taps], torch.arange(row + 1))
            cut = replace(
                alone.packed, inputs=alone.packed.inputs[: row + 1], positions=alone.packed.positions[: row + 1],
                cu_seqlens=torch.tensor([0, row + 1]),
            )  # fmt: skip
            logits = model.logits(model.block(context, cut, torch.tensor([row]), backend="reference")[0])
            for step in range(1, 4):
                if row + step >= example.num_rows:
                    continue
                counts[step - 1] += 1
                label = example.ids[row + step + 1]
                hits[step - 1] += HALF[int(logits[step].argmax())] == label
                if label in HALF:
                    teacher = states.final[row + step] @ head.T
                    total = total + 0.7 ** (step - 1) / 5.0 * forward_kl(logits[step], teacher)
    total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(report.loss.double(), total.detach(), atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        # step weights are float32
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)
    assert report.hits.tolist() == hits and report.counts.tolist() == counts


def test_blocks_behind_a_share_of_the_rows_keep_the_expected_gradient() -> None:
    target = make_target(torch.float64)
    model = random_model(dflash_config(target), target)
    batch = load_batch(EXAMPLES, Memory(torch.float64), [0], device=torch.device("cpu"))
    head = target.head[list(HALF)]

    def gradient(keep: float, seed: int) -> torch.Tensor:
        model.zero_grad()
        g = torch.Generator().manual_seed(seed)
        block_loss(
            model, batch, head, ChainSetting(depth=3, keep=keep), normaliser=1.0, generator=g
        ).loss.backward()
        return model.fc.weight.grad.clone()  # type: ignore[no-any-return]

    whole = gradient(1.0, 0)
    some = torch.stack([gradient(0.5, seed) for seed in range(80)])
    error = some.std(0).norm() / 80**0.5
    assert (some.mean(0) - whole).norm() < 3 * error


def test_an_mtp_head_learns_from_the_state_behind_the_final_norm() -> None:
    """One chain of one step by hand: the first input is the target's normed state, untouched."""
    target = make_target(torch.float64)
    model = random_model(mtp_config(target), target)
    source = LastState(Memory(torch.float64))
    batch = load_batch(EXAMPLES, source, [0], device=torch.device("cpu"))
    (state,) = batch.packed.taps
    assert torch.equal(model.fuse(batch.packed.taps), state) and torch.equal(state, batch.final)
    head = target.head[list(HALF)]
    report = chain_loss(model, batch, head, ChainSetting(depth=2), normaliser=1.0)
    assert report.counts.tolist() == [len(batch.rows), len(batch.rows) - 1]
    report.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_the_loop_trains_resumes_and_leaves_a_drafter(kind: str, tmp_path: Path) -> None:
    target = make_target()
    config: TrainConfig = dflash_config(target) if kind == "dflash" else mtp_config(target)
    data = TrainingData(examples=EXAMPLES[:6], held_out=EXAMPLES[6:], source=Memory())

    def trainer(name: str, steps: int) -> Trainer:
        return Trainer(config, HALF, target, data, replace(SETTING, steps=steps), tmp_path / name)

    whole = trainer("whole", 6)
    before = [p.detach().clone() for p in whole.model.parameters()]
    whole.run()
    assert whole.log[-1].split == "held_out" and whole.log[-1].accepted_per_round is not None
    assert bool(whole.log[-1].rms) == (kind == "mtp")
    changed = [not torch.equal(b, p) for b, p in zip(before, whole.model.parameters(), strict=True)]
    assert all(changed)
    part = trainer("part", 6)
    part.setting = replace(SETTING, steps=6, checkpoint_minutes=0.0)
    with pytest.raises(Killed):
        part.run(kill_at(4))
    resumed = trainer("part", 6)
    assert 0 < resumed.step < 6
    resumed.run()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    save(whole.model, tmp_path / "saved")
    drafter = load_drafter(str(tmp_path / "saved"), target)
    assert drafter.info.kind == kind


def test_the_mask_is_a_token_that_nobody_uses() -> None:
    examples = [make_example(4, 200, seed) for seed in range(3)]
    used = {t for e in examples for t in e.ids}
    assert choose_mask(examples, 40, (23,)) == min(set(range(40)) - used - {23})
