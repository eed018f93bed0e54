"""The draft vocabulary: the target tokens that answers use most.

Example: ``choose_vocabulary([e.answer_ids for e in examples], size=4096, vocab_size=49152)``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench.errors import UserError

MIN_TOKENS_PER_ENTRY = 4
"""Answer tokens needed for each entry asked for: below it most entries would be padding or seen once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A choice of target tokens."""

    target_ids: tuple[int, ...]
    """Ascending."""
    coverage: float
    """Share of the answer tokens it was made from that it holds: the ceiling of every step's accuracy there."""
    padded: int
    """Entries that no answer used: the lowest ids not taken yet."""


def given_vocabulary(target_ids: Sequence[int], answers: Iterable[Sequence[int]]) -> Vocabulary:
    """Return a choice made elsewhere, with what it holds of these answers."""
    return _judged(target_ids, Counter(token for answer in answers for token in answer))


def _judged(target_ids: Iterable[int], counts: Counter[int]) -> Vocabulary:
    """Return a choice with what it holds of counted answer tokens."""
    chosen = tuple(sorted(target_ids))
    return Vocabulary(
        target_ids=chosen,
        coverage=sum(counts[token] for token in chosen) / max(1, counts.total()),
        padded=sum(token not in counts for token in chosen),
    )


def choose_vocabulary(answers: Iterable[Sequence[int]], *, size: int, vocab_size: int) -> Vocabulary:
    """Take the ``size`` most frequent tokens; ties go to the lower id, and low ids fill up what is left.

    Args:
        answers: token ids of every answer.
        size: of the draft vocabulary.
        vocab_size: of the target.

    Raises:
        UserError: the size does not fit the target, or there is too little data for it.
    """
    counts = Counter(token for answer in answers for token in answer)
    total = sum(counts.values())
    if not 1 <= size <= vocab_size:
        raise UserError(f"a draft vocabulary of {size} does not fit the target's {vocab_size} tokens")
    if size < vocab_size and total < MIN_TOKENS_PER_ENTRY * size:
        raise UserError(
            f"{total} answer tokens are too few to choose a draft vocabulary of {size} "
            f"(at least {MIN_TOKENS_PER_ENTRY * size}); give more answers or ask for --draft-vocab {total // 8 or 1}"
        )
    chosen = set(sorted(counts, key=lambda token: (-counts[token], token))[:size])
    spare = (token for token in range(vocab_size) if token not in counts)
    while len(chosen) < size:
        chosen.add(next(spare))
    return _judged(chosen, counts)
