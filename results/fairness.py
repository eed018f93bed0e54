"""Which drafters may be ranked against each other, by what, and why the others may not.

Chain drafters, heads and block drafters propose differently, so a rank needs a budget that is the same
for all:

``drafts``  the same k: at most so many draft tokens a round
``verify``  the same number of positions the target verifies a round (proposed tokens + 1, as measured)
``time``    measured draft and verify time; ranked by tokens per second, any k

Only rows over the same prompts (token ids, not names), target, sampler, temperature and answer path meet
in one league. A rank counts the drafters that are better beyond chance (paired bootstrap, Holm), so what
the prompts cannot tell apart shares a rank. What cannot be ranked is listed with the reason.

Example:
    league = fair_comparison(["runs/first"], budget="drafts")[0]
    [(e.drafter, e.rank, e.reason) for e in league.entries]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from specbench.errors import unknown_name
from specbench.results.aggregate import GROUP, Source, connect, labels, make_cells, open_runs, register
from specbench.results.intervals import CLEAN, OVERALL
from specbench.results.runinfo import DrafterFacts, RunInfo, read_run_info
from specbench.results.statistics import DRAWS, Floats, Plan, estimate, holm
from specbench.results.sums import Group, accepted_per_round, paired, prompt_groups
from specbench.results.text import Sheet, csv_text, json_text, plain, render_sheets

BUDGETS = ("drafts", "verify", "time")
ALPHA = 0.05
SAME_BUDGET = 0.02
"""Relative difference of measured verify budgets that still counts as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One drafter at one depth."""

    run_id: str
    drafter: str
    kind: str
    runner: str
    k: int
    value: float | None
    """What the budget ranks by: tokens per round, or tokens per second for ``time``."""
    tokens_per_round: float
    verified_per_round: float
    """Positions the target verifies: proposed tokens + 1."""
    num_parameters: int | None
    flops_per_round: float | None
    """2 x parameters x proposed tokens: an estimate that leaves attention and the target out."""
    passes: str
    """Drafter passes a round: none, one, or one per token."""
    draft_ms: float | None
    verify_ms: float | None
    trained_depth: int | None
    training_data: str | None
    rank: int | None = None
    reason: str = ""
    """Why there is no rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class League:
    """Rows over the same prompts, target and sampling law, and the budget they share."""

    keys: Mapping[str, Any]
    budget: str
    entries: tuple[Entry, ...]
    """Ranked ones first."""
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A group with what the budget needs."""

    group: Group
    entry: Entry
    machine: str


def fair_comparison(
    sources: Source | Iterable[Source],
    budget: str = "drafts",
    *,
    condition: str = CLEAN,
    suite: str = OVERALL,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[League]:
    """Rank drafters where a rank means something.

    Args:
        sources: run directories, each with its ``run.json``.
        budget: ``drafts``, ``verify`` or ``time``.
        condition: the condition under which they are compared.
        suite: one suite, or ``all`` pooled.
        draws: resamples.
        seed: of the resamples.

    Returns:
        One league for every set of rows that may meet, larger ones first.

    Raises:
        UserError: unknown budget, suite or condition, or an unreadable run.
    """
    if budget not in BUDGETS:
        raise unknown_name("budget", budget, BUDGETS)
    stores = open_runs(sources)
    infos = [read_run_info(s.path) for s in stores]
    connection = connect()
    register(connection, stores)
    for name, value in (("condition", condition), ("suite", suite)):
        known = [r[0] for r in connection.execute(f"SELECT DISTINCT {name} FROM rounds").fetchall()]
        if value not in known and (name, value) != ("suite", OVERALL):
            raise unknown_name(name, value, known)
    where = {"condition": condition} | ({} if suite == OVERALL else {"suite": suite})
    make_cells(connection, GROUP)
    names = labels([s.path for s in stores]) if len(stores) > 1 else [i.run_id for i in infos]
    by_run = dict(zip(names, infos, strict=True))
    leagues = []
    for keys, members in _leagues(connection, by_run, where, budget).items():
        ranked = _ranked(members, budget, draws, seed)
        shown = {k: v for k, v in keys if k != "prompts"} | {"condition": condition, "suite": suite}
        leagues.append(
            League(keys=shown, budget=budget, entries=ranked, num_prompts=len(members[0].group.prompts))
        )
    return sorted(leagues, key=lambda league: -len(league.entries))


def _leagues(
    connection: Any, infos: Mapping[str, RunInfo], where: Mapping[str, str], budget: str
) -> dict[tuple[tuple[str, Any], ...], list[_Measured]]:
    """Collect the groups that may meet."""
    level = tuple(c for c in GROUP if c != "suite" or "suite" in where)
    hashes = _prompt_hashes(connection, level)
    means = _means(connection, level)
    found: dict[tuple[tuple[str, Any], ...], list[_Measured]] = defaultdict(list)
    for group in prompt_groups(connection, level):
        if any(group.keys[c] != v for c, v in where.items()):
            continue
        info = infos[group.keys["run_id"]]
        key = tuple(group.keys[c] for c in level)
        league = {
            "target": info.target or group.keys["target"],
            "target_fingerprint": info.target_fingerprint,
            "sampler": group.keys["sampler"],
            "temperature": group.keys["temperature"],
            "answer_path": group.keys["answer_path"],
            "prompts": hashes[key],
        }
        facts = info.drafters.get(group.keys["drafter"], DrafterFacts(name=group.keys["drafter"]))
        entry = _entry(group, facts, means[key], budget)
        found[tuple(league.items())].append(_Measured(group=group, entry=entry, machine=info.machine))
    return found


def _prompt_hashes(connection: Any, level: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """Hash the token ids of every prompt behind a group."""
    keys = ", ".join(level)
    rows = connection.execute(
        f"""
        SELECT {keys}, md5(string_agg(line, ';' ORDER BY line)) FROM (
            SELECT DISTINCT {keys}, prompt_id || ' ' || turn || ' ' || ids_hash AS line FROM rounds)
        GROUP BY {keys}
        """
    ).fetchall()
    return {tuple(row[:-1]): row[-1] for row in rows}


def _means(connection: Any, level: Sequence[str]) -> dict[tuple[Any, ...], dict[str, float | None]]:
    keys = ", ".join(level)
    rows = connection.execute(
        f"""
        SELECT {keys}, sum(weight * num_drafted) / sum(weight), sum(draft_ms) / sum(draft_weight),
               sum(verify_ms) / sum(verify_weight)
        FROM cells GROUP BY {keys}
        """
    ).fetchall()
    names = ("drafted", "draft_ms", "verify_ms")
    return {tuple(row[:-3]): dict(zip(names, row[-3:], strict=True)) for row in rows}


def _entry(group: Group, facts: DrafterFacts, means: Mapping[str, float | None], budget: str) -> Entry:
    drafted = means["drafted"] or 0.0
    tokens = float(accepted_per_round(group.sums.sum(axis=0))[0]) + 1
    milliseconds = (means["draft_ms"] or 0.0) + (means["verify_ms"] or 0.0)
    value: float | None = tokens
    if budget == "time":
        value = 1000 * tokens / milliseconds if milliseconds else None
    return Entry(
        run_id=group.keys["run_id"],
        drafter=group.keys["drafter"],
        kind=facts.kind,
        runner=group.keys["runner"],
        k=group.keys["k"],
        value=value,
        tokens_per_round=tokens,
        verified_per_round=drafted + 1,
        num_parameters=facts.num_parameters,
        flops_per_round=None if facts.num_parameters is None else 2 * facts.num_parameters * drafted,
        passes=facts.passes,
        draft_ms=means["draft_ms"],
        verify_ms=means["verify_ms"],
        trained_depth=facts.trained_depth,
        training_data=facts.training_data,
    )


def _ranked(members: Sequence[_Measured], budget: str, draws: int, seed: int) -> tuple[Entry, ...]:
    """Rank the members that share the budget; give the others their reason."""
    divisions: dict[Any, list[_Measured]] = defaultdict(list)
    refused: list[Entry] = []
    for member in members:
        division, reason = _division(member, budget, members)
        if reason:
            refused.append(replace(member.entry, reason=reason))
        else:
            divisions[division].append(member)
    ranked: list[Entry] = []
    for division in sorted(divisions, key=lambda d: (-len(divisions[d]), str(d))):
        rivals = divisions[division]
        if len({(m.entry.run_id, m.entry.drafter) for m in rivals}) < 2:
            refused += [replace(m.entry, reason=_alone(m.entry, budget, divisions)) for m in rivals]
        else:
            ranked += _with_ranks(rivals, draws, seed)
    order = sorted(refused, key=lambda e: (e.drafter, e.k))
    return (*ranked, *order)


def _division(member: _Measured, budget: str, members: Sequence[_Measured]) -> tuple[Any, str]:
    """Return what a member's rivals must share, or why it has none."""
    entry = member.entry
    if budget == "drafts":
        return entry.k, ""
    if budget == "verify":
        # Budgets within the tolerance of the most common one are the same budget.
        common = Counter(round(m.entry.verified_per_round, 3) for m in members).most_common()
        for value, _ in common:
            if abs(entry.verified_per_round / value - 1) <= SAME_BUDGET:
                return value, ""
    if entry.draft_ms is None or entry.verify_ms is None:
        return None, f"the runner {entry.runner} measures no time; run it with --runner decode"
    if not member.machine and len({m.entry.run_id for m in members}) > 1:
        return None, "its run.json names no machine, and times of several runs only compare on one"
    return (entry.runner, member.machine), ""


def _alone(entry: Entry, budget: str, divisions: Mapping[Any, Sequence[_Measured]]) -> str:
    """Say why a member has no rival."""
    if budget == "time":
        return "no other drafter was timed by the same runner on the same machine"
    others = sorted({m.entry.k for d in divisions.values() for m in d if m.entry.drafter != entry.drafter})
    if not others:
        return "no other drafter ran on the same prompts, target and sampling law"
    depths = ", ".join(map(str, others))
    if budget == "verify":
        return (
            f"has the target verify {entry.verified_per_round:.2f} positions a round as no other does; "
            f"compare at a depth of the others ({depths}) or by --budget drafts"
        )
    return (
        f"measured at k = {entry.k}, where no other drafter was (they have {depths}); run both at one depth"
    )


def _with_ranks(rivals: Sequence[_Measured], draws: int, seed: int) -> list[Entry]:
    """Rank each member by how many are better than it beyond chance."""
    pairs = [(i, j) for i in range(len(rivals)) for j in range(i + 1, len(rivals))]
    tested = [_difference(rivals[i], rivals[j], draws, seed) for i, j in pairs]
    corrected = holm([p for _, p in tested])
    better: Counter[int] = Counter()
    for (i, j), (difference, _), p in zip(pairs, tested, corrected, strict=True):
        if p < ALPHA:
            better[i if difference > 0 else j] += 1
    ranked = [replace(m.entry, rank=1 + better[i]) for i, m in enumerate(rivals)]
    return sorted(ranked, key=lambda e: (e.rank or 0, -(e.value or 0)))


def _difference(left: _Measured, right: _Measured, draws: int, seed: int) -> tuple[float, float]:
    """Return right - left in what the budget ranks by, and its p value; times count as fixed."""
    pairs = paired(left.group, right.group)
    scales = [(m.entry.value or 0) / m.entry.tokens_per_round for m in (left, right)]

    def difference(sums: Floats) -> Floats:
        rates = [
            scale * (accepted_per_round(s) + 1) for scale, s in zip(scales, pairs.split(sums), strict=True)
        ]
        return rates[1] - rates[0]

    found = estimate(pairs.joined, difference, Plan(strata=pairs.strata, draws=draws, seed=seed))
    return float(found.value[0]), float(np.nan_to_num(found.p[0], nan=1.0))


_EXPLAINED = {
    "drafts": "Ranked by tokens_per_round among drafters that may draft k tokens a round.",
    "verify": "Ranked by tokens_per_round among drafters that have the target verify as many positions a round.",
    "time": "Ranked by tokens per second: tokens_per_round / (draft + verify time), as measured by one runner on one "
    "machine.",
}
LEGEND = (
    "tokens_per_round = accepted_per_round + 1. A rank is 1 + the number of drafters that are better beyond chance "
    "(paired bootstrap over prompts, Holm), so drafters the prompts cannot tell apart share it. verified: positions "
    "the target verifies a round. FLOPs: 2 × parameters × proposed tokens, an estimate."
)


def render(leagues: Sequence[League], form: str, width: int = 120) -> str:
    """Return leagues as text.

    Args:
        leagues: from :func:`fair_comparison`.
        form: ``text``, ``md``, ``html``, ``csv`` or ``json``.
        width: terminal columns, for ``text``.

    Raises:
        UserError: the form is unknown.
    """
    if form == "json":
        return json_text({"legend": LEGEND, "leagues": [asdict(league) for league in leagues]})
    if form == "csv":
        records = [
            {**league.keys, "budget": league.budget, **asdict(e)}
            for league in leagues
            for e in league.entries
        ]
        names = list(records[0]) if records else []
        return csv_text(names, [list(record.values()) for record in records])
    budget = leagues[0].budget if leagues else "drafts"
    return render_sheets(
        [_sheet(league) for league in leagues], f"{_EXPLAINED[budget]} {LEGEND}", form, width
    )


def _sheet(league: League) -> Sheet:
    keys = {k: v for k, v in league.keys.items() if k != "target_fingerprint"}
    title = " · ".join([f"budget {league.budget}", *(f"{k} {plain(v)}" for k, v in keys.items())])
    several = len({e.run_id for e in league.entries}) > 1
    headers = (
        "rank",
        "drafter",
        "k",
        "tokens/s" if league.budget == "time" else "tokens/round",
        "verified",
        "parameters",
        "FLOPs",
        "passes",
        "draft ms",
        "verify ms",
    )
    return Sheet(
        title=f"{title} · {league.num_prompts} prompts",
        headers=(*headers, "trained on", "not ranked because"),
        rows=tuple(_cells(e, several) for e in league.entries),
        num_labels=3,
        text_last=True,
    )


def _cells(entry: Entry, several_runs: bool) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    trained = [f"k {entry.trained_depth}" if entry.trained_depth else "", entry.training_data or ""]
    return (
        str(entry.rank) if entry.rank else "–",
        f"{entry.drafter} ({entry.run_id})" if several_runs else entry.drafter,
        str(entry.k),
        number(entry.value, ".2f"),
        number(entry.verified_per_round, ".2f"),
        number(entry.num_parameters, ",d"),
        number(entry.flops_per_round, ".2g"),
        entry.passes,
        number(entry.draft_ms, ".2f"),
        number(entry.verify_ms, ".2f"),
        ", ".join(t for t in trained if t) or "unknown",
        entry.reason,
    )
