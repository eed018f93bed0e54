"""Scores of answers beside acceptance: what the target gets right, per condition, and how much of it is kept.

A condition that costs the target its accuracy is another finding than one that costs only the drafter its acceptance.
Accuracy belongs to the answer, so it is the same for every drafter that is lossless.

Example:
    write_scores("runs/first", rows, totals)   # scores.parquet, one row an answer; accuracy.parquet, one a condition
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import UserError
from specbench.results.intervals import CLEAN, OVERALL
from specbench.results.schema import to_table
from specbench.results.statistics import DRAWS, Floats, Plan, estimate

_KEYS = ("run_id", "suite", "condition", "family", "answer_path", "task", "version", "filter", "metric")
_POOLED = "several"
"""Task, version, filter and metric of a row that pools suites."""

Row = Mapping[str, Any]


def write_scores(run: str | Path, scores: Sequence[Row], totals: Sequence[Row], seed: int = 0) -> None:
    """Write ``scores.parquet`` and ``accuracy.parquet`` into a run's directory.

    Args:
        run: the directory.
        scores: rows of :data:`specbench.results.schema.SCORES`.
        totals: per group of scores its keys, ``primary``, ``higher_is_better`` and ``total``: the metric over the
            group as its task aggregates it.
        seed: of the resamples behind the intervals.

    Raises:
        UserError: the directory cannot be written.
    """
    import pyarrow.parquet as pq

    rows = accuracy_rows(scores, totals, seed)
    for name, table in (("scores", scores), ("accuracy", rows)):
        path = Path(run) / f"{name}.parquet"
        partial = path.with_suffix(".partial")
        columns = {key: [row[key] for row in table] for key in (table[0] if table else ())}
        try:
            if not columns:
                path.unlink(missing_ok=True)
                continue
            pq.write_table(to_table(name, columns), partial, compression="zstd")
            partial.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def accuracy_rows(scores: Sequence[Row], totals: Sequence[Row], seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of ``accuracy.parquet``; suites with a primary mean are pooled as ``all`` where several are."""
    values = _values(scores)
    total = {tuple(row[k] for k in _KEYS): row for row in totals}
    rows = [_row(key, row, values, total, seed) for key, row in total.items()]
    return rows + _pooled_rows(scores, total, seed)


def _values(scores: Sequence[Row]) -> dict[tuple[Any, ...], dict[tuple[str, str], float | None]]:
    """Map group -> (suite, prompt) -> value."""
    found: dict[tuple[Any, ...], dict[tuple[str, str], float | None]] = defaultdict(dict)
    for row in scores:
        found[tuple(row[k] for k in _KEYS)][row["suite"], row["prompt_id"]] = row["value"]
    return found


def _clean_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The group that a group's retention is relative to: the clean answers are free ones."""
    named = dict(zip(_KEYS, key, strict=True))
    named |= {"condition": CLEAN, "family": CLEAN.partition("/")[0], "answer_path": "free"}
    return tuple(named[k] for k in _KEYS)


def _row(
    key: tuple[Any, ...],
    facts: Row,
    values: Mapping[tuple[Any, ...], Mapping[tuple[str, str], float | None]],
    totals: Mapping[tuple[Any, ...], Row],
    seed: int,
) -> dict[str, Any]:
    own, clean = values[key], values.get(_clean_key(key))
    row: dict[str, Any] = dict(zip(_KEYS, key, strict=True))
    row |= {
        "primary": facts["primary"],
        "higher_is_better": facts["higher_is_better"],
        "accuracy": facts["total"],
        "accuracy_low": None,
        "accuracy_high": None,
        "scored": len(own),
        "accuracy_retention": None,
        "accuracy_retention_low": None,
        "accuracy_retention_high": None,
    }
    numeric = all(v is not None for v in own.values())
    if numeric:
        sums = _sums(own, sorted(own))
        found = estimate(sums, lambda s: s[..., :1] / s[..., 1:2], _plan(sorted(own), seed))
        row["accuracy_low"], row["accuracy_high"] = _known(found.low[0]), _known(found.high[0])
    if clean is None or row["condition"] == CLEAN:
        return row
    if not numeric or any(v is None for v in clean.values()):
        base = totals[_clean_key(key)]["total"]
        row["accuracy_retention"] = facts["total"] / base if base else None
        return row
    both = sorted(set(own) & set(clean))
    if both and sum(float(clean[p] or 0) for p in both):
        joined = np.concatenate([_sums(own, both), _sums(clean, both)], axis=1)
        kept = estimate(joined, lambda s: s[..., :1] / s[..., 2:3], _plan(both, seed), null=1.0)
        row["accuracy_retention"] = float(kept.value[0])
        row["accuracy_retention_low"] = _known(kept.low[0])
        row["accuracy_retention_high"] = _known(kept.high[0])
    return row


def _pooled_rows(
    scores: Sequence[Row], totals: Mapping[tuple[Any, ...], Row], seed: int
) -> list[dict[str, Any]]:
    """Return primary scores over all suites; metrics of which less is better do not mix with the others."""
    usable = {k for k, row in totals.items() if row["primary"] and row["higher_is_better"]}
    chosen = [s for s in scores if tuple(s[k] for k in _KEYS) in usable and s["value"] is not None]
    if len({s["suite"] for s in chosen}) < 2:
        return []
    pooled = {"task": _POOLED, "version": "", "filter": _POOLED, "metric": _POOLED}
    values: dict[tuple[Any, ...], dict[tuple[str, str], float | None]] = defaultdict(dict)
    for s in chosen:
        key = tuple({**s, "suite": OVERALL, **pooled}[k] for k in _KEYS)
        values[key][s["suite"], s["prompt_id"]] = s["value"]
    facts = {
        key: {
            "primary": True,
            "higher_is_better": True,
            "total": float(np.mean([v for v in found.values() if v is not None])),
        }
        for key, found in values.items()
    }
    return [_row(key, row, values, facts, seed) for key, row in facts.items()]


def _sums(values: Mapping[tuple[str, str], float | None], prompts: Sequence[tuple[str, str]]) -> Floats:
    """[P, 2]: value and one, in the order of the prompts."""
    return np.array([[float(values[p] or 0.0), 1.0] for p in prompts])


def _plan(prompts: Sequence[tuple[str, str]], seed: int) -> Plan:
    _, sizes = np.unique([suite for suite, _ in prompts], return_counts=True)
    return Plan(strata=tuple(int(n) for n in sizes), draws=DRAWS, seed=seed)


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
