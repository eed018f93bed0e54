"""Prompt lookup against a quadratic search that states the rule directly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.drafters.ngram import NgramDrafter, NgramIndex, create
from specbench.errors import UserError
from specbench.types import ScoreRequest

from .helpers import make_target, make_trace

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
SIZES = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda p: (p[0], p[0] + p[1]))


def search(tokens: list[int], low: int, high: int, depth: int) -> list[int]:
    """Longest suffix first; for each, the leftmost other place it occurs at; then the tokens behind it."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + depth]
    return []


@settings(max_examples=300, deadline=None)
@given(tokens=TOKENS, sizes=SIZES, depth=st.integers(1, 6))
def test_index_equals_the_search(tokens: list[int], sizes: tuple[int, int], depth: int) -> None:
    index = NgramIndex(*sizes)
    for i, token in enumerate(tokens):
        index.push(token)
        assert index.propose(depth) == search(tokens[: i + 1], *sizes, depth)


def test_documented_cases() -> None:
    index = NgramIndex(2, 5)
    index.extend([7, 8, 9, 7, 8])
    assert index.propose(4) == [9, 7, 8]
    index = NgramIndex(1, 3)
    index.extend([1, 2, 5, 1, 2, 6, 1, 2])
    assert index.propose(2) == [5, 1], "the earliest of two equal matches"
    index.extend([6, 1, 2])
    assert index.propose(2) == [6, 1], "the longest match first"
    index = NgramIndex(1, 2)
    index.extend([4, 4, 4])
    assert index.propose(5) == [4], "a match may overlap the suffix; nothing beyond the context is proposed"


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    depth=st.integers(1, 5),
    sampler=st.sampled_from(["greedy", "match", "rejection"]),
)
def test_scores_equal_sessions(seed: int, depth: int, sampler: str) -> None:
    trace = make_trace((6, 14), seed, vocab=5, temperature=1.0)
    drafter = NgramDrafter(1, 3)
    (scores,) = drafter.score([trace], ScoreRequest(depth=depth, sampler=sampler, full_chains=True))  # type: ignore[arg-type]
    assert scores.forced is not None
    for s in range(13):
        session = drafter.session()
        session.observe(trace.ids[: 7 + s], {})
        tokens = session.propose(depth).tokens
        assert tokens == search(list(trace.ids[: 7 + s]), 1, 3, depth)
        assert scores.drafted[s] == len(tokens)
        run = 0
        for i in range(1, depth + 1):
            if s + i > 13:
                assert scores.forced[s, i - 1] == -1
                continue
            hit = i <= len(tokens) and tokens[i - 1] == trace.answer_ids[s + i]
            assert scores.forced[s, i - 1] == hit
            run += hit and run == i - 1
        assert scores.accepted[s] == run
    if sampler == "rejection":
        assert scores.alpha is not None and torch.equal(scores.alpha, (scores.forced == 1).double())


def test_options() -> None:
    target = make_target()
    assert create(None, {}, target).info.settings == {"min": "2", "max": "5", "match": "longest,earliest"}
    assert create(None, {"min": "7"}, target).max_n == 7
    assert create(None, {"max": "1"}, target).min_n == 1
    for argument, options, sentence in [
        ("x", {}, "takes no argument"),
        (None, {"min": "two"}, "whole number"),
        (None, {"min": "0"}, "1 <= min"),
    ]:
        with pytest.raises(UserError, match=sentence):
            create(argument, options, target)
