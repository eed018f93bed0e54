"""The draft vocabulary, by hand and in general."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.drafters.training.vocabulary import choose_vocabulary
from specbench.errors import UserError


def test_most_frequent_tokens_ties_to_the_lower_id() -> None:
    answers = [[9, 9, 9, 4], [4, 7, 7, 2, 5]]
    chosen = choose_vocabulary(answers, size=2, vocab_size=12)
    assert chosen.target_ids == (4, 9)
    assert chosen.coverage == pytest.approx(5 / 9)
    assert chosen.padded == 0


def test_unused_low_ids_fill_up() -> None:
    chosen = choose_vocabulary([[9] * 20, [4] * 20], size=4, vocab_size=12)
    assert chosen.target_ids == (0, 1, 4, 9)
    assert (chosen.padded, chosen.coverage) == (2, 1.0)


@given(st.lists(st.integers(0, 19), min_size=80, max_size=120), st.integers(1, 20))
def test_no_other_choice_covers_more(tokens: list[int], size: int) -> None:
    chosen = choose_vocabulary([tokens], size=size, vocab_size=20)
    assert len(set(chosen.target_ids)) == size and list(chosen.target_ids) == sorted(chosen.target_ids)
    best = sum(count for _, count in Counter(tokens).most_common(size))
    assert sum(t in chosen.target_ids for t in tokens) == best
    assert chosen.coverage == pytest.approx(best / len(tokens))


def test_too_little_data_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="6 answer tokens are too few .* vocabulary of 5 .at least 20."):
        choose_vocabulary([[1, 2, 3, 1, 2, 3]], size=5, vocab_size=10)
    with pytest.raises(UserError, match="does not fit the target's 10 tokens"):
        choose_vocabulary([[1]], size=11, vocab_size=10)
