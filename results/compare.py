"""Paired comparison of drafters, conditions, runners or targets, within a run or across runs.

Both sides of a row are scored on the same prompts; the interval is a bootstrap over these prompts; p
values are corrected after Holm for the number of rows. A row that shows nothing also says what it could
have shown.

Example:
    result = compare(["runs/first"], pair="drafter")
    result.rows[0].verdict    # "eagle3=head accepts 12.4 % more than ngram"
"""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from specbench.errors import UserError, unknown_name
from specbench.results.aggregate import GROUP, Source, connect, make_cells, register
from specbench.results.intervals import CLEAN, OVERALL
from specbench.results.statistics import DRAWS, Floats, Plan, detectable, estimate, holm
from specbench.results.sums import Group, Integers, Pairs, accepted_per_round, paired, prompt_groups
from specbench.results.text import Sheet, csv_text, json_text, percent, plain

PAIRS = ("drafter", "condition", "runner", "target")
Outcome = Literal["higher", "lower", "same", "no difference", "undecided", "unknown"]

ALPHA = 0.05
EFFECT = 0.05
"""The relative difference that a row which shows nothing is asked about."""


LEGEND = (
    "accepted_per_round: draft tokens accepted per round, the target's own token not counted. Intervals: 95 %, "
    "bootstrap over prompts with all their turns. p: corrected for the number of rows after Holm. Smallest "
    "visible: the relative difference that these prompts would show with probability 0.8."
)

_CONTEXT = (
    "run_id",
    "suite",
    "condition",
    "answer_path",
    "target",
    "drafter",
    "runner",
    "sampler",
    "temperature",
    "k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One paired comparison of ``accepted_per_round``: right against left."""

    context: Mapping[str, Any]
    """What both sides have in common: suite, condition, k, ..."""
    left: str
    right: str
    num_prompts: int
    left_value: float | None
    right_value: float | None
    difference: float | None = None
    """right - left, accepted tokens per round."""
    difference_low: float | None = None
    difference_high: float | None = None
    ratio: float | None = None
    """right / left."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_error: float | None = None
    """Standard error of ``ratio``."""
    p: float | None = None
    p_holm: float | None = None
    """Corrected for all rows of the comparison."""
    detectable: float | None = None
    """Smallest relative difference that these prompts show with probability 0.8, at the corrected level."""
    outcome: Outcome = "unknown"
    """``higher``: right accepts more, beyond chance; ``no difference``: none found, and one of ``effect``
    would have been; ``undecided``: none found, but the sample was too small to see ``effect``."""
    verdict: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows, and what was asked."""

    pair: str
    rows: tuple[Row, ...]
    effect: float
    draws: int
    seed: int
    notes: tuple[str, ...] = field(default=())


def compare(
    sources: Source | Iterable[Source],
    pair: str = "drafter",
    *,
    baseline: str | None = None,
    suite: str | None = None,
    condition: str | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    effect: float = EFFECT,
) -> Comparison:
    """Compare what differs in one column and agrees in all others, on the prompts both sides have.

    Values of the column are paired within a run where one run has both, otherwise across runs; the same
    value in two runs is paired across these runs. Across runs, prompts whose rendered token ids differ
    are left out.

    Args:
        sources: run directories.
        pair: the column: ``drafter``, ``condition``, ``runner`` or ``target``.
        baseline: the value everything is compared with; for conditions ``template/regular``, otherwise
            all pairs.
        suite: only this one (``all``: only the pooled rows). Fewer rows cost less in the correction.
        condition: only this one; where conditions are paired, only this one against the baseline.
        draws: resamples.
        seed: of the resampling.
        effect: relative difference that a row without a finding is asked about.

    Raises:
        UserError: the column or the baseline is unknown, or nothing can be paired.
    """
    if pair not in PAIRS:
        raise unknown_name("column to pair", pair, PAIRS)
    connection = connect()
    register(connection, sources)
    for column, value in (("suite", suite), ("condition", condition)):
        known = [r[0] for r in connection.execute(f"SELECT DISTINCT {column} FROM rounds").fetchall()]
        if value is not None and value not in known and (column, value) != ("suite", OVERALL):
            raise unknown_name(column, value, known)
    make_cells(connection, GROUP)
    baseline = baseline or (CLEAN if pair == "condition" else None)
    runs = [r[0] for r in connection.execute("SELECT DISTINCT run_id FROM rounds ORDER BY 1").fetchall()]
    hashes = _Hashes(connection) if len(runs) > 1 and pair in ("drafter", "runner") else None
    rows = []
    for level in (GROUP, tuple(c for c in GROUP if c != "suite")):
        groups = prompt_groups(connection, level, named=hashes is not None)
        if "suite" not in level and suite != OVERALL and len({s for g in groups for s in g.suites}) < 2:
            continue
        for context, sides in _contexts(groups, pair).items():
            named = {"suite": OVERALL, **dict(context)}
            if suite not in (None, named["suite"]) or condition not in (
                None,
                named.get("condition", condition),
            ):
                continue
            for left, right in _pairings(sides, pair, baseline):
                if pair == "condition" and condition not in (None, right.keys["condition"]):
                    continue
                rows.append(_row(named, left, right, pair, len(runs) > 1, hashes, draws, seed))
    if not rows:
        raise UserError(_nothing(pair, baseline, connection))
    return _judged(rows, pair, effect, draws, seed)


def _nothing(pair: str, baseline: str | None, connection: Any) -> str:
    known = [r[0] for r in connection.execute(f"SELECT DISTINCT {pair} FROM rounds ORDER BY 1").fetchall()]
    if baseline is not None and baseline not in known:
        return str(unknown_name(pair, baseline, known))
    return (
        f"no two {pair}s can be paired: the runs hold {', '.join(known)}; give a run with two of them, or runs that "
        "agree in everything else (suite, condition, depth, runner, target)"
    )


def _contexts(groups: Sequence[Group], pair: str) -> dict[tuple[tuple[str, Any], ...], list[Group]]:
    """Collect the groups that differ in ``pair`` and the run alone."""
    found: dict[tuple[tuple[str, Any], ...], list[Group]] = defaultdict(list)
    for group in groups:
        context = tuple((c, v) for c, v in group.keys.items() if c not in (pair, "run_id"))
        found[context].append(group)
    if pair == "condition":
        # The clean answer is never forced, so forced answers are compared with the free clean one.
        for context, sides in found.items():
            own = dict(context)
            if own["answer_path"] == "forced" and not any(g.keys["condition"] == CLEAN for g in sides):
                free = found.get(tuple({**own, "answer_path": "free"}.items()), [])
                sides += [g for g in free if g.keys["condition"] == CLEAN]
    return found


def _pairings(sides: Sequence[Group], pair: str, baseline: str | None) -> list[tuple[Group, Group]]:
    """Choose which groups of one context stand against each other."""
    by_value: dict[str, dict[str, Group]] = defaultdict(dict)
    for group in sides:
        by_value[group.keys[pair]][group.keys["run_id"]] = group
    chosen = []
    for value, runs in by_value.items():
        if pair != "condition" and (baseline is None or value == baseline):
            chosen += list(itertools.combinations(runs.values(), 2))
    values = sorted(by_value, key=lambda v: (v != baseline, v))
    for left, right in itertools.combinations(values, 2):
        if baseline is not None and left != baseline:
            continue
        common = [run for run in by_value[left] if run in by_value[right]]
        if common:
            chosen += [(by_value[left][run], by_value[right][run]) for run in common]
        else:
            chosen += list(itertools.product(by_value[left].values(), by_value[right].values()))
    return chosen


class _Hashes:
    """The rendered token ids of every prompt in every run, as hashes."""

    def __init__(self, connection: Any) -> None:
        rows = connection.execute(
            """
            SELECT run_id, condition, answer_path, target, suite, prompt_id,
                   string_agg(ids_hash, ' ' ORDER BY turn) AS hashes
            FROM answers WHERE error IS NULL GROUP BY ALL
            """
        ).fetchall()
        self._known = {tuple(row[:-1]): row[-1] for row in rows}

    def differing(self, left: Group, right: Group) -> Integers:
        """Return the numbers of the shared prompts whose token ids differ."""
        if left.keys["run_id"] == right.keys["run_id"]:
            return np.empty(0, np.int64)
        of_right = dict(zip(right.prompts.tolist(), right.names, strict=True))
        differ = [
            number
            for number, name in zip(left.prompts.tolist(), left.names, strict=True)
            if number in of_right and self._of(left, name) != self._of(right, of_right[number])
        ]
        return np.array(differ, np.int64)

    def _of(self, group: Group, name: tuple[str, str]) -> str | None:
        keys = group.keys
        return self._known.get(
            (keys["run_id"], keys["condition"], keys["answer_path"], keys["target"], *name)
        )


def _row(
    context: Mapping[str, Any],
    left: Group,
    right: Group,
    pair: str,
    several_runs: bool,
    hashes: _Hashes | None,
    draws: int,
    seed: int,
) -> Row:
    """Compare two groups; the verdict waits until all rows are known."""
    out = hashes.differing(left, right) if hashes else np.empty(0, np.int64)
    pairs = paired(left, right, out)
    across = left.keys["run_id"] != right.keys["run_id"]
    labels = [f"{g.keys[pair]} ({g.keys['run_id']})" if across else str(g.keys[pair]) for g in (left, right)]
    if several_runs and not across:
        context = {"run_id": left.keys["run_id"], **context}
    dropped = len(np.union1d(left.prompts, right.prompts)) - len(pairs.left)
    notes = [
        f"{len(out)} prompts left out: their token ids differ between the runs" if len(out) else "",
        f"{dropped - len(out)} prompts left out: only one side has them" if dropped > len(out) else "",
    ]
    empty = Row(
        context=context,
        left=labels[0],
        right=labels[1],
        num_prompts=len(pairs.left),
        left_value=None,
        right_value=None,
        note="; ".join(n for n in notes if n),
    )
    return _estimated(empty, pairs, draws, seed) if len(pairs.left) else empty


def _estimated(row: Row, pairs: Pairs, draws: int, seed: int) -> Row:
    def statistics(sums: Floats) -> Floats:
        left, right = (accepted_per_round(s) for s in pairs.split(sums))
        return np.concatenate([left, right, right - left, right / left], axis=-1)

    found = estimate(
        pairs.joined, statistics, Plan(strata=pairs.strata, draws=draws, seed=seed), (0, 0, 0, 1)
    )
    value, low, high = (dict(enumerate(_plain(a))) for a in (found.value, found.low, found.high))
    return replace(
        row,
        left_value=value[0],
        right_value=value[1],
        difference=value[2],
        difference_low=low[2],
        difference_high=high[2],
        ratio=value[3],
        ratio_low=low[3],
        ratio_high=high[3],
        p=_plain(found.p)[2],
        ratio_error=_plain(found.error)[3],
    )


def _plain(values: Floats) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]


def _judged(rows: Sequence[Row], pair: str, effect: float, draws: int, seed: int) -> Comparison:
    """Correct the p values for the number of rows and put each result into words."""
    corrected = holm([np.nan if r.p is None else r.p for r in rows])
    tests = max(1, int(np.isfinite(corrected).sum()))
    judged = []
    for row, p in zip(rows, corrected, strict=True):
        seen = None
        if row.ratio_error is not None:
            seen = detectable(row.ratio_error, row.num_prompts, alpha=ALPHA / tests)
        row = replace(row, p_holm=float(p) if np.isfinite(p) else None, detectable=seen)
        outcome, verdict = _verdict(row, effect)
        judged.append(replace(row, outcome=outcome, verdict=verdict))
    return Comparison(pair=pair, rows=tuple(judged), effect=effect, draws=draws, seed=seed)


def _verdict(row: Row, effect: float) -> tuple[Outcome, str]:
    if row.num_prompts == 0:
        return "unknown", "not comparable: no prompt has the same token ids on both sides"
    if row.p_holm is None or row.difference is None:
        few = row.num_prompts == 1
        return (
            "unknown",
            "nothing to say from one prompt" if few else "nothing accepted: no ratio to speak of",
        )
    if row.difference == 0 and row.difference_low == row.difference_high == 0:
        return "same", "the same on every prompt"
    if row.p_holm < ALPHA:
        how = "more" if row.difference > 0 else "less"
        amount = "" if row.ratio is None else " " + percent(abs(row.ratio - 1))
        return ("higher" if how == "more" else "lower"), f"{row.right} accepts{amount} {how} than {row.left}"
    if row.detectable is None:
        return "undecided", "no difference found"
    seen, asked = percent(row.detectable), percent(effect)
    if row.detectable <= effect:
        return "no difference", f"no difference found; {asked} would have been (smallest visible: {seen})"
    return "undecided", f"no difference found, but {asked} could be missed (smallest visible: {seen})"


def render(comparison: Comparison, form: str) -> str:
    """Return a comparison as text.

    Args:
        comparison: from :func:`compare`.
        form: ``text`` for a terminal, ``md`` and ``html`` for people, ``csv`` and ``json`` for programs.

    Raises:
        UserError: the form is unknown.
    """
    if form in ("csv", "json"):
        records = [_record(row) for row in comparison.rows]
        if form == "json":
            asked = {"pair": comparison.pair, "effect": comparison.effect, "draws": comparison.draws}
            return json_text({**asked, "seed": comparison.seed, "legend": LEGEND, "rows": records})
        names = list(dict.fromkeys(key for record in records for key in record))
        return csv_text(names, [[record.get(n) for n in names] for record in records])
    if form == "text":
        return _text(comparison)
    if form not in ("md", "html"):
        raise unknown_name("format", form, ("text", "md", "csv", "json", "html"))
    sheet = _sheet(comparison)
    return (
        f"{sheet.markdown()}\n{LEGEND}\n" if form == "md" else f"{sheet.html()}<p>{html.escape(LEGEND)}</p>\n"
    )


def _record(row: Row) -> dict[str, Any]:
    """Flatten a row."""
    measured = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "context"}
    return {**row.context, **measured}


def _varying(comparison: Comparison) -> list[str]:
    return [c for c in _CONTEXT if len({row.context.get(c) for row in comparison.rows}) > 1]


def _fixed(comparison: Comparison) -> str:
    """Name what holds for all rows."""
    first, varying = comparison.rows[0].context, _varying(comparison)
    shown = [f"{c} {plain(first[c])}" for c in _CONTEXT if c in first and c not in varying]
    return " · ".join([f"pairs of {comparison.pair}s", *shown])


def _interval(value: float | None, low: float | None, high: float | None, digits: int) -> str:
    if value is None:
        return "–"
    if low is None or high is None:
        return f"{value:+.{digits}f}"
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _change(row: Row) -> str:
    """Return the relative difference with its interval, in per cent."""
    percents = [None if x is None else 100 * (x - 1) for x in (row.ratio, row.ratio_low, row.ratio_high)]
    return _interval(percents[0], percents[1], percents[2], 1)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        *("–" if v is None else f"{v:.2f}" for v in (row.left_value, row.right_value)),
        _interval(row.difference, row.difference_low, row.difference_high, 2),
        _change(row),
        "–" if row.p_holm is None else f"{row.p_holm:.2g}",
        str(row.num_prompts),
        "; ".join(part for part in (row.verdict, row.note) if part),
    )


def _sheet(comparison: Comparison) -> Sheet:
    varying = _varying(comparison)
    measures = (
        "left accepted_per_round",
        "right accepted_per_round",
        "difference",
        "change in %",
        "p",
        "prompts",
    )
    return Sheet(
        title=_fixed(comparison),
        headers=(*varying, "left", "right", *measures, "verdict"),
        rows=tuple(
            (*(plain(row.context.get(c, "")) for c in varying), row.left, row.right, *_cells(row))
            for row in comparison.rows
        ),
        num_labels=len(varying) + 2,
        text_last=True,
    )


def _text(comparison: Comparison) -> str:
    """Return two lines a row, which fit any terminal: the numbers, then the verdict."""
    lines = [_fixed(comparison)]
    varying = _varying(comparison)
    heading = None
    for row in comparison.rows:
        here = " · ".join(plain(row.context[c]) for c in varying if c in row.context)
        if here != heading:
            heading = here
            lines += ["", here] if here else [""]
        left, right, difference, change, p, prompts, verdict = _cells(row)
        lines.append(f"  {row.left} {left}  →  {row.right} {right}")
        lines.append(f"    {difference}   {change} %   p {p}   {prompts} prompts")
        lines.append(f"    {verdict}")
    return "\n".join(lines) + "\n"
