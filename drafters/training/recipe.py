"""Recipes: one data order, one schedule, several arms.

A recipe is a YAML file; ``arms`` maps a drafter's name to its switches, on top of ``common``.

Example:
    recipe = read_recipe(Path("drafters/zoo/recipe.yaml"))
    recipe.arms[0].name, recipe.arms[0].switches     # "eagle3", {"feedback": "pre"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specbench.drafters.dflash import DFlashConfig
from specbench.drafters.eagle3 import Eagle3Config
from specbench.drafters.mtp import MtpConfig
from specbench.drafters.training.kinds import TrainConfig
from specbench.drafters.training.optimiser import OptimSetting
from specbench.drafters.training.step import ChainSetting
from specbench.drafters.training.trainer import TrainSetting
from specbench.errors import UserError, unknown_name
from specbench.types import TargetInfo

ARMS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {},
    "eagle3-fcnorm": {"norm_per_tap": True},
    "eagle3.1": {"feedback": "post", "norm_per_tap": True},
    "eagle3-gated": {"gate": True, "norm_per_tap": True},
    "eagle3.1-gated": {"feedback": "post", "gate": True, "norm_per_tap": True},
    "eagle3-resnorm": {"norm_before_residual": True},
    "mtp": {},
    "dflash": {"num_layers": 2, "block_size": 8},
}
"""Name -> switches of its configuration."""

_CONFIGS: Mapping[str, type[TrainConfig]] = {"mtp": MtpConfig, "dflash": DFlashConfig}
"""Name -> configuration, where that is not ``Eagle3Config``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One drafter to train."""

    name: str
    """Of its directory."""
    switches: Mapping[str, Any]
    """Fields of its configuration."""
    setting: TrainSetting
    drafter: str = "eagle3"
    """Name in ``ARMS``."""
    epochs: float | None = None
    """Where given, the number of steps follows from it and from the data."""
    branch: str | None = None
    """Arm whose shallow phase this one shares: they may differ in ``feedback`` and in the chains' depth, which have no
    effect there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What ``specbench train --recipe`` trains."""

    target: str
    answers: Path
    out: Path
    data: str
    """Where the prompts come from, for the cards."""
    draft_vocab: int
    held_out: int
    """Answers at the file's end that are kept out of training."""
    sizes: Mapping[str, Any]
    """Fields that all arms' configurations share (heads, widths, ``head``)."""
    arms: tuple[Arm, ...]
    start: Path | None = None
    """Directory with a drafter of every arm's name, whose weights it goes on from."""


def arm_switches(name: str) -> Mapping[str, Any]:
    """Return the switches of a named arm.

    Raises:
        UserError: there is no such arm.
    """
    if name not in ARMS:
        raise unknown_name("drafter to train", name, ARMS)
    return ARMS[name]


def make_config(
    info: TargetInfo,
    draft_vocab: int,
    sizes: Mapping[str, Any],
    arm: Mapping[str, Any],
    drafter: str = "eagle3",
) -> TrainConfig:
    """Return an arm's configuration for a target.

    Args:
        info: the target.
        draft_vocab: size of the draft vocabulary.
        sizes: fields that all arms share; taps are left out where the drafter reads the last state.
        arm: fields of this one, which win.
        drafter: name in ``ARMS``.

    Raises:
        UserError: a name is no field of the configuration, or sizes contradict each other.
    """
    kind = _CONFIGS.get(drafter, Eagle3Config)
    if kind is MtpConfig:
        sizes = {name: value for name, value in sizes.items() if name != "taps"}
    known = {f.name for f in fields(kind)}
    for name in (*sizes, *arm):
        if name not in known:
            raise unknown_name("drafter switch", name, known)
    return kind.for_target(info, **{"draft_vocab_size": draft_vocab, **sizes, **arm})


_NESTED = {"chain": ChainSetting, "optim": OptimSetting}


def make_setting(values: Mapping[str, Any], base: TrainSetting | None = None) -> TrainSetting:
    """Return a setting from plain values; ``chain`` and ``optim`` are mappings of their own.

    Raises:
        UserError: a name is unknown, or ``steps`` is missing.
    """
    base = base or TrainSetting(steps=0)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name in _NESTED:
            _check_names(value, _NESTED[name], name)
            value = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
            changes[name] = replace(getattr(base, name), **value)
        else:
            changes[name] = value
    _check_names(changes, TrainSetting, "training")
    setting = replace(base, **changes)
    if setting.steps < 1:
        raise UserError("the training setting names no steps; add steps: N")
    return setting


def _check_names(values: Mapping[str, Any], kind: type, what: str) -> None:
    known = {f.name for f in fields(kind)}
    for name in values:
        if name not in known:
            raise unknown_name(f"{what} setting", name, known)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; paths in it are relative to its directory.

    Raises:
        UserError: the file is missing or malformed, or holds a name nobody knows.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from error
    needed = ("target", "answers", "out", "draft_vocab", "held_out", "sizes", "training", "arms")
    missing = [name for name in needed if not isinstance(data, dict) or name not in data]
    if missing:
        raise UserError(f"the recipe {path} lacks {', '.join(missing)}")
    common = make_setting(data["training"])
    arms: list[Arm] = []
    for name, changes in data["arms"].items():
        changes = dict(changes or {})
        drafter = changes.pop("drafter", name)
        switches = dict(arm_switches(drafter)) | dict(changes.pop("switches", None) or {})
        branch = changes.pop("branch", None)
        if branch is not None and branch not in {arm.name for arm in arms}:
            raise UserError(f"arm {name!r} of {path} branches off {branch!r}, which does not come before it")
        setting = make_setting(changes, common)
        arms.append(Arm(name=name, switches=switches, drafter=drafter, setting=setting, branch=branch))
    return Recipe(
        target=data["target"],
        answers=path.parent / data["answers"],
        out=path.parent / data["out"],
        data=data.get("data", "prompts of the user's own"),
        draft_vocab=data["draft_vocab"],
        held_out=data["held_out"],
        sizes=data["sizes"],
        arms=tuple(arms),
        start=path.parent / data["start"] if "start" in data else None,
    )
