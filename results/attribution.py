"""What a condition's drop is made of: the target's new answer, or the drafter's loss on the old one.

Three rates, each over the prompts that have all three answers: tau_clean (clean prompt, its own answer), tau_forced
(perturbed prompt, the clean answer's very tokens) and tau_free (perturbed prompt, its own answer). Then

    tau_clean - tau_free  =  (tau_clean - tau_forced)  +  (tau_forced - tau_free)
          drop            =       drafter part         +        target part

The drafter part is lost on the same tokens, with nothing changed but the prompt; the target part comes with the answer
the target gives instead, whose entropy and repetition stand beside it.

Example:
    parts = attribution("runs/first")
    parts[0].keys["condition"], parts[0].drafter_part, parts[0].target_part
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.results.aggregate import GROUP, Source, connect, pooled_groups, register
from specbench.results.intervals import CLEAN
from specbench.results.statistics import DRAWS, Estimates, Floats, Plan, estimate
from specbench.results.sums import Group, strata_of
from specbench.results.text import Sheet, csv_text, json_text, render_sheets

LEGEND = (
    "drop = clean − free; drafter part = clean − forced: lost on the very tokens of the clean answer; target part = "
    "forced − free: comes with the target's other answer; ± half a 95 % interval over prompts; entropy in nats and "
    "repeating answers: the free answer against the clean one"
)

_NAMES = tuple(c for c in GROUP if c not in ("suite", "condition", "answer_path"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A number with its 95 % interval; None where one prompt gives none."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """Return value and half the interval, as in ``0.12 ±0.03``."""
        if self.low is None or self.high is None:
            return f"{self.value:+.2f}"
        return f"{self.value:+.2f} ±{(self.high - self.low) / 2:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The parts of one drafter's drop under one condition; suites are pooled."""

    keys: Mapping[str, Any]
    """run_id, target, drafter, runner, sampler, temperature, k, condition."""
    family: str
    clean: float
    forced: float
    free: float
    """Accepted draft tokens per round, over the same prompts."""
    drop: Part
    drafter_part: Part
    target_part: Part
    entropy_clean: float | None
    entropy: float | None
    """The target's mean entropy over its answers, nats."""
    repeating_clean: float | None
    repeating: float | None
    """Share of answers that repeat themselves."""
    num_prompts: int


def attribution(
    sources: Source | Iterable[Source] = (), *, connection: Any = None, draws: int = DRAWS, seed: int = 0
) -> list[Attribution]:
    """Split the drop of every condition that was run on both answer paths.

    Args:
        sources: run directories.
        connection: one that has the views already.
        draws: resamples behind the intervals.
        seed: of the resamples.

    Raises:
        UserError: a source is not a run directory or holds impossible values.
    """
    if connection is None:
        connection = connect()
        register(connection, sources)
    # most runs hold free answers alone; their rounds need not be summed to learn that
    if not connection.execute("SELECT 1 FROM answers WHERE answer_path = 'forced' LIMIT 1").fetchall():
        return []
    pooled, families = pooled_groups(connection)
    facts = _answer_facts(connection)
    drafters: dict[tuple[Any, ...], dict[tuple[str, str], Group]] = defaultdict(dict)
    for group in pooled:
        where = (group.keys["condition"], group.keys["answer_path"])
        drafters[tuple(group.keys[c] for c in _NAMES)][where] = group
    found = []
    for values, groups in drafters.items():
        keys = dict(zip(_NAMES, values, strict=True))
        clean = groups.get((CLEAN, "free"))
        for condition in sorted({c for c, path in groups if path == "forced" and c != CLEAN}):
            free = groups.get((condition, "free"))
            if clean is None or free is None:
                continue
            split = _split(clean, groups[condition, "forced"], free, draws, seed)
            if split is None:
                continue
            rates, parts = split
            run = keys["run_id"]
            before, after = (facts.get((run, c, "free"), (None, None)) for c in (CLEAN, condition))
            found.append(
                Attribution(
                    keys={**keys, "condition": condition},
                    family=families[condition],
                    clean=rates[0],
                    forced=rates[1],
                    free=rates[2],
                    drop=_part(parts, 0),
                    drafter_part=_part(parts, 1),
                    target_part=_part(parts, 2),
                    entropy_clean=before[0],
                    entropy=after[0],
                    repeating_clean=before[1],
                    repeating=after[1],
                    num_prompts=parts.num_prompts,
                )
            )
    return found


def _answer_facts(connection: Any) -> dict[tuple[str, str, str], tuple[float | None, float | None]]:
    """(run, condition, path) -> (mean entropy, share that repeats itself)."""
    rows = connection.execute(
        "SELECT run_id, condition, answer_path, avg(mean_entropy), avg(degenerate::INT) FROM answers "
        "WHERE error IS NULL GROUP BY ALL"
    ).fetchall()
    return {(run, condition, path): (entropy, share) for run, condition, path, entropy, share in rows}


def _split(
    clean: Group, forced: Group, free: Group, draws: int, seed: int
) -> tuple[list[float], Estimates] | None:
    """Return the three rates and (drop, drafter part, target part) over the prompts all three have."""
    shared = np.intersect1d(np.intersect1d(clean.prompts, forced.prompts), free.prompts)
    if not len(shared):
        return None
    columns = []
    for group in (clean, forced, free):
        own = group.sums[np.searchsorted(group.prompts, shared)]
        columns += [own[:, 1:].sum(axis=1), own[:, 0]]
    sums = np.stack(columns, axis=1)

    def rates(total: Floats) -> Floats:
        result: Floats = total[..., ::2] / total[..., 1::2]
        return result

    def parts(total: Floats) -> Floats:
        a, b, c = np.moveaxis(rates(total), -1, 0)
        return np.stack([a - c, a - b, b - c], axis=-1)

    suites = clean.suites[np.searchsorted(clean.prompts, shared)]
    plan = Plan(strata=strata_of(suites), draws=draws, seed=seed)
    return rates(sums.sum(axis=0)).tolist(), estimate(sums, parts, plan)


def _part(parts: Estimates, index: int) -> Part:
    low, high = float(parts.low[index]), float(parts.high[index])
    known = np.isfinite(low) and np.isfinite(high)
    return Part(value=float(parts.value[index]), low=low if known else None, high=high if known else None)


def render(parts: Sequence[Attribution], form: str, width: int = 120) -> str:
    """Return the parts as text, one table a drafter, the largest drop first.

    Args:
        parts: from :func:`attribution`.
        form: ``text``, ``md``, ``html``, ``csv`` or ``json``.
        width: terminal columns, for ``text``.

    Raises:
        UserError: the form is unknown.
    """
    if form == "json":
        return json_text([_record(p) for p in parts])
    if form == "csv":
        records = [_record(p) for p in parts]
        names = list(records[0]) if records else []
        return csv_text(names, [[r[n] for n in names] for r in records])
    tables: dict[tuple[Any, ...], list[Attribution]] = defaultdict(list)
    for part in parts:
        tables[tuple(part.keys[c] for c in _NAMES)].append(part)
    return render_sheets([_sheet(rows) for rows in tables.values()], LEGEND, form, width)


def _record(part: Attribution) -> dict[str, Any]:
    record = {**part.keys, "family": part.family, "num_prompts": part.num_prompts}
    record |= {"clean": part.clean, "forced": part.forced, "free": part.free}
    for name in ("drop", "drafter_part", "target_part"):
        own: Part = getattr(part, name)
        record |= {name: own.value, f"{name}_low": own.low, f"{name}_high": own.high}
    for name in ("entropy_clean", "entropy", "repeating_clean", "repeating"):
        record[name] = getattr(part, name)
    return record


def _sheet(rows: Sequence[Attribution]) -> Sheet:
    first = rows[0]
    return Sheet(
        title=f"{first.keys['drafter']}: whose loss is it? · {first.keys['runner']} · k {first.keys['k']}",
        headers=(
            "condition", "clean", "forced", "free", "drop", "drafter part", "target part", "entropy", "repeating", "#pr"
        ),
        rows=tuple(
            (
                row.keys["condition"],
                f"{row.clean:.2f}",
                f"{row.forced:.2f}",
                f"{row.free:.2f}",
                str(row.drop),
                str(row.drafter_part),
                str(row.target_part),
                _change(row.entropy_clean, row.entropy, "{:.2f}"),
                _change(row.repeating_clean, row.repeating, "{:.0%}"),
                str(row.num_prompts),
            )
            for row in sorted(rows, key=lambda r: -r.drop.value)
        ),
        num_labels=1,
    )  # fmt: skip


def _change(before: float | None, after: float | None, form: str) -> str:
    return "–" if before is None or after is None else f"{form.format(before)} → {form.format(after)}"
