"""``run.json``: what a run was, read tolerantly and never trusted.

Only the run's id, its target and its drafters must be there; everything else may be missing. Types are
checked, since the file may come from a stranger.

Example:
    info = read_run_info("runs/first")
    info.drafters["ngram"].num_parameters
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.errors import UserError

RUN_FILE = "run.json"
MAX_BYTES = 4 << 20
MAX_NAME = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What is known of a drafter."""

    name: str
    kind: str = ""
    fingerprint: str = ""
    num_parameters: int | None = None
    trained_depth: int | None = None
    training_data: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> str:
        """How its draft tokens come about: one pass each, one pass for all, or none."""
        return {"ngram": "none", "dflash": "one"}.get(self.kind, "one per token")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known of a run."""

    run_id: str
    target: str
    target_fingerprint: str
    drafters: Mapping[str, DrafterFacts]
    command: str = ""
    started: str = ""
    specbench_version: str = ""
    prompts_hash: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""
    """Everything that times depend on, as one string; empty where unknown."""


def read_run_info(run: str | Path) -> RunInfo:
    """Read the ``run.json`` of a run directory or an entry.

    Raises:
        UserError: there is none, it is not JSON, too large, or a value is of the wrong type.
    """
    path = Path(run) / RUN_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES >> 20} MiB; it is no run's record")
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError as error:
        raise UserError(f"{run} holds no {RUN_FILE}; give a run directory") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a run's record: {type(error).__name__}, {error}") from error
    return _parsed(_Reader(record, str(path)))


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class _Reader:
    """A JSON object whose values are taken out by type."""

    values: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.values, dict):
            raise UserError(f"{self.where} must be a JSON object")

    def text(self, key: str, default: str | None = "", longest: int = MAX_NAME) -> str:
        """Return a string without control characters."""
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {key!r} must be a string")
        if len(value) > longest:
            raise UserError(f"{self.where}: {key!r} is longer than {longest} characters")
        if any(ord(c) < 32 or ord(c) == 127 for c in value):
            raise UserError(f"{self.where}: {key!r} holds control characters")
        return value

    def count(self, key: str) -> int | None:
        """Return a non-negative integer, or None where it is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
            raise UserError(f"{self.where}: {key!r} must be a non-negative integer")
        return value

    def object(self, key: str) -> _Reader:
        """Return a nested object; an empty one where it is missing."""
        return _Reader(self.values.get(key) or {}, f"{self.where}: {key}")

    def texts(self) -> dict[str, str]:
        """Return the scalars of this object as strings."""
        return {
            key: self.text(key) if isinstance(value, str) else _scalar(value, f"{self.where}: {key!r}")
            for key, value in self.values.items()
            if value is not None and not isinstance(value, (dict, list))
        }


def _scalar(value: Any, where: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} must be finite")
    return str(value)


def _parsed(record: _Reader) -> RunInfo:
    target = record.object("target")
    drafters = record.values.get("drafters")
    if not isinstance(drafters, list) or not drafters:
        raise UserError(f"{record.where}: 'drafters' must be a list with at least one drafter")
    facts = [_drafter(_Reader(d, f"{record.where}: drafters[{i}]")) for i, d in enumerate(drafters)]
    config = record.object("config")
    machine = {**record.object("machine").texts(), **config.texts(), **target.texts()}
    named = [f"{k} {machine[k]}" for k in ("gpu", "platform", "cpus", "device", "dtype") if k in machine]
    info = RunInfo(
        run_id=record.text("run_id", None),
        target=target.text("name", None),
        target_fingerprint=target.text("fingerprint", None),
        drafters={f.name: f for f in facts},
        command=record.text("command", longest=20_000),
        started=record.text("started"),
        specbench_version=record.text("specbench_version"),
        prompts_hash=record.text("prompts_hash"),
        versions=record.object("versions").texts(),
        config=config.values,
        machine=", ".join(named) if record.values.get("machine") else "",
    )
    if len(info.drafters) < len(facts):
        raise UserError(f"{record.where}: two drafters have the same name")
    return info


def _drafter(record: _Reader) -> DrafterFacts:
    settings = record.object("settings").texts()
    return DrafterFacts(
        name=record.text("name", None),
        kind=record.text("kind"),
        fingerprint=record.text("fingerprint"),
        num_parameters=record.count("num_parameters"),
        trained_depth=record.count("trained_depth"),
        training_data=settings.get("training_data"),
        settings=settings,
    )
