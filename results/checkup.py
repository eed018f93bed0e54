"""What a drafter's checkup says: every tried setting against the declared one, a table and one sentence.

The measure is the mean number of leading accepted draft tokens over *every* start of the answers, not over the
rounds that decoding would visit: starts are the same under every setting, so settings can be paired start by start,
and differences show that a walk over rounds would drown. ``accepted_per_round`` stands beside it.

Example:
    checkup = conclude("zoo:eagle3.1", readings, remarks, depth=4)
    checkup.verdict      # "healthy: the declared setting accepts 1.21 [1.05, 1.36] draft tokens per round ..."
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specbench.results.statistics import Estimates, Floats, Plan, estimate
from specbench.results.text import Sheet, percent

STARTS, ACCEPTED, FIRST, ROUNDS, ROUND_ACCEPTED = range(5)
"""Columns of a reading's sums: round starts, accepted over all of them, step-1 hits over all of them, rounds of the
walk, accepted over those."""

DECLARED = "as declared"

_LEVEL = 0.05
_GAIN = 0.03
"""Relative gain below which another setting is not called better, however sure the sign is."""
_GAIN_TOKENS = 0.02
"""The same in tokens, so that nothing is made of a drafter that accepts next to nothing."""
_GAIN_PROMPTS = 0.07
"""For the same answers under other prompts: those change the target's states too, and a sound drafter may read them a
few per cent better."""
_GAIN_LEARNED = 0.25
"""For a vocabulary map learned from the answers, which may also mend a weak drafter's habits."""
_NEAR_ZERO = 0.1
"""Step-1 rate below which a drafter does not follow the target at all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """How the drafter fared under one setting."""

    name: str
    """``feedback=pre``, ``taps+1``, ...; ``DECLARED`` for the setting the checkpoint declares."""
    advice: str
    """What to change in the checkpoint if this setting is the right one."""
    sums: Floats
    """[P, 5] per prompt: see ``STARTS`` and the names behind it. Fewer rows than the declared setting's: only the
    first prompts were measured, and only they are compared."""
    first_only: bool = False
    """Only step 1 was measured; it is compared with the declared setting's step 1."""
    learned: bool = False
    """The setting was fitted to the answers and needs a larger gain to count."""
    other_prompts: bool = False
    """The same answers under another prompt, which needs a larger gain to count too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Something seen without comparing settings."""

    text: str
    serious: bool
    """Whether it alone makes the drafter suspicious."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One setting, compared."""

    name: str
    advice: str
    accepted_per_round: float | None
    """None where only step 1 was measured."""
    first_rate: float
    difference: float
    """Accepted from every start, minus the declared setting's."""
    low: float
    high: float
    relative: float
    better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The whole result."""

    drafter: str
    depth: int
    num_prompts: int
    healthy: bool
    verdict: str
    accepted_per_round: float
    accepted_low: float
    accepted_high: float
    tried: tuple[Tried, ...]
    """Best first."""
    remarks: tuple[Remark, ...]
    repairs: tuple[str, ...] = field(default=())
    """Settings that together do best, where more than one had to be changed; each on top of those before it."""

    def sheet(self) -> Sheet:
        """Return the table, the declared setting first."""
        rows = [
            (
                t.name,
                "–" if t.accepted_per_round is None else f"{t.accepted_per_round:.2f}",
                f"{t.first_rate:.2f}",
                "–" if t.name == DECLARED else f"{t.difference:+.3f} [{t.low:+.3f}, {t.high:+.3f}]",
                "–" if t.name == DECLARED else f"{100 * t.relative:+.0f} %",
                _word(t),
            )
            for t in sorted(self.tried, key=lambda t: t.name != DECLARED)
        ]
        return Sheet(
            title=f"{self.drafter}: {len(self.tried) - 1} other settings, {self.num_prompts} prompts, k = {self.depth}",
            headers=("setting", "acc/round", "step 1", "difference per start", "relative", ""),
            rows=tuple(rows),
            num_labels=1,
            text_last=True,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "drafter": self.drafter,
            "depth": self.depth,
            "num_prompts": self.num_prompts,
            "healthy": self.healthy,
            "verdict": self.verdict,
            "accepted_per_round": self.accepted_per_round,
            "accepted_low": _finite(self.accepted_low),
            "accepted_high": _finite(self.accepted_high),
            "repairs": list(self.repairs),
            "remarks": [{"text": r.text, "serious": r.serious} for r in self.remarks],
            "settings": [
                {
                    "name": t.name,
                    "accepted_per_round": t.accepted_per_round,
                    "step_1_rate": t.first_rate,
                    "difference": t.difference,
                    "low": _finite(t.low),
                    "high": _finite(t.high),
                    "relative": _finite(t.relative),
                    "better": t.better,
                    "advice": t.advice,
                }
                for t in self.tried
            ],
        }


LEGEND = (
    "acc/round: accepted draft tokens per round. step 1: share of all answer positions where the first draft token is "
    "the target's. difference: accepted draft tokens from every answer position against the declared setting, paired "
    "over prompts, with an interval that covers all settings together at 95 %; BOS settings are measured on fewer "
    "prompts."
)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _word(tried: Tried) -> str:
    if tried.name == DECLARED:
        return "declared"
    if tried.better:
        return "better"
    return "worse" if tried.high < 0 else "no better"


def compare(readings: Sequence[Reading], *, draws: int = 10_000, seed: int = 0) -> tuple[Tried, ...]:
    """Compare every reading with the first, which is the declared setting; best first.

    Where several are better and cannot be told apart, the one that was named first leads: settings come in the order
    in which mistakes are common.

    Args:
        readings: over the same prompts in the same order.
        draws: resamples of the prompts.
        seed: of the resamples.
    """
    declared, *others = readings
    assert declared.name == DECLARED, declared.name
    level = 1 - _LEVEL / max(1, len(others))
    tried = [_compared(declared, declared, level, draws, seed)]
    tried += [_compared(other, declared, level, draws, seed) for other in others]
    ranked = sorted(tried, key=lambda t: (-t.better, -t.difference))
    by_name = {reading.name: reading for reading in readings}
    leader = by_name[ranked[0].name]
    for one, reading in zip(tried, readings, strict=True):
        if one.better and one is not ranked[0] and reading.first_only == leader.first_only:
            rest = _compared(leader, reading, 1 - _LEVEL, draws, seed)
            if not rest.better:
                ranked.remove(one)
                ranked.insert(0, one)
                break
        if one is ranked[0]:
            break
    return tuple(ranked)


def _compared(reading: Reading, declared: Reading, level: float, draws: int, seed: int) -> Tried:
    column = FIRST if reading.first_only else ACCEPTED
    shared = min(len(reading.sums), len(declared.sums))
    ours, theirs = reading.sums[:shared], declared.sums[:shared]
    assert np.array_equal(ours[:, STARTS], theirs[:, STARTS]), "settings share their starts"
    joined = np.stack([ours[:, column], theirs[:, column], theirs[:, STARTS]], axis=1)
    plan = Plan(strata=(len(joined),), draws=draws, seed=seed, level=level)
    found = estimate(joined, lambda s: (s[..., :1] - s[..., 1:2]) / s[..., 2:3], plan)
    total, base = ours.sum(0), theirs.sum(0)
    difference = float(found.value[0])
    relative = float(total[column] / base[column] - 1) if base[column] else float("inf" if difference else 0)
    floor = _GAIN_LEARNED if reading.learned else _GAIN_PROMPTS if reading.other_prompts else _GAIN
    rate = float(total[FIRST] / total[STARTS])
    # a setting under which the drafter still does not follow the target mends nothing
    enough = relative >= floor and difference >= _GAIN_TOKENS and rate >= _NEAR_ZERO
    better = bool(found.low[0] > 0) and enough
    return Tried(
        name=reading.name,
        advice=reading.advice,
        accepted_per_round=None if reading.first_only else float(total[ROUND_ACCEPTED] / total[ROUNDS]),
        first_rate=rate,
        difference=difference,
        low=float(found.low[0]),
        high=float(found.high[0]),
        relative=relative,
        better=better,
    )


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """Return the setting to change to; None where the declared one stands."""
    return next((t for t in tried if t.better), None)


def accepted(reading: Reading, *, draws: int = 10_000, seed: int = 0) -> Estimates:
    """Return ``accepted_per_round`` of a reading with its 95 % interval."""
    plan = Plan(strata=(len(reading.sums),), draws=draws, seed=seed)
    return estimate(reading.sums[:, [ROUNDS, ROUND_ACCEPTED]], lambda s: s[..., 1:] / s[..., :1], plan)


def conclude(
    drafter: str,
    readings: Sequence[Reading],
    remarks: Sequence[Remark],
    *,
    depth: int,
    settings: str,
    repairs: Sequence[Tried] = (),
    draws: int = 10_000,
    seed: int = 0,
) -> Checkup:
    """Turn readings and remarks into a verdict.

    Args:
        drafter: its name.
        readings: the declared setting first.
        remarks: what was seen beside them.
        depth: k.
        settings: the declared setting in words.
        repairs: what else helps on top of the best setting, in order.
        draws: resamples of the prompts.
        seed: of the resamples.
    """
    tried = compare(readings, draws=draws, seed=seed)
    own = accepted(readings[0], draws=draws, seed=seed)
    base = (float(own.value[0]), float(own.low[0]), float(own.high[0]))
    best = best_of(tried)
    remarks = [*remarks]
    final = repairs[-1] if repairs else best
    rate = (final or next(t for t in tried if t.name == DECLARED)).first_rate
    if rate < _NEAR_ZERO:
        text = (
            f"its first draft token is right at only {percent(rate)} of the answer positions, and no other setting "
            "mends that: it does not follow this target. Another target's drafter, another architecture (an EAGLE-1 "
            "head), or weights that were never trained"
        )
        remarks.insert(0, Remark(text=text, serious=True))
    serious = [r.text for r in remarks if r.serious]
    healthy = best is None and not serious
    chain = [*([best] if best is not None else []), *repairs]
    return Checkup(
        drafter=drafter,
        depth=depth,
        num_prompts=len(readings[0].sums),
        healthy=healthy,
        verdict=_verdict(base, settings, tried, chain, serious),
        accepted_per_round=base[0],
        accepted_low=base[1],
        accepted_high=base[2],
        tried=tried,
        remarks=tuple(remarks),
        repairs=tuple(t.name for t in chain) if len(chain) > 1 else (),
    )


def _verdict(
    base: tuple[float, float, float],
    settings: str,
    tried: Sequence[Tried],
    chain: Sequence[Tried],
    serious: Sequence[str],
) -> str:
    value, low, high = base
    now = f"{value:.2f} [{low:.2f}, {high:.2f}] draft tokens per round"
    if chain:
        last = chain[-1]
        names = " and ".join(t.name for t in chain)
        best = chain[0]
        better = (
            f"{last.accepted_per_round:.2f}"
            if last.accepted_per_round is not None
            else f"{last.first_rate:.2f} of the first draft tokens instead of "
            f"{next(t for t in tried if t.name == DECLARED).first_rate:.2f}"
        )
        advice = "; ".join(dict.fromkeys(t.advice for t in chain))
        also = f". Also: {'; '.join(serious)}" if serious else ""
        return (
            f"suspicious: {names} accepts {better} where the declared setting accepts {now} ({best.name}: "
            f"{best.difference:+.2f} [{best.low:+.2f}, {best.high:+.2f}] per start): {advice}{also}"
        )
    if serious:
        return f"suspicious: the declared setting accepts {now}, and {'; '.join(serious)}"
    others = [t for t in tried if t.name != DECLARED]
    if not others:
        return f"healthy: the declared setting ({settings}) accepts {now}"
    near = max(others, key=lambda t: t.relative)
    return (
        f"healthy: the declared setting ({settings}) accepts {now}, and none of {len(others)} others does better; the "
        f"nearest is {near.name} at {100 * near.relative:+.0f} % per start"
    )
