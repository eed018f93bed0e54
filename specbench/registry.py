"""One way to find a suite, a perturbation, a drafter or a runner by name.

Built-ins are lazy ``"module:attribute"`` strings in ``specbench.<kind>.BUILTIN``, so that listing names imports
nothing heavy; packages from outside add theirs through the entry-point group ``specbench.<kind>``.

Example: ``registry.load("suites", "mtbench")`` returns the object that ``specbench.benchmarks.public:MTBENCH`` names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal

from specbench.errors import UserError, unknown_name

Kind = Literal["suites", "perturbations", "drafters", "runners"]

# The package whose BUILTIN mapping holds the kind's own names. The one upward reference in the tree, by name only.
_HOME: Mapping[str, str] = {
    "suites": "specbench.benchmarks",
    "perturbations": "specbench.perturbations",
    "drafters": "specbench.drafters",
    "runners": "specbench.runners",
}


@lru_cache(maxsize=32)
def _entry_points(kind: Kind, path: tuple[str, ...]) -> tuple[metadata.EntryPoint, ...]:
    # reading the records of every installed package takes a while, and names are looked up many times in a run
    return tuple(metadata.entry_points(group=f"specbench.{kind}"))


def _table(kind: Kind) -> dict[str, tuple[str, str]]:
    """Map every name of ``kind`` to (where it is, which package says so)."""
    home = _HOME[kind]
    builtin: Mapping[str, str] = importlib.import_module(home).BUILTIN
    table = {name: (where, "specbench") for name, where in builtin.items()}
    for entry in _entry_points(kind, tuple(sys.path)):
        package = entry.dist.name if entry.dist is not None else entry.value
        if entry.name in table:
            raise UserError(
                f"{package!r} and {table[entry.name][1]!r} both add the {kind[:-1]} {entry.name!r}; uninstall one"
            )
        table[entry.name] = (entry.value, package)
    return table


def names(kind: Kind) -> tuple[str, ...]:
    """Return every known name of ``kind``, sorted; imports no implementation."""
    return tuple(sorted(_table(kind)))


def package(kind: Kind, name: str) -> str:
    """Return the package that provides a known name; ``specbench`` for our own."""
    return _table(kind)[name][1]


def load(kind: Kind, name: str) -> Any:
    """Return what ``name`` stands for.

    Raises:
        UserError: the name is unknown, or the package that provides it cannot be imported or lacks what it promised.
    """
    table = _table(kind)
    if name not in table:
        raise unknown_name(kind[:-1], name, table)
    where, package = table[name]
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a package from outside may raise anything while it is imported
        if package == "specbench" and not isinstance(error, ImportError):
            raise
        text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"the {kind[:-1]} {name!r} of package {package!r} cannot be imported ({text}); "
            "mend or uninstall that package"
        ) from error
