"""A run in a few sentences: who accepts most, what hurts each drafter most, and where its chain gives out.

Every sentence is made of numbers that the tables hold; nothing is said that an interval does not carry.

Example:
    verdicts("runs/first")   # ("zoo:eagle3.1 accepts most: 1.42 draft tokens per round at k = 8 ...", ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.results.aggregate import acceptance_table
from specbench.results.intervals import CLEAN, OVERALL
from specbench.results.robustness import Robustness, robustness
from specbench.results.runinfo import DrafterFacts, read_run_info

_STEEP = 0.5
"""A conditional rate below half of the first one counts as a chain that gives out."""
_FEW_ROUNDS = 30
"""Conditional rates over fewer rounds are not worth a sentence."""
_DEGENERATE = 0.2


def verdicts(
    run: str | Path,
    *,
    table: Any = None,
    scores: Sequence[Robustness] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[str, ...]:
    """Return the sentences, most important first.

    Args:
        run: run directory.
        table: its acceptance table with intervals, where it is at hand; resampling is most of the work.
        scores: its robustness, likewise.
        draws: resamples behind the intervals of what is not given.
        seed: of the resamples.
    """
    rows = (acceptance_table(run, draws=draws, seed=seed) if table is None else table).to_pylist()
    suite = OVERALL if any(r["suite"] == OVERALL for r in rows) else rows[0]["suite"]
    deepest = max(r["k"] for r in rows)
    rows = [r for r in rows if r["suite"] == suite and r["k"] == deepest and r["answer_path"] == "free"]
    clean = sorted((r for r in rows if r["condition"] == CLEAN), key=lambda r: -r["accepted_per_round"])
    if not clean:
        return ()
    facts = read_run_info(run).drafters
    by_drafter = {
        s.keys["drafter"]: s
        for s in (robustness(run, draws=draws, seed=seed) if scores is None else scores)
        if s.keys["k"] == deepest and s.keys["answer_path"] == "free"
    }
    sentences = [_first(clean, deepest)]
    scored = {r["drafter"]: by_drafter[r["drafter"]] for r in clean if r["drafter"] in by_drafter}
    sentences += _weaknesses(scored)
    sentences += filter(None, (_gives_out(r, facts.get(r["drafter"]), deepest) for r in clean))
    sentences += _repeating(rows)
    return tuple(sentences)


def _first(clean: Sequence[Mapping[str, Any]], depth: int) -> str:
    best = clean[0]
    text = (
        f"{best['drafter']} accepts {best['accepted_per_round']:.2f} draft tokens per round at k = {depth}"
        f"{_interval(best)} on clean prompts"
    )
    if len(clean) == 1:
        return text + "."
    second = clean[1]
    apart = _apart(best, second)
    return (
        f"{text}, {'more than' if apart else 'not clearly more than'} {second['drafter']} "
        f"({second['accepted_per_round']:.2f}{_interval(second)}); specbench compare gives the paired difference."
    )


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row.get("accepted_low"), row.get("accepted_high")
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def _apart(best: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    low, high = best.get("accepted_low"), second.get("accepted_high")
    return low is not None and high is not None and low > high


def _weaknesses(scores: Mapping[str, Robustness]) -> list[str]:
    """Name the condition that costs each drafter most, and in one sentence those that lose nothing."""
    found, unhurt = [], []
    for drafter, score in scores.items():
        family = min(score.families.values(), key=lambda f: f.worst)
        if family.worst >= 1:
            unhurt.append(drafter)
            continue
        found.append(
            f"{drafter} keeps {family.worst:.0%} of its clean acceptance under {family.worst_condition}, "
            "where it loses most."
        )
    if unhurt:
        names = ", ".join(unhurt[:-1]) + " and " + unhurt[-1] if unhurt[1:] else unhurt[0]
        found.append(f"{names} {'lose' if unhurt[1:] else 'loses'} nothing under any condition of this run.")
    return found


def _gives_out(row: Mapping[str, Any], facts: DrafterFacts | None, depth: int) -> str | None:
    """Say at which step a chain stops being believed, and whether it was trained that far."""
    first = row.get("c_1")
    if not first:
        return None
    for step in range(2, depth + 1):
        rate = row.get(f"c_{step}")
        reached = row["rounds"] * (row.get(f"m_{step - 1}") or 0.0)
        if rate is None or reached < _FEW_ROUNDS:
            return None
        if rate < _STEEP * first:
            trained = facts.trained_depth if facts is not None else None
            beyond = f", beyond the {trained} steps it was trained for" if trained and step > trained else ""
            return (
                f"{row['drafter']} gives out at step {step}: only {rate:.0%} of the rounds that got there accept "
                f"it, against {first:.0%} at step 1{beyond}."
            )
    return None


def _repeating(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warn of conditions under which the target itself repeats."""
    shares: dict[str, float] = {}
    for row in rows:
        if (row.get("degenerate_share") or 0.0) > _DEGENERATE:
            shares[row["condition"]] = row["degenerate_share"]
    return [
        f"Under {condition} the target repeats itself in {share:.0%} of its answers: its acceptance there says little."
        for condition, share in sorted(shares.items(), key=lambda item: -item[1])[:3]
    ]
