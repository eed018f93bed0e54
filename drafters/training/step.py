"""One training step's loss: the chains of scoring, with the loss behind every draft step.

Example:
    report = chain_loss(model, batch, teacher_head, ChainSetting(depth=4), normaliser=len(batch.rows))
    report.loss.backward()
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.drafters.chains import run_chains
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.training.data import Batch
from specbench.drafters.training.loss import linear_kl, teacher_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSetting:
    """How chains are trained."""

    depth: int = 4
    """Train-time test: steps of every chain."""
    decay: float = 0.8
    """Step i weighs decay^(i-1)."""
    keep: float = 1.0
    """Share of the chains that go on after each step, drawn at random; those that do weigh 1/keep more, so the
    expected gradient stays the same while later steps cost less."""
    backend: str = "auto"
    """Of ``chain_attention``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReport:
    """What one batch gave."""

    loss: Tensor
    """Scalar with a graph."""
    kl: Tensor
    """[depth] sum of unweighted KL over the counted rows of each step; 0 where not asked for."""
    hits: Tensor
    """[depth] int64 rows whose most probable token is the target's."""
    counts: Tensor
    """[depth] int64 rows that took part in each step, whether or not the draft vocabulary holds their token."""


class _Learner:
    """The ``on_step`` of training."""

    def __init__(
        self,
        model: Eagle3Model,
        batch: Batch,
        teacher_head: Tensor,
        setting: ChainSetting,
        normaliser: float,
        generator: torch.Generator | None,
        with_loss: bool,
    ) -> None:
        self.model, self.batch, self.setting = model, batch, setting
        self.normaliser, self.generator, self.with_loss = normaliser, generator, with_loss
        device = batch.rows.device
        # a row is judged by up to ``depth`` chains, so every target law is made once
        labels = torch.zeros(batch.top.shape[0], dtype=torch.bool, device=device)
        for step in range(1, setting.depth + 1):
            inside = batch.rows + step <= batch.packed.last[batch.rows]
            labels[(batch.rows + step)[inside]] = True
        rows = labels.nonzero().flatten()
        self.law = torch.full_like(batch.top, -1)
        self.law[rows] = torch.arange(rows.numel(), device=device)
        self.probs = teacher_probs(batch.final[rows], teacher_head)
        self.counted = model.draft_ids[batch.top.clamp(min=0)] >= 0
        self.loss: Tensor | None = None
        self.kl = torch.zeros(setting.depth, device=device)
        self.hits = torch.zeros(setting.depth, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.hits)

    def __call__(self, step: int, active: Tensor, post: Tensor) -> Tensor | None:
        label_rows = self.batch.rows[active] + step
        labels = self.model.draft_ids[self.batch.packed.inputs[label_rows]]
        setting = self.setting
        weight = (setting.decay / setting.keep) ** (step - 1) / self.normaliser
        scale = self.counted[label_rows].float() * weight
        out = linear_kl(
            post, self.model.head_weight(), self.probs, self.law[label_rows], scale, with_loss=self.with_loss
        )
        self.loss = out.loss if self.loss is None else self.loss + out.loss
        self.kl[step - 1] = out.loss.detach() / weight
        self.hits[step - 1] = (out.best == labels).sum()
        self.counts[step - 1] = active.numel()
        if setting.keep == 1.0 or step == setting.depth:
            return None
        assert self.generator is not None, "keep below 1 draws"
        draw = torch.rand(active.numel(), generator=self.generator) < setting.keep
        return draw.to(active.device)


def chain_loss(
    model: Eagle3Model,
    batch: Batch,
    teacher_head: Tensor,
    setting: ChainSetting,
    *,
    normaliser: float,
    generator: torch.Generator | None = None,
    with_loss: bool = True,
) -> StepReport:
    """Run every chain of a batch to full depth on the target's own tokens and compare each step with the target's law.

    The loss is sum over steps i and rows of decay^(i-1) KL / normaliser; rows whose most probable target token lies
    outside the draft vocabulary are left out, as EAGLE-3 does.

    Args:
        model: the drafter, in the dtype that computes.
        batch: one pack.
        teacher_head: [Vd, H_target] target head rows at the draft vocabulary's ids.
        setting: depth and weights.
        normaliser: rows of the whole optimiser step, over all packs and processes.
        generator: on the CPU; draws which chains go on where ``keep`` is below 1.
        with_loss: False makes the gradient only; the reported loss is then 0.
    """
    learner = _Learner(model, batch, teacher_head, setting, normaliser, generator, with_loss)
    run_chains(model, batch.packed, batch.rows, setting.depth, learner, backend=setting.backend)
    assert learner.loss is not None, "a batch has rows"
    return StepReport(loss=learner.loss, kl=learner.kl, hits=learner.hits, counts=learner.counts)
