"""Going on from a drafter that exists: its weights and its draft vocabulary.

Example: ``start = read_start(Path("drafters/mine"), target.weights()); start.check(config)``
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.resolve import load_drafter
from specbench.drafters.training.kinds import TrainConfig, TrainModel
from specbench.errors import UserError
from specbench.types import TargetWeights

_FREE = {"trained_depth", "draft_vocab_size"}
"""Fields that may differ: the depth is trained anew, and the draft vocabulary is the old drafter's."""
_KEPT_ROWS = ("data", "steps", "optimiser", "start", "cost")
"""Of the old card."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """What training goes on from."""

    name: str
    """As the user wrote it."""
    fingerprint: str
    """Of the weights."""
    config: TrainConfig
    weights: Mapping[str, Tensor]
    target_ids: tuple[int, ...]
    history: tuple[str, ...] = ()
    """Rows of the old drafter's card that say how it was made; empty where it has none of ours."""

    def check(self, config: TrainConfig) -> None:
        """Make sure that ``config`` is the same drafter.

        Raises:
            UserError: it is built differently.
        """
        found = differences(_fields(config), _fields(self.config))
        if found:
            raise UserError(
                f"the start {self.name} differs in {', '.join(found)}; use the same switches and sizes"
            )


def read_start(directory: Path, target: TargetWeights) -> Start:
    """Read the drafter in ``directory``, to be trained further.

    Raises:
        UserError: there is no drafter that training knows.
    """
    drafter = load_drafter(str(directory), target)
    model = getattr(drafter, "model", None)
    if not isinstance(model, TrainModel):
        raise UserError(
            f"{directory} holds a drafter of the kind {drafter.info.kind}, which is not one to train"
        )
    return Start(
        name=directory.name,
        fingerprint=drafter.info.fingerprint,
        config=model.config,
        weights=dict(model.named_parameters()),
        target_ids=tuple(model.target_ids.tolist()),
        history=_history(directory / "README.md"),
    )


@torch.no_grad()
def take_weights(model: TrainModel, start: Start) -> None:
    """Copy the start's weights into a model of the same configuration."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(start.weights[name])


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as a file would give them back, so that they can be compared with some that were."""
    return dict(json.loads(json.dumps(values, default=list)))


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of the leaves that differ, each with both values."""
    found = []
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} ({b!r} there, {a!r} here)")
    return found


def _fields(config: TrainConfig) -> dict[str, Any]:
    fields = plain({"kind": type(config).__name__} | asdict(config))
    return {name: value for name, value in fields.items() if name not in _FREE}


def _history(card: Path) -> tuple[str, ...]:
    if not card.exists():
        return ()
    rows = [line for line in card.read_text().split("\n") if line.startswith("| ")]
    return tuple(row for row in rows if row[2:].split(" |", 1)[0].removesuffix(", before") in _KEPT_ROWS)
