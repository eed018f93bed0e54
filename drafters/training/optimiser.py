"""AdamW on float32 master weights, with warm-up, cosine decay and clipping.

Example:
    masters = Masters(model, work, OptimSetting(lr=1e-3), total_steps=1000)
    loss.backward(); norm = masters.step(step)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSetting:
    """Numbers of the optimiser."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    """Largest gradient norm."""
    warmup: float = 0.03
    """Share of the steps over which the learning rate rises from 0."""
    final: float = 0.05
    """Share of the learning rate that the cosine ends at."""
    restart: float | None = None
    """Share of the learning rate that a second cosine, with a warm-up of its own, starts from behind the shallow phase;
    None: one cosine spans all steps. Deep chains have much to learn that a rate near its end is too small for."""
    horizon: int | None = None
    """With a restart: steps that the first cosine would take to its end; default: all steps."""


def learning_rate(setting: OptimSetting, step: int, total: int, shallow: int = 0) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0) of ``total``, the first ``shallow`` at depth 1."""
    if setting.restart is None or not shallow:
        return _cosine(setting, step, total)
    if step < shallow:
        return _cosine(setting, step, setting.horizon or total)
    return setting.restart * _cosine(setting, step - shallow, total - shallow)


def _cosine(setting: OptimSetting, step: int, total: int) -> float:
    warm = max(1, round(setting.warmup * total))
    if step < warm:
        return setting.lr * (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return setting.lr * (setting.final + (1 - setting.final) * 0.5 * (1 + math.cos(math.pi * done)))


class Masters:
    """Optimises ``model`` (float32) with the gradients that were made on ``work``, its copy in the dtype that
    computes; the two may be one.
    """

    def __init__(
        self,
        model: nn.Module,
        work: nn.Module,
        setting: OptimSetting,
        total_steps: int,
        shallow_steps: int = 0,
    ) -> None:
        self.setting, self.total, self.shallow = setting, total_steps, shallow_steps
        self.masters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.work: list[torch.Tensor] = [p for p in work.parameters() if p.requires_grad]
        self.shared = model is work
        assert [p.shape for p in self.masters] == [p.shape for p in self.work]
        self.adam = torch.optim.AdamW(
            self.masters, lr=setting.lr, betas=setting.betas, weight_decay=setting.weight_decay, fused=True
        )
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the working copy."""
        if not self.shared:
            torch._foreach_copy_(self.work, self.masters)

    @torch.no_grad()
    def collect(self) -> float:
        """Move the working copy's gradients to the masters and clip them; return their norm before that."""
        if not self.shared:
            for master, work in zip(self.masters, self.work, strict=True):
                assert work.grad is not None
                if master.grad is None:
                    master.grad = torch.empty_like(master)
                master.grad.copy_(work.grad)
        return float(nn.utils.clip_grad_norm_(self.masters, self.setting.clip))

    def step(self, step: int) -> None:
        """Take optimiser step ``step`` and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(self.setting, step, self.total, self.shallow)
        self.adam.step()
        self.clear()
        self.publish()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in (*self.masters, *self.work):
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Return what a resume needs besides the masters themselves."""
        return self.adam.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Take back ``state()``; the masters must be loaded first."""
        self.adam.load_state_dict(state)
        self.publish()
