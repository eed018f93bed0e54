"""What differs between the kinds of drafters that can be trained: module, loss, first weights, file.

Example:
    model = make_model(config, target, target_ids, torch.float32)
    report = loss_for(model)(model, batch, teacher_head, setting, normaliser=len(batch.rows))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specbench.drafters.dflash import DFlashConfig, DFlashModel
from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.mtp import MtpConfig, MtpModel
from specbench.drafters.mtp_drafter import MtpDrafter
from specbench.drafters.training.data import Example, Features, TapSource
from specbench.types import TargetInfo, TargetWeights

TrainConfig = Eagle3Config | MtpConfig | DFlashConfig
TrainModel = Eagle3Model | MtpModel | DFlashModel


def make_model(
    config: TrainConfig, target: TargetWeights, target_ids: Sequence[int] | Tensor | None, dtype: torch.dtype
) -> TrainModel:
    """Lay out a drafter to train; an MTP head reads the target's state behind its final norm, as training keeps it."""
    if isinstance(config, MtpConfig):
        return MtpModel(config, target, target_ids, dtype, reads_normed=True)
    if isinstance(config, DFlashConfig):
        return DFlashModel(config, target, target_ids, dtype)
    return Eagle3Model(config, target, target_ids, dtype)


def make_drafter(model: TrainModel, target: TargetInfo) -> Eagle3Drafter | DFlashDrafter:
    """Wrap a model as the drafter that a run would score."""
    if isinstance(model, DFlashModel):
        return DFlashDrafter(model, target, "training")
    if isinstance(model, MtpModel):
        return MtpDrafter(model, target, "training")
    return Eagle3Drafter(model, target, "training")


def with_depth(config: TrainConfig, depth: int) -> TrainConfig:
    """Return ``config`` with the depth it is trained at; a block has its own."""
    return config if isinstance(config, DFlashConfig) else replace(config, trained_depth=depth)


def cache_taps(configs: Sequence[TrainConfig]) -> tuple[int, ...] | None:
    """Return the taps that the target's states are kept of; None where only the last state is read."""
    found = {config.taps for config in configs if not isinstance(config, MtpConfig)}
    assert len(found) <= 1, "arms of one recipe read the same states"
    return found.pop() if found else None


def save(model: TrainModel, out: Path) -> None:
    """Write a trained drafter in our own format.

    Raises:
        UserError: the directory cannot be written.
    """
    if isinstance(model, DFlashModel):
        from specbench.drafters.checkpoints.dflash import save_dflash

        save_dflash(model, out)
    elif isinstance(model, MtpModel):
        from specbench.drafters.checkpoints.mtp import save_mtp

        save_mtp(model, out)
    else:
        from specbench.drafters.checkpoints.save import save_drafter

        save_drafter(model, out)


@dataclass(frozen=True, slots=True)
class LastState:
    """Another source's states, the one behind the target's final norm alone; implements ``TapSource``."""

    source: TapSource

    def read(self, example: Example) -> Features:
        """Return the states of one example."""
        features = self.source.read(example)
        return replace(features, taps=(features.final,))


def source_for(config: TrainConfig, source: TapSource) -> TapSource:
    """Return where a drafter's states come from, given where all arms' states come from."""
    return LastState(source) if isinstance(config, MtpConfig) else source


def choose_mask(examples: Sequence[Example], vocab_size: int, stop_ids: Sequence[int]) -> int:
    """Return the lowest token that occurs in no example and ends no answer: free to stand for a mask."""
    used = set(stop_ids).union(*(e.ids for e in examples))
    return next(token for token in range(vocab_size) if token not in used)
