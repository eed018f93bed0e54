"""Intervals and tests over prompts: paired cluster bootstrap, Holm's correction, detectable difference.

The prompt is the unit: all turns and rounds of a prompt move together, and two drafters or conditions
compared on the same prompts move together too. Every statistic is a function of per-prompt sums, so
10,000 resamples are one product of a matrix of counts [draws, prompts] with a matrix of sums [prompts,
columns]. Prompts are resampled within their suite, because which suites there are is not chance.

Example:
    sums = np.array([[10.0, 24.0], [8.0, 9.0], ...])     # one row a prompt: rounds, accepted tokens
    e = estimate(sums, lambda s: s[..., 1:] / s[..., :1], Plan(strata=(80,)))
    e.value, e.low, e.high                               # accepted per round with its 95 % interval
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""From sums [..., J] to values [..., Q]."""

DRAWS = 10_000
_BLOCK = 1 << 21
_KEPT_COUNTS = 1 << 25
_MISSING_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to resample."""

    strata: tuple[int, ...]
    """Number of prompts of each suite, in the order of the rows."""
    draws: int = DRAWS
    seed: int = 0
    level: float = 0.95
    expand: bool = True
    """Widen the percentiles for few prompts, so that the interval for a mean of normal data would be
    Student's: Hesterberg (2015), "What teachers should know about the bootstrap". In simulations of this
    problem it covers 93 to 95 % from eight prompts on, where the plain percentiles cover 86 to 93 %, and
    the BCa correction adds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Q statistics with intervals; NaN where there is nothing to say (one prompt, an empty denominator)."""

    value: Floats
    low: Floats
    high: Floats
    error: Floats
    """Standard error: the resamples' standard deviation."""
    p: Floats
    """Two-sided p value by inverting the interval: below 1 - level iff it misses the null value."""
    num_prompts: int


def resampled_sums(sums: Floats, plan: Plan) -> Floats:
    """Return the column sums of every resample.

    Args:
        sums: [P, J] per-prompt sums, rows ordered by stratum.
        plan: draws, seed, strata.

    Returns:
        [draws, J].
    """
    assert sum(plan.strata) == len(sums), (plan.strata, len(sums))
    if plan.draws * len(sums) <= _KEPT_COUNTS:
        return _kept_counts(plan.strata, plan.draws, plan.seed) @ sums
    total = np.zeros((plan.draws, sums.shape[1]))
    for rows, columns, counts in _count_blocks(plan.strata, plan.draws, plan.seed):
        total[rows] += counts @ sums[columns]
    return total


@functools.lru_cache(maxsize=1)
def _kept_counts(strata: tuple[int, ...], draws: int, seed: int) -> Floats:
    """Return all counts [draws, P] at once: many groups of a table share their prompts."""
    kept = np.empty((draws, sum(strata)))
    for rows, columns, counts in _count_blocks(strata, draws, seed):
        kept[rows, columns] = counts
    return kept


def _count_blocks(strata: Sequence[int], draws: int, seed: int) -> Iterator[tuple[slice, slice, Floats]]:
    """Yield (draws, prompts, how often each prompt is drawn in each of these draws), block by block."""
    rng = np.random.default_rng(seed)
    start = 0
    for size in strata:
        step = max(1, _BLOCK // size)
        for first in range(0, draws, step):
            rows = min(step, draws - first)
            drawn = rng.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
            yield slice(first, first + rows), slice(start, start + size), counts.astype(np.float64)
        start += size


def estimate(
    sums: Floats, statistic: Statistic, plan: Plan, null: float | Sequence[float] = 0.0
) -> Estimates:
    """Estimate statistics of prompts' sums with intervals.

    Args:
        sums: [P, J] per-prompt sums, rows ordered by stratum.
        statistic: from sums to values; applied to the total and to every resample.
        plan: how to resample.
        null: the value (one for all, or one each) that ``p`` tests.
    """
    total = sums.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.atleast_1d(statistic(total))
        if len(sums) < 2:
            nothing = np.full_like(value, np.nan)
            return Estimates(
                value=value, low=nothing, high=nothing, error=nothing, p=nothing, num_prompts=len(sums)
            )
        draws = np.ascontiguousarray(statistic(resampled_sums(sums, plan)).T)
    nulls = np.broadcast_to(np.asarray(null, np.float64), value.shape)
    low, high, error, p = (np.full_like(value, np.nan) for _ in range(4))
    whole = np.isfinite(draws.sum(axis=1)) & np.isfinite(value)
    sets = [(np.flatnonzero(whole), draws if whole.all() else draws[whole])] if whole.any() else []
    for q in np.flatnonzero(np.isfinite(value) & ~whole):
        # some resample leaves this one undefined: an empty denominator
        used = draws[q][np.isfinite(draws[q])]
        if len(used) >= (1 - _MISSING_SHARE) * draws.shape[1]:
            sets.append((np.array([q]), used[None]))
    for own, used in sets:
        low[own], high[own], error[own], p[own] = _summarise(value[own], used, nulls[own], len(sums), plan)
    return Estimates(value=value, low=low, high=high, error=error, p=p, num_prompts=len(sums))


def _summarise(
    value: Floats, draws: Floats, null: Floats, prompts: int, plan: Plan
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return low, high, standard error and p of each statistic, [Q], from its finite draws [Q, n]."""
    error = draws.std(axis=1, ddof=1)
    draws = np.sort(draws, axis=1)
    tail = _tail(plan, prompts)
    low, high = _quantile_of_sorted(draws, tail), _quantile_of_sorted(draws, 1 - tail)
    # Sums in another order differ in their last bits; such draws must count as equal.
    slack = 1e-12 * np.maximum(np.abs(value), 1.0)
    at = null[:, None]
    below = np.count_nonzero(draws < at - slack[:, None], axis=1)
    below += np.count_nonzero(draws <= at + slack[:, None], axis=1)
    p = np.array([
        _p_value(float(v), float(n), float(e), int(b) / (2 * draws.shape[1]), draws.shape[1], prompts, plan)
        for v, n, e, b in zip(value, null, error, below, strict=True)
    ])  # fmt: skip
    same = draws[:, -1] - draws[:, 0] <= slack
    return (
        np.where(same, value, low),
        np.where(same, value, high),
        np.where(same, 0.0, error),
        np.where(same, np.where(np.abs(value - null) <= slack, 1.0, 0.0), p),
    )


def _quantile_of_sorted(draws: Floats, share: float) -> Floats:
    """Return the quantile of each row, interpolated; sorting whole is four times faster than numpy's quantile."""
    place = share * (draws.shape[1] - 1)
    before = int(place)
    left, right = draws[:, before], draws[:, min(before + 1, draws.shape[1] - 1)]
    between: Floats = left + (right - left) * (place - before)
    return between


def _tail(plan: Plan, prompts: int) -> float:
    """Return the nominal lower percentile of the interval."""
    half = (1 - plan.level) / 2
    if not plan.expand:
        return half
    return _cumulative(np.sqrt(prompts / (prompts - 1)) * _student_quantile(half, prompts - 1))


def _p_value(
    value: float, null: float, error: float, share: float, draws: int, prompts: int, plan: Plan
) -> float:
    """From the share of resamples below the null to the level whose interval would just touch it."""
    if min(share, 1 - share) * draws < 1:
        # No resample reached the null: Student's tail takes over where counting ends.
        far = 2 * _student_cumulative(-abs(value - null) / error, prompts - 1) if error else 0.0
        return min(2 / (draws + 1), far)
    if plan.expand:
        share = _student_cumulative(np.sqrt((prompts - 1) / prompts) * _quantile(share), prompts - 1)
    return min(1.0, 2 * min(share, 1 - share))


def holm(p: Sequence[float] | Floats) -> Floats:
    """Return p values adjusted for their number, step-down after Holm (1979); NaN stays, uncounted."""
    values = np.asarray(p, np.float64)
    adjusted = np.full_like(values, np.nan)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * factors))
    return adjusted


def detectable(error: float, prompts: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Return the smallest true difference that a two-sided test would find with probability ``power``.

    Args:
        error: standard error of the paired difference.
        prompts: number of prompts it rests on.
        alpha: level of the test; divide by the number of rows where many are compared.
        power: probability of finding the difference.
    """
    if prompts < 2:
        return float("nan")
    freedom = prompts - 1
    return (_student_quantile(1 - alpha / 2, freedom) + _student_quantile(power, freedom)) * error


def _quantile(p: float) -> float:
    return float(_special().ndtri(p))


def _cumulative(z: float) -> float:
    return float(_special().ndtr(z))


@functools.lru_cache(maxsize=1024)
def _student_quantile(p: float, freedom: int) -> float:
    return float(_special().stdtrit(freedom, p))


def _student_cumulative(t: float, freedom: int) -> float:
    return float(_special().stdtr(freedom, t))


@functools.cache
def _special() -> Any:
    from scipy import special

    return special
