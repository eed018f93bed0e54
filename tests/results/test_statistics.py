"""The bootstrap against scipy's, Holm against hand-computed values, intervals against a known truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specbench.results import statistics
from specbench.results.statistics import Plan, detectable, estimate, holm, resampled_sums


def rates(sums: np.ndarray) -> np.ndarray:
    """Rate of two drafters, their difference and their ratio, from (rounds, accepted) twice."""
    left, right = sums[..., 1] / sums[..., 0], sums[..., 3] / sums[..., 2]
    return np.stack([left, right, right - left, right / left], axis=-1)


def drafters(prompts: int, rng: np.random.Generator, odds: float, depth: int = 4) -> np.ndarray:
    """Two drafters on the same prompts: easy prompts are easy for both and take fewer rounds."""
    ease = rng.normal(0.3, 0.8, prompts)
    mean = np.exp(rng.normal(3.6, 0.5, prompts)) / (1 + 1 / (1 + np.exp(-ease)))
    rounds = np.maximum(1, rng.poisson(mean))
    columns = []
    for factor in (1.0, odds):
        chance = 1 / (1 + np.exp(-(ease + rng.normal(0, 0.25, prompts) + np.log(factor))))
        alive, accepted = rounds.copy(), np.zeros(prompts)
        for _ in range(depth):
            alive = rng.binomial(alive, chance)
            accepted += alive
        columns += [rounds.astype(float), accepted]
    return np.stack(columns, axis=1)


def test_percentiles_equal_scipys_on_the_same_resamples() -> None:
    data = drafters(30, np.random.default_rng(0), 1.2)
    got = estimate(data, rates, Plan(strata=(30,), draws=999, seed=11, expand=False))
    for q in range(4):
        expected = stats.bootstrap(
            tuple(data.T),
            lambda *columns, axis=-1, q=q: rates(np.stack([c.sum(axis=axis) for c in columns], -1))[..., q],
            paired=True,
            vectorized=True,
            n_resamples=999,
            method="percentile",
            rng=np.random.default_rng(11),
        )
        assert got.low[q] == pytest.approx(expected.confidence_interval.low, rel=1e-12)
        assert got.high[q] == pytest.approx(expected.confidence_interval.high, rel=1e-12)
        assert got.error[q] == pytest.approx(expected.standard_error, rel=1e-12)


def test_expanded_intervals_of_a_mean_are_students() -> None:
    values = 5 + 2 * stats.norm.ppf((np.arange(12) + 0.5) / 12)
    sums = np.stack([np.ones(12), values], axis=1)
    got = estimate(sums, lambda s: s[..., 1:] / s[..., :1], Plan(strata=(12,), draws=200_000))
    exact = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    plain = estimate(sums, lambda s: s[..., 1:] / s[..., :1], Plan(strata=(12,), draws=200_000, expand=False))
    assert got.high[0] - got.low[0] == pytest.approx(exact[1] - exact[0], rel=0.02)
    assert plain.high[0] - plain.low[0] < 0.9 * (exact[1] - exact[0])


def test_intervals_cover_the_truth_93_to_97_times_in_100() -> None:
    rng, prompts = np.random.default_rng(1), 80
    truth = rates(drafters(2_000_000, rng, 1.1).sum(axis=0))
    hits, number = np.zeros(4), 1500
    for _ in range(number):
        sample = drafters(prompts, rng, 1.1)
        got = estimate(sample, rates, Plan(strata=(prompts,), draws=2000))
        hits += (got.low <= truth) & (truth <= got.high)
    assert ((hits / number > 0.93) & (hits / number < 0.97)).all(), hits / number


def test_p_values_are_uniform_where_there_is_no_difference() -> None:
    rng = np.random.default_rng(2)
    p = [
        estimate(drafters(40, rng, 1.0), rates, Plan(strata=(40,), draws=1000, seed=s), null=(0, 0, 0, 1)).p[
            2:
        ]
        for s in range(600)
    ]
    for column in np.array(p).T:
        assert 0.03 < (column < 0.05).mean() < 0.075
        assert stats.kstest(column, "uniform").pvalue > 0.001


def test_p_is_below_five_per_cent_iff_the_interval_misses_the_null() -> None:
    rng = np.random.default_rng(4)
    outcomes = set()
    for seed in range(200):
        got = estimate(
            drafters(15, rng, 1.25), rates, Plan(strata=(15,), draws=999, seed=seed), null=(0, 0, 0, 1)
        )
        missed = not got.low[2] <= 0 <= got.high[2]
        outcomes.add(missed)
        assert missed == (got.p[2] < 0.05) or abs(got.p[2] - 0.05) < 0.003
    assert outcomes == {True, False}


def test_the_same_seed_gives_the_same_numbers_in_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = drafters(30, np.random.default_rng(0), 1.2)
    plan = Plan(strata=(10, 20), draws=500, seed=7)
    whole = resampled_sums(data, plan)
    assert np.array_equal(whole, resampled_sums(data, plan))
    monkeypatch.setattr(statistics, "_KEPT_COUNTS", 0)
    monkeypatch.setattr(statistics, "_BLOCK", 77)
    assert np.allclose(resampled_sums(data, plan), whole, rtol=1e-13)
    assert not np.allclose(resampled_sums(data, Plan(strata=(10, 20), draws=500, seed=8)), whole)


def test_suites_keep_their_size_in_every_resample() -> None:
    marks = np.zeros((30, 2))
    marks[:10, 0] = 1
    marks[10:, 1] = 1
    assert (resampled_sums(marks, Plan(strata=(10, 20), draws=200)) == [10, 20]).all()


def test_nothing_is_claimed_from_one_prompt_or_an_empty_denominator() -> None:
    one = estimate(np.array([[4.0, 2.0, 4.0, 3.0]]), rates, Plan(strata=(1,)))
    assert one.value[0] == 0.5 and np.isnan([one.low, one.high, one.p, one.error]).all()
    never = np.array([[4.0, 0.0], [5.0, 0.0], [3.0, 0.0]])
    ratio = estimate(never, lambda s: s[..., :1] / s[..., 1:], Plan(strata=(3,), draws=100))
    assert np.isnan(ratio.low[0])


def test_identical_drafters_do_not_differ() -> None:
    data = drafters(20, np.random.default_rng(0), 1.2)
    data[:, 2:] = data[:, :2]
    got = estimate(data, rates, Plan(strata=(20,)), null=(0, 0, 0, 1))
    assert got.p[2] == got.p[3] == 1.0
    assert got.low[2] == got.high[2] == 0.0 and got.low[3] == got.high[3] == 1.0


def test_holm_by_hand() -> None:
    # 4 x 0.005, then max(0.02, 3 x 0.01), max(0.03, 2 x 0.03), max(0.06, 1 x 0.04)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert np.isnan(holm([0.01, np.nan])[1]) and holm([0.01, np.nan])[0] == 0.01


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_equals_its_definition(p: list[float]) -> None:
    """Adjusted p = the smallest level at which the step-down procedure rejects."""
    got = holm(p)
    for i in range(len(p)):
        rank = sorted(range(len(p)), key=lambda j: (p[j], j)).index(i)
        by_rank = sorted(p)
        expected = max(min(1.0, (len(p) - r) * by_rank[r]) for r in range(rank + 1))
        assert got[i] == pytest.approx(expected)


def test_the_detectable_difference_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(9)
    spread, prompts = 0.5, 25
    effect = detectable(spread / np.sqrt(prompts), prompts)
    trials = rng.normal(effect, spread, (4000, prompts))
    found = stats.ttest_1samp(trials, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.03)
    assert np.isnan(detectable(0.1, 1))
    assert detectable(0.1, 25, alpha=0.01) > detectable(0.1, 25)
