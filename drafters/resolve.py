"""From the command line's words to drafters.

Example:
    parse_drafters("ngram@min=2,max=4,draft-lm=MODEL,eagle3=PATH@window=1024,sink=bos,zoo:eagle3")
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from specbench import registry
from specbench.errors import UserError, unknown_name
from specbench.types import Drafter, DrafterInfo, TargetWeights

_OPTIONS = re.compile(r"^(?P<head>.*?)@(?P<first>[a-z_]+=.*)$")
_PAIR = re.compile(r"^(?P<key>[A-Za-z0-9_.-]+)=(?P<value>.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """One drafter as asked for."""

    text: str
    """As the user wrote it, options included; the drafter's name in the rows."""
    kind: str
    """A registered name, or ``auto`` where the checkpoint itself says what it is."""
    argument: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def zoo_names() -> tuple[str, ...]:
    """Return the names of the bundled drafters, sorted."""
    root = resources.files("specbench.drafters") / "zoo"
    if not root.is_dir():
        return ()
    return tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and (p / "config.json").is_file()))


def zoo_path(name: str) -> Path:
    """Return the directory of a bundled drafter.

    Raises:
        UserError: there is none of that name.
    """
    if name not in zoo_names():
        if not zoo_names():
            raise UserError(f"unknown drafter 'zoo:{name}'; this installation bundles no drafters")
        raise unknown_name("drafter", f"zoo:{name}", (f"zoo:{n}" for n in zoo_names()))
    return Path(str(resources.files("specbench.drafters") / "zoo" / name))


def parse_drafters(text: str) -> list[DrafterSpec]:
    """Read a comma-separated list of drafters.

    Each is ``name``, ``name=argument``, a checkpoint's path, or ``zoo:NAME`` (``zoo:*``: all of them), with
    options behind ``@``. After a drafter with options, pieces that look like ``key=value`` go on with its
    options unless ``key`` is a drafter's name.

    Raises:
        UserError: the list is empty, a name is unknown, or a drafter is named twice.
    """
    known = registry.names("drafters")
    specs: list[DrafterSpec] = []
    for piece in (p.strip() for p in text.split(",")):
        if not piece:
            continue
        pair = _PAIR.match(piece)
        if specs and specs[-1].options and pair and "@" not in piece and pair["key"] not in known:
            previous = specs.pop()
            options = _add(previous, pair["key"], pair["value"])
            specs.append(replace(previous, text=f"{previous.text},{piece}", options=options))
            continue
        specs.append(_parse_one(piece, known))
    specs = [one for spec in specs for one in _expand(spec)]
    if not specs:
        raise UserError(f"no drafter in {text!r}; known: {', '.join(known)}, a checkpoint's path, zoo:NAME")
    seen: set[str] = set()
    for spec in specs:
        if spec.text in seen:
            raise UserError(f"drafter {spec.text!r} is named twice; leave one out")
        seen.add(spec.text)
    return specs


def load_drafter(spec: DrafterSpec | str, target: TargetWeights) -> Drafter:
    """Return the drafter of ``spec``, named as the user wrote it.

    Args:
        spec: from ``parse_drafters``, or one drafter's text.
        target: whose tensors and facts it needs.

    Raises:
        UserError: it cannot be found, does not load, does not fit the target, or an option is unknown.
    """
    if isinstance(spec, str):
        specs = parse_drafters(spec)
        if len(specs) != 1:
            raise UserError(f"{spec!r} names {len(specs)} drafters where one is needed")
        (spec,) = specs
    kind = spec.kind
    if kind == "auto":
        from specbench.drafters.checkpoints.detect import checkpoint_kind

        assert spec.argument is not None
        kind = checkpoint_kind(spec.argument)
    drafter = registry.load("drafters", kind)(spec.argument, spec.options, target)
    assert isinstance(drafter, Drafter)
    return _named(drafter, spec.text)


def required_taps(drafters: Iterable[Drafter]) -> tuple[int, ...]:
    """Return every tap that one of ``drafters`` needs, ascending."""
    return tuple(sorted({tap for drafter in drafters for tap in drafter.info.taps}))


def check_options(kind: str, options: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse options that ``kind`` does not have.

    Raises:
        UserError: with the nearest names.
    """
    for name in options:
        if name not in set(known):
            raise unknown_name(f"{kind} option", name, known)


class Renamed:
    """A drafter from outside under the name the user wrote."""

    def __init__(self, drafter: Drafter, info: DrafterInfo) -> None:
        self.drafter = drafter
        self.info = info

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)


def _named(drafter: Drafter, name: str) -> Drafter:
    info = replace(drafter.info, name=name)
    try:
        drafter.info = info  # type: ignore[misc]
    except AttributeError:
        renamed: Any = Renamed(drafter, info)
        return renamed  # type: ignore[no-any-return]
    return drafter


def _add(spec: DrafterSpec, key: str, value: str) -> dict[str, str]:
    if key in spec.options:
        raise UserError(f"option {key!r} of drafter {spec.text!r} is given twice; leave one out")
    return {**spec.options, key: value}


def _parse_one(piece: str, known: tuple[str, ...]) -> DrafterSpec:
    head, options = piece, {}
    with_options = _OPTIONS.match(piece)
    if with_options:
        head = with_options["head"]
        key, _, value = with_options["first"].partition("=")
        options = {key: value}
    if head in known:
        return DrafterSpec(text=piece, kind=head, options=options)
    name, equals, argument = head.partition("=")
    if equals and name in known:
        if not argument:
            raise UserError(f"drafter {piece!r} lacks what comes after '='; write {name}=PATH")
        return DrafterSpec(text=piece, kind=name, argument=argument, options=options)
    if (
        head.startswith("zoo:")
        or Path(head).exists()
        or (not equals and re.fullmatch(r"[^/\s]+/[^/\s]+", head))
    ):
        return DrafterSpec(text=piece, kind="auto", argument=head, options=options)
    if equals:
        raise unknown_name("drafter", name, known)
    if "/" in head or head.startswith("."):
        raise UserError(f"no checkpoint at {head!r}; give the directory that holds its config.json")
    raise unknown_name("drafter", head, [*known, *(f"zoo:{n}" for n in zoo_names())])


def _expand(spec: DrafterSpec) -> list[DrafterSpec]:
    """Replace ``zoo:NAME`` by its directory and ``zoo:*`` by all of them."""
    argument = spec.argument or ""
    if not argument.startswith("zoo:"):
        return [spec]
    name = argument.removeprefix("zoo:")
    if name != "*":
        return [replace(spec, argument=str(zoo_path(name)))]
    if not zoo_names():
        raise UserError("zoo:* names no drafter: this installation bundles none")
    return [
        replace(spec, text=spec.text.replace("zoo:*", f"zoo:{n}", 1), argument=str(zoo_path(n)))
        for n in zoo_names()
    ]
