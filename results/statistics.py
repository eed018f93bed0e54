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
        draws = statistic(resampled_sums(sums, plan))
    nulls = np.broadcast_to(np.asarray(null, np.float64), value.shape)
    columns = [_summarise(value[q], draws[:, q], nulls[q], len(sums), plan) for q in range(len(value))]
    low, high, error, p = (np.array(c) for c in zip(*columns, strict=True))
    return Estimates(value=value, low=low, high=high, error=error, p=p, num_prompts=len(sums))


def _summarise(
    value: float, draws: Floats, null: float, prompts: int, plan: Plan
) -> tuple[float, float, float, float]:
    """Return (low, high, standard error, p) of one statistic."""
    finite = draws[np.isfinite(draws)]
    if not np.isfinite(value) or len(finite) < (1 - _MISSING_SHARE) * len(draws):
        return (np.nan,) * 4
    # Sums in another order differ in their last bits; such draws must count as equal.
    slack = 1e-12 * max(abs(value), 1.0)
    if finite.max() - finite.min() <= slack:
        return (value, value, 0.0, 1.0 if abs(value - null) <= slack else 0.0)
    tail = _tail(plan, prompts)
    low, high = np.quantile(finite, [tail, 1 - tail])
    error = float(finite.std(ddof=1))
    below = np.count_nonzero(finite < null - slack) + np.count_nonzero(finite <= null + slack)
    share = below / (2 * len(finite))
    if min(share, 1 - share) * len(finite) < 1:
        # No resample reached the null: Student's tail takes over where counting ends.
        far = 2 * _student_cumulative(-abs(value - null) / error, prompts - 1)
        return float(low), float(high), error, min(2 / (len(finite) + 1), far)
    return float(low), float(high), error, _p_value(share, prompts, plan)


def _tail(plan: Plan, prompts: int) -> float:
    """Return the nominal lower percentile of the interval."""
    half = (1 - plan.level) / 2
    if not plan.expand:
        return half
    return _cumulative(np.sqrt(prompts / (prompts - 1)) * _student_quantile(half, prompts - 1))


def _p_value(share: float, prompts: int, plan: Plan) -> float:
    """From the share of resamples below the null to the level whose interval would just touch it."""
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
