"""One number for how well a drafter keeps its acceptance when prompts change, and all its parts.

For every condition c, s_c = min(retention_c, 1): what a condition gains does not make up for what another
loses. For every family f with conditions C_f:

    S_f = ((1 - t) * mean of s_c over C_f) + (t * min of s_c over C_f),   t = 1/2
    robustness score = 100 * mean of S_f over families

so a family counts once, however many conditions it has, and its worst condition counts as much as its
mean. The score is never shown without the families, the worst conditions, and how far other weights would
move it.

Example:
    robustness("runs/first")[0].score, robustness("runs/first")[0].families["template"].worst_condition
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from specbench.results.aggregate import GROUP, Source, connect, pooled_groups, register
from specbench.results.intervals import CLEAN
from specbench.results.statistics import DRAWS, Floats, Plan, estimate
from specbench.results.sums import Group, strata_of
from specbench.results.text import Sheet, csv_text, json_text, plain, render_sheets

TILT = 0.5
"""t: how much the worst condition of a family counts against its mean."""

FORMULA = (
    "score = 100 × mean over families of (½ mean + ½ worst) of min(retention, 1), "
    "retention relative to template/regular over the same prompts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The retentions of one family of conditions."""

    retentions: Mapping[str, float]
    """condition -> retention, not capped."""

    @property
    def mean(self) -> float:
        """Mean retention, not capped."""
        return float(np.mean(list(self.retentions.values())))

    @property
    def worst(self) -> float:
        """Smallest retention."""
        return min(self.retentions.values())

    @property
    def worst_condition(self) -> str:
        """The condition with the smallest retention."""
        return min(self.retentions, key=lambda c: (self.retentions[c], c))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The score of the answers under one condition, whoever drafts."""

    accuracy: float
    retention: float | None
    """Relative to the clean condition, over the prompts scored under both."""
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """The score of one drafter and everything it is made of."""

    keys: Mapping[str, Any]
    """run_id, target, drafter, runner, sampler, temperature, k, answer_path."""
    score: float
    """0..100."""
    low: float | None
    high: float | None
    """95 % interval, bootstrap over prompts. The minimum over noisy retentions lies below the true one,
    so with few prompts the score is pessimistic."""
    families: Mapping[str, Family]
    sensitivity: Mapping[str, float]
    """The score under other weights: ``mean only``, ``worst only``, and ``without F`` for each family F."""
    num_prompts: int
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)
    """condition -> what became of the answers' own score; empty where the run was not scored."""


def robustness(
    sources: Source | Iterable[Source] = (), *, connection: Any = None, draws: int = DRAWS, seed: int = 0
) -> list[Robustness]:
    """Score every drafter that was run under the clean condition and at least one other; suites are pooled.

    Args:
        sources: run directories.
        connection: one that has the views already.
        draws: resamples behind the interval.
        seed: of the resamples.

    Raises:
        UserError: a source is not a run directory or holds impossible values.
    """
    if connection is None:
        connection = connect()
        register(connection, sources)
    pooled, families = pooled_groups(connection)
    drafters: dict[tuple[Any, ...], dict[str, Group]] = defaultdict(dict)
    names = tuple(c for c in GROUP if c not in ("suite", "condition"))
    for group in pooled:
        drafters[tuple(group.keys[c] for c in names)][group.keys["condition"]] = group
    scored = []
    for values, conditions in drafters.items():
        keys = dict(zip(names, values, strict=True))
        free = tuple({**keys, "answer_path": "free"}.values())
        clean = conditions.get(CLEAN) or drafters.get(free, {}).get(CLEAN)
        others = {c: g for c, g in conditions.items() if c != CLEAN}
        found = _scored(keys, clean, others, families, draws, seed) if clean else None
        scored += [found] if found else []
    return [replace(s, accuracy=_accuracy(connection, s)) for s in scored]


def _accuracy(connection: Any, score: Robustness) -> dict[str, Accuracy]:
    """Look up what the run's scoring says, over all suites where there are several."""
    rows = connection.execute(
        """
        SELECT condition, accuracy, accuracy_retention, accuracy_retention_low, accuracy_retention_high FROM accuracy
        WHERE "primary" AND run_id = ?
          AND suite = coalesce((SELECT min(suite) FROM accuracy WHERE suite = 'all' AND run_id = ?),
                               (SELECT min(suite) FROM accuracy WHERE run_id = ?))
        ORDER BY condition
        """,
        [score.keys["run_id"]] * 3,
    ).fetchall()
    return {
        condition: Accuracy(accuracy=value, retention=kept, low=low, high=high)
        for condition, value, kept, low, high in rows
    }


def _scored(
    keys: Mapping[str, Any],
    clean: Group,
    conditions: Mapping[str, Group],
    families: Mapping[str, str],
    draws: int,
    seed: int,
) -> Robustness | None:
    """Score one drafter; None where no condition shares a prompt with the clean one."""
    names = [c for c, g in sorted(conditions.items()) if np.isin(g.prompts, clean.prompts).any()]
    if not names:
        return None
    # [P, conditions, (accepted, rounds, clean accepted, clean rounds)]: zero where a prompt lacks the condition,
    # on both sides, so that each condition keeps its own pairs in every resample.
    sums = np.zeros((len(clean.prompts), len(names), 4))
    for column, name in enumerate(names):
        _, own, base = np.intersect1d(
            conditions[name].prompts, clean.prompts, assume_unique=True, return_indices=True
        )
        for first, part in ((0, conditions[name].sums[own]), (2, clean.sums[base])):
            sums[base, column, first] = part[:, 1:].sum(axis=1)
            sums[base, column, first + 1] = part[:, 0]
    groups = _members([families[n] for n in names])

    def score(total: Floats) -> Floats:
        parts = total.reshape(*total.shape[:-1], len(names), 4)
        retained = (parts[..., 0] / parts[..., 1]) / (parts[..., 2] / parts[..., 3])
        return _score(retained, groups, TILT)[..., None]

    plan = Plan(strata=strata_of(clean.suites), draws=draws, seed=seed)
    found = estimate(sums.reshape(len(sums), -1), score, plan)
    total = sums.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        retained = (total[:, 0] / total[:, 1]) / (total[:, 2] / total[:, 3])
    if not np.isfinite(retained).all():
        return None
    return Robustness(
        keys=keys,
        score=float(found.value[0]),
        low=float(found.low[0]) if np.isfinite(found.low[0]) else None,
        high=float(found.high[0]) if np.isfinite(found.high[0]) else None,
        families={
            family: Family(retentions={names[i]: float(retained[i]) for i in members})
            for family, members in groups.items()
        },
        sensitivity=_sensitivity(retained, groups),
        num_prompts=len(clean.prompts),
    )


def _members(families: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, family in enumerate(families):
        found[family].append(index)
    return dict(found)


def _score(retained: Floats, families: Mapping[str, Sequence[int]], tilt: float) -> Floats:
    """From retentions [..., conditions] to scores [...]."""
    capped = np.minimum(retained, 1.0)
    parts = [
        (1 - tilt) * capped[..., m].mean(axis=-1) + tilt * capped[..., m].min(axis=-1)
        for m in (list(members) for members in families.values())
    ]
    score: Floats = 100 * np.mean(parts, axis=0)
    return score


def _sensitivity(retained: Floats, families: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the score under other weights."""
    result = {
        "mean only": float(_score(retained, families, 0.0)),
        "worst only": float(_score(retained, families, 1.0)),
    }
    if len(families) > 1:
        for left_out in families:
            others = {f: m for f, m in families.items() if f != left_out}
            result[f"without {left_out}"] = float(_score(retained, others, TILT))
    return result


def render(scores: Sequence[Robustness], form: str, width: int = 120) -> str:
    """Return robustness scores with all their parts as text.

    Args:
        scores: from :func:`robustness`.
        form: ``text``, ``md``, ``html``, ``csv`` or ``json``.
        width: terminal columns, for ``text``.

    Raises:
        UserError: the form is unknown.
    """
    if form == "json":
        return json_text({"formula": FORMULA, "scores": [_record(s) for s in scores]})
    if form == "csv":
        records = [_record(s) for s in scores]
        names = list(
            dict.fromkeys(k for r in records for k in r if k not in ("families", "sensitivity", "accuracy"))
        )
        return csv_text(names, [[r.get(n) for n in names] for r in records])
    tables: dict[tuple[Any, ...], list[Robustness]] = defaultdict(list)
    for score in scores:
        tables[tuple(v for k, v in score.keys.items() if k != "answer_path")].append(score)
    sheets = [_sheet(paths) for paths in tables.values()] + [_accuracy_sheet(s) for s in scores if s.accuracy]
    return render_sheets(sheets, FORMULA, form, width)


def _record(score: Robustness) -> dict[str, Any]:
    return {
        **score.keys,
        "score": score.score,
        "low": score.low,
        "high": score.high,
        "num_prompts": score.num_prompts,
        "families": {
            name: {"mean": f.mean, "worst": f.worst, "worst_condition": f.worst_condition, **f.retentions}
            for name, f in score.families.items()
        },
        "sensitivity": dict(score.sensitivity),
        **({"accuracy": {c: asdict(a) for c, a in score.accuracy.items()}} if score.accuracy else {}),
    }


def _accuracy_sheet(score: Robustness) -> Sheet:
    """Acceptance retention and accuracy retention of every condition, side by side."""
    kept = {c: r for family in score.families.values() for c, r in family.retentions.items()}
    rows = []
    for condition in [CLEAN, *kept]:
        found = score.accuracy.get(condition)
        held = None if found is None else found.retention
        interval = "–"
        if found is not None and found.low is not None and found.high is not None:
            interval = f"[{found.low:.3f}, {found.high:.3f}]"
        rows.append(
            (
                condition,
                "1.000" if condition == CLEAN else f"{kept[condition]:.3f}",
                "–" if found is None else f"{found.accuracy:.3f}",
                "1.000" if condition == CLEAN else "–" if held is None else f"{held:.3f}",
                interval,
            )
        )
    keys = " · ".join(f"{k} {plain(v)}" for k, v in score.keys.items() if k in ("runner", "k"))
    return Sheet(
        title=f"{score.keys['drafter']}: acceptance and accuracy kept · {keys}",
        headers=("condition", "acceptance retention", "accuracy", "accuracy retention", "95 %"),
        rows=tuple(rows),
        num_labels=1,
    )


def _sheet(paths: Sequence[Robustness]) -> Sheet:
    """Return one drafter's table; the free and the forced answers side by side where both were run."""
    paths = sorted(paths, key=lambda s: s.keys["answer_path"] != "free")
    keys = paths[0].keys
    both = len(paths) > 1
    scores = []
    for score in paths:
        interval = "" if score.low is None else f" [{score.low:.1f}, {score.high:.1f}]"
        others = ", ".join(f"{name} {value:.1f}" for name, value in score.sensitivity.items())
        path = score.keys["answer_path"]
        scores.append(f"{path} {score.score:.1f}{interval} (other weights: {others})")
    names = list(dict.fromkeys(name for score in paths for name in score.families))
    headers, columns = ["family"], [names]
    for score in paths:
        path = f"{score.keys['answer_path']} " if both else ""
        own = [score.families.get(name) for name in names]
        headers += [f"{path}mean", f"{path}worst", "conditions", f"{path}worst condition"]
        columns += [
            [f"{f.mean:.3f}" if f else "–" for f in own],
            [f"{f.worst:.3f}" if f else "–" for f in own],
            [str(len(f.retentions)) if f else "–" for f in own],
            [f.worst_condition if f else "–" for f in own],
        ]
    return Sheet(
        title=f"{keys['drafter']}: robustness {'; '.join(scores)} · {keys['runner']} · k {keys['k']}",
        headers=tuple(headers),
        rows=tuple(zip(*columns, strict=True)),
        num_labels=1,
        text_last=True,
    )
