"""Interval columns for the acceptance table: accepted per round, retention and the conditional rates.

Example:
    interval_columns(connection, by, keys_of_rows)["accepted_low"]   # one value a row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.results.statistics import DRAWS, Estimates, Floats, Plan, detectable, estimate
from specbench.results.sums import (
    Group,
    accepted_per_round,
    by_keys,
    conditional_rates,
    paired,
    prompt_groups,
)

CLEAN = "template/regular"
"""The condition that retention is measured against."""

OVERALL = "all"
"""What ``suite`` (and ``category``) say in rows that pool every suite."""

_COLUMNS = ("accepted_low", "accepted_high", "retention_low", "retention_high", "retention_detectable")


def interval_columns(
    connection: Any, by: Sequence[str], rows: Sequence[Mapping[str, Any]], draws: int = DRAWS, seed: int = 0
) -> dict[str, list[float | None]]:
    """Return the interval columns (see :data:`specbench.results.schema.ACCEPTANCE_DOCS`) for the rows of
    an acceptance table.

    Args:
        connection: DuckDB connection with the temporary table ``cells``.
        by: the table's keys.
        rows: its keys, row by row.
        draws: resamples.
        seed: of the resampling; the same seed gives the same numbers.
    """
    groups = by_keys(prompt_groups(connection, by), by)
    if "suite" in by:
        pooled = [c for c in by if c not in ("suite", "category")]
        for group in prompt_groups(connection, pooled):
            keys = {**group.keys, "suite": OVERALL, "category": OVERALL}
            groups[tuple(keys[c] for c in by)] = group
    depth = max(g.sums.shape[1] for g in groups.values()) - 1
    columns: dict[str, list[float | None]] = {
        name: [None] * len(rows)
        for name in (
            *_COLUMNS,
            *(f"c_{i}_{end}" for i in range(1, depth + 1) for end in ("low", "high")),
        )
    }
    # Rows over the same prompts follow each other, so that their resamples are drawn once.
    order = sorted(range(len(rows)), key=lambda r: groups[tuple(rows[r][c] for c in by)].strata)
    for index in order:
        group = groups[tuple(rows[index][c] for c in by)]
        clean = _clean_of(rows[index], by, groups)
        for name, value in _row_intervals(group, clean, draws, seed).items():
            columns[name][index] = value
    return columns


def _clean_of(
    row: Mapping[str, Any], by: Sequence[str], groups: Mapping[tuple[Any, ...], Group]
) -> Group | None:
    """Return the group a row's retention is relative to, if there is one and it is another."""
    if row.get("condition", CLEAN) == CLEAN:
        return None
    wanted = {**row, "condition": CLEAN, "family": "template", "severity": 0}
    same = groups.get(tuple(wanted[c] for c in by))
    return same or groups.get(tuple({**wanted, "answer_path": "free"}[c] for c in by))


def _row_intervals(group: Group, clean: Group | None, draws: int, seed: int) -> dict[str, float | None]:
    def rates(sums: Floats) -> Floats:
        return np.concatenate([accepted_per_round(sums), conditional_rates(sums)], axis=-1)

    found = estimate(group.sums, rates, Plan(strata=group.strata, draws=draws, seed=seed))
    values = {"accepted_low": _known(found.low[0]), "accepted_high": _known(found.high[0])}
    for i in range(1, group.sums.shape[1]):
        values[f"c_{i}_low"], values[f"c_{i}_high"] = _known(found.low[i]), _known(found.high[i])
    if clean is not None:
        kept = retention(group, clean, draws, seed)
        if kept is not None:
            values["retention_low"], values["retention_high"] = _known(kept.low[0]), _known(kept.high[0])
            values["retention_detectable"] = _known(detectable(float(kept.error[0]), kept.num_prompts))
    return values


def retention(group: Group, clean: Group, draws: int, seed: int) -> Estimates | None:
    """Estimate accepted per round relative to the clean condition; None where no prompt has both."""
    pairs = paired(group, clean)
    if len(pairs.left) == 0:
        return None

    def ratio(sums: Floats) -> Floats:
        own, base = pairs.split(sums)
        return accepted_per_round(own) / accepted_per_round(base)

    return estimate(pairs.joined, ratio, Plan(strata=pairs.strata, draws=draws, seed=seed), null=1.0)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
