"""From what a user writes after ``--perturb`` to a list of conditions.

Example: ``resolve_conditions(["templates*system", "text/typos_5"])`` crosses two families and adds a single
condition.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

from specbench import registry
from specbench.errors import SpecbenchWarning, UserError, unknown_name
from specbench.perturbations.condition import Condition
from specbench.perturbations.stages import Staged, compose
from specbench.types import CLEAN

ALIASES = {"templates": "template", "languages": "language", "texts": "text", "systems": "system"}
"""Other spellings of family names."""

SETS = {
    "paper": (CLEAN, "template/no_bos", "template/no_template", "template/no_bos_no_template"),
}
"""Named selections: the four template conditions of arXiv 2605.09992."""


def all_conditions() -> list[Condition]:
    """Return every known condition, families in the order of the built-in table, then those from outside.

    Raises:
        UserError: two packages give the same id, or a package gives something that is no condition.
    """
    from specbench.perturbations import BUILTIN

    names = [*BUILTIN, *(name for name in registry.names("perturbations") if name not in BUILTIN)]
    found: dict[str, Condition] = {}
    for name in names:
        for condition in _made(name):
            if condition.info.id in found:
                raise UserError(
                    f"the condition {condition.info.id!r} is given twice, the second time by {name!r}"
                )
            found[condition.info.id] = condition
    return list(found.values())


def resolve_conditions(spec: Sequence[str], severity: int | None = None) -> list[Condition]:
    """Return the conditions a specification names, ``template/regular`` first, each once.

    Args:
        spec: families ("templates", "system", "all"), single ids ("template/no_bos"), ids of composed
            conditions ("template/llama3+system/persona"), products ("templates*system"); items may hold
            several of these, separated by commas.
        severity: leave out conditions of families that are more severe than this; what is named by its id
            stays.

    Raises:
        UserError: a name is unknown (with the nearest ones), or nothing in a product composes.
    """
    known = {condition.info.id: condition for condition in all_conditions()}
    chosen: dict[str, Condition] = {CLEAN: known[CLEAN]}
    for item in (part.strip() for text in spec for part in text.split(",")):
        if item:
            for condition in _expand(item, known, severity):
                chosen.setdefault(condition.info.id, condition)
    return list(chosen.values())


def _made(name: str) -> Iterable[Condition]:
    make: Callable[[], object] | Condition = registry.load("perturbations", name)
    made = make if isinstance(make, Condition) else make()
    many = [made] if isinstance(made, Condition) else made
    if not isinstance(many, Iterable):
        raise UserError(
            f"the perturbation {name!r} gives {type(many).__name__}; it must give one condition or several"
        )
    for condition in many:
        if not isinstance(condition, Condition):
            raise UserError(
                f"the perturbation {name!r} gives {type(condition).__name__}, which is not a condition"
            )
        yield condition


def _expand(item: str, known: dict[str, Condition], severity: int | None) -> list[Condition]:
    factors = [_named(name.strip(), known, severity) for name in item.split("*")]
    product = factors[0]
    for factor in factors[1:]:
        product = _cross(item, product, factor)
    return product


def _named(name: str, known: dict[str, Condition], severity: int | None) -> list[Condition]:
    if name in known:
        return [known[name]]
    if name in SETS:
        return [known[member] for member in SETS[name]]
    if "+" in name:
        return [reduce(combine, (_single(part.strip(), known) for part in name.split("+")))]
    family = ALIASES.get(name, name)
    members = [c for c in known.values() if name == "all" or c.info.family == family]
    if not members:
        families = {c.info.family for c in known.values()}
        raise unknown_name("perturbation", name, [*known, *families, *ALIASES, *SETS, "all"])
    return [c for c in members if severity is None or c.info.severity <= severity]


def _single(name: str, known: dict[str, Condition]) -> Condition:
    if name not in known:
        raise unknown_name("perturbation", name, known)
    return known[name]


def _cross(item: str, left: list[Condition], right: list[Condition]) -> list[Condition]:
    """Compose every pair that can be, and say which cannot; where none can, that is an error."""
    product: list[Condition] = []
    refused: list[UserError] = []
    for a in left:
        for b in right:
            try:
                product.append(combine(a, b))
            except UserError as error:
                refused.append(error)
    if not product:
        raise refused[0] if refused else UserError(f"{item!r} names no conditions at this severity")
    if refused:
        warnings.warn(
            f"{item}: {len(refused)} of {len(product) + len(refused)} pairs are left out, the first because "
            f"{refused[0]} (name the pairs you need to leave out the rest)",
            SpecbenchWarning,
            stacklevel=2,
        )
    return product


def combine(first: Condition, second: Condition) -> Condition:
    """Return the condition that does both.

    Raises:
        UserError: they cannot be composed, and why.
    """
    for one in (first, second):
        if not isinstance(one, Staged):
            raise UserError(f"{one.info.id} cannot be composed: it is not made of stages")
    assert isinstance(first, Staged) and isinstance(second, Staged)
    return compose(first, second)
