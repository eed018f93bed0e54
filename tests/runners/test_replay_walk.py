"""The round walk: hand-computed rounds, invariants, and the expectation against enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.runners.replay import expected_rounds, walk_rounds
from specbench.types import PositionScores


def scores(accepted: list[int], depth: int, drafted: list[int] | None = None) -> PositionScores:
    return PositionScores(
        depth=depth,
        accepted=torch.tensor(accepted),
        drafted=torch.tensor(drafted if drafted is not None else [depth] * len(accepted)),
    )


def test_by_hand() -> None:
    """6 answer tokens, a = [2, 0, 0, 1, 0]: rounds at 0 (a=2) and 3 (a=1); the last token ends the second."""
    rounds = walk_rounds(scores([2, 0, 0, 1, 0], 2), 6, 2)
    assert [(r.start, r.num_accepted, r.num_emitted, r.cut) for r in rounds] == [
        (0, 2, 3, False),
        (3, 1, 2, False),
    ]


def test_an_answer_that_ends_inside_accepted_tokens() -> None:
    """4 tokens, a = [1, 9, 9]: the round at 2 has one token left, accepts it, and there is no bonus token."""
    rounds = walk_rounds(scores([1, 2, 1], 4), 4, 4)
    assert [(r.start, r.num_accepted, r.num_emitted, r.cut) for r in rounds] == [
        (0, 1, 2, True),
        (2, 1, 1, True),
    ]


def test_one_token_has_no_rounds() -> None:
    assert walk_rounds(scores([], 3), 1, 3) == []


@st.composite
def accepted_counts(draw: st.DrawFn) -> tuple[list[int], int]:
    depth = draw(st.integers(1, 6))
    length = draw(st.integers(2, 30))
    counts = [draw(st.integers(0, min(depth, length - 1 - s))) for s in range(length - 1)]
    return counts, depth


@given(accepted_counts(), st.integers(1, 6))
def test_every_token_is_emitted_once(case: tuple[list[int], int], smaller: int) -> None:
    counts, depth = case
    k = min(depth, smaller)
    rounds = walk_rounds(scores(counts, depth), len(counts) + 1, k)
    assert 1 + sum(r.num_emitted for r in rounds) == len(counts) + 1
    position = 0
    for entry in rounds:
        assert entry.start == position
        assert entry.num_accepted == min(counts[position], k)
        assert entry.num_emitted == min(entry.num_accepted + 1, len(counts) - position)
        position += entry.num_emitted


@given(accepted_counts())
def test_smaller_depths_come_from_the_same_scores(case: tuple[list[int], int]) -> None:
    """min(a, k) is what a drafter asked for k tokens would have had accepted."""
    counts, depth = case
    for k in range(1, depth + 1):
        own = walk_rounds(scores([min(c, k) for c in counts], k), len(counts) + 1, k)
        assert own == walk_rounds(scores(counts, depth), len(counts) + 1, k)


@given(accepted_counts())
def test_certain_acceptance_gives_the_walk_back(case: tuple[list[int], int]) -> None:
    """With probabilities 0 and 1 the expectation is the one walk."""
    counts, depth = case
    length = len(counts) + 1
    alpha = torch.zeros(length - 1, depth, dtype=torch.float64)
    for s, count in enumerate(counts):
        alpha[s, :count] = 1.0
    both = scores(counts, depth)
    both.alpha = alpha
    certain = [(r.start, r.num_accepted, r.num_emitted) for r in walk_rounds(both, length, depth)]
    expected = expected_rounds(both, length, depth)
    assert [(r.start, r.num_accepted, r.num_emitted) for r in expected] == certain
    assert all(r.weight == 1.0 for r in expected)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_expectation_equals_enumeration(depth: int) -> None:
    """Enumerate every outcome of every acceptance coin; each path's rounds weigh its probability."""
    length = 5
    generator = torch.Generator().manual_seed(depth)
    alpha = torch.rand(length - 1, depth, generator=generator, dtype=torch.float64)
    for s in range(length - 1):
        alpha[s, length - 1 - s :] = 0.0
    coins = [(s, i) for s in range(length - 1) for i in range(min(depth, length - 1 - s))]
    rounds = accepted = 0.0
    for outcome in itertools.product((0, 1), repeat=len(coins)):
        flips = dict(zip(coins, outcome, strict=True))
        probability = 1.0
        for coin, value in flips.items():
            p = float(alpha[coin])
            probability *= p if value else 1 - p
        start = 0
        while start < length - 1:
            left = length - 1 - start
            count = 0
            while count < min(depth, left) and flips[start, count]:
                count += 1
            rounds += probability
            accepted += probability * count
            start += min(count + 1, left)
    case = scores([0] * (length - 1), depth)
    case.alpha = alpha
    rows = expected_rounds(case, length, depth)
    assert sum(r.weight for r in rows) == pytest.approx(rounds, abs=1e-12)
    assert sum(r.weight * r.num_accepted for r in rows) == pytest.approx(accepted, abs=1e-12)
    assert 1 + sum(r.weight * r.num_emitted for r in rows) == pytest.approx(length, abs=1e-12)
