"""One training step's loss: the chains of scoring, with the loss behind every draft step.

Example:
    report = chain_loss(model, batch, teacher_head, ChainSetting(depth=4), normaliser=len(batch.rows))
    report.loss.backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.chains import run_chains
from specbench.drafters.dflash import DFlashModel
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.modules import DrafterModel
from specbench.drafters.mtp import MtpModel
from specbench.drafters.training.data import Batch
from specbench.drafters.training.kinds import TrainModel
from specbench.drafters.training.loss import LossOutput, linear_kl, teacher_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSetting:
    """How chains are trained."""

    depth: int = 4
    """Train-time test: steps of every chain."""
    decay: float = 0.8
    """Step i weighs decay^(i-1)."""
    keep: float = 1.0
    """Share of the chains that go on after each step, drawn at random; those that do weigh 1/keep more, so the
    expected gradient stays the same while later steps cost less. Of a block drafter: share of the rows that get a
    block."""
    backend: str = "auto"
    """Of ``chain_attention`` or ``block_attention``."""


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


class _Teacher:
    """The target's laws over a batch, each made once although up to ``depth`` steps are judged by it."""

    def __init__(self, model: DrafterModel, batch: Batch, rows: Tensor, depth: int, head: Tensor) -> None:
        labels = torch.zeros(batch.top.shape[0], dtype=torch.bool, device=rows.device)
        for step in range(1, depth + 1):
            inside = rows + step <= batch.packed.last[rows]
            labels[(rows + step)[inside]] = True
        wanted = labels.nonzero().flatten()
        self.law = torch.full_like(batch.top, -1)
        self.law[wanted] = torch.arange(wanted.numel(), device=rows.device)
        self.probs = teacher_probs(batch.final[wanted], head)
        self.counted = model.draft_ids[batch.top.clamp(min=0)] >= 0
        self.labels = model.draft_ids[batch.packed.inputs]
        self.head = model.head_weight

    def judge(self, post: Tensor, label_rows: Tensor, weights: Tensor | float, with_loss: bool) -> LossOutput:
        """Return the weighted loss of final-norm outputs that foresee the tokens after ``label_rows``."""
        scale = self.counted[label_rows].float() * weights
        return linear_kl(post, self.head(), self.probs, self.law[label_rows], scale, with_loss=with_loss)


class _Learner:
    """The ``on_step`` of training."""

    def __init__(
        self,
        teacher: _Teacher,
        batch: Batch,
        setting: ChainSetting,
        normaliser: float,
        generator: torch.Generator | None,
        with_loss: bool,
    ) -> None:
        self.teacher, self.batch, self.setting = teacher, batch, setting
        self.normaliser, self.generator, self.with_loss = normaliser, generator, with_loss
        device = batch.rows.device
        self.loss: Tensor | None = None
        self.kl = torch.zeros(setting.depth, device=device)
        self.hits = torch.zeros(setting.depth, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.hits)

    def __call__(self, step: int, active: Tensor, post: Tensor) -> Tensor | None:
        label_rows = self.batch.rows[active] + step
        setting = self.setting
        weight = (setting.decay / setting.keep) ** (step - 1) / self.normaliser
        out = self.teacher.judge(post, label_rows, weight, self.with_loss)
        self.loss = out.loss if self.loss is None else self.loss + out.loss
        self.kl[step - 1] = out.loss.detach() / weight
        self.hits[step - 1] = (out.best == self.teacher.labels[label_rows]).sum()
        self.counts[step - 1] = active.numel()
        if setting.keep == 1.0 or step == setting.depth:
            return None
        assert self.generator is not None, "keep below 1 draws"
        draw = torch.rand(active.numel(), generator=self.generator) < setting.keep
        return draw.to(active.device)


def chain_loss(
    model: Eagle3Model | MtpModel,
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
    teacher = _Teacher(model, batch, batch.rows, setting.depth, teacher_head)
    learner = _Learner(teacher, batch, setting, normaliser, generator, with_loss)
    run_chains(model, batch.packed, batch.rows, setting.depth, learner, backend=setting.backend)
    assert learner.loss is not None, "a batch has rows"
    return StepReport(loss=learner.loss, kl=learner.kl, hits=learner.hits, counts=learner.counts)


def block_loss(
    model: DFlashModel,
    batch: Batch,
    teacher_head: Tensor,
    setting: ChainSetting,
    *,
    normaliser: float,
    generator: torch.Generator | None = None,
    with_loss: bool = True,
) -> StepReport:
    """Run a block behind every row, or behind a random share of them, and compare each mask with the target's law.

    The loss is that of ``chain_loss``, mask i in the place of step i; ``setting.depth`` is how many masks a block has
    here, and ``setting.keep`` the share of the rows that get a whole block: shorter ones cost less, so more rows do.
    """
    rows = batch.rows
    depth = min(setting.depth, model.config.max_depth)
    keep = min(1.0, setting.keep * model.config.block_size / (1 + depth))
    if keep < 1.0:
        assert generator is not None, "keep below 1 draws"
        # at least one row, so that every weight has a gradient
        size = max(1, round(keep * rows.numel()))
        chosen = torch.randperm(rows.numel(), generator=generator)[:size].sort().values
        rows = rows[chosen.to(rows.device)]
    teacher = _Teacher(model, batch, rows, depth, teacher_head)
    context = model.context(batch.packed.taps, batch.packed.positions)
    post = model.block(context, batch.packed, rows, backend=setting.backend, size=1 + depth)[:, 1:]
    steps = torch.arange(1, depth + 1, device=rows.device)
    label_rows = rows[:, None] + steps
    inside = label_rows <= batch.packed.last[rows][:, None]
    share = batch.rows.numel() / rows.numel()
    weights = (setting.decay ** (steps - 1) * share / normaliser).expand(len(rows), -1)[inside]
    flat, which = label_rows[inside], steps.expand(len(rows), -1)[inside] - 1
    out = teacher.judge(post[inside], flat, weights, with_loss)
    hits = (out.best == teacher.labels[flat]).to(torch.int64)
    counts = torch.zeros(setting.depth, dtype=torch.int64, device=rows.device).index_add_(
        0, which, torch.ones_like(hits)
    )
    # the loss is one sum over all masks, so it is reported as the mean over them
    kl = torch.zeros(setting.depth, device=rows.device)
    kl[:depth] = out.loss.detach() / weights.sum() * counts[:depth]
    return StepReport(
        loss=out.loss, kl=kl, hits=torch.zeros_like(counts).index_add_(0, which, hits), counts=counts
    )


def loss_of(
    model: TrainModel,
    batch: Batch,
    teacher_head: Tensor,
    setting: ChainSetting,
    *,
    normaliser: float,
    generator: torch.Generator | None = None,
    with_loss: bool = True,
) -> StepReport:
    """Return the loss of one batch, by ``chain_loss`` or ``block_loss``."""
    more: dict[str, Any] = {"normaliser": normaliser, "generator": generator, "with_loss": with_loss}
    if isinstance(model, DFlashModel):
        return block_loss(model, batch, teacher_head, setting, **more)
    return chain_loss(model, batch, teacher_head, setting, **more)
