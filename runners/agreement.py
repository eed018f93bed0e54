"""One judge: do two runners make the same rounds on the same token ids, and if not, where do they part?

Greedy decoding is deterministic but for floating-point ties: two correct implementations may differ only where the
target's (or the drafter's) two best tokens are within rounding of each other. Everything else is a bug.

Example:
    difference = first_difference(replay_outcome, decode_outcome, "ngram", 8)
    difference is None or difference.verdict   # "tie of the target (margin 0.0002)"
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from specbench.runners.runner import Outcome

TIE_MARGIN = 1e-3
"""Logit differences below this are rounding: about a hundred times what batching changes in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two runners part on one answer."""

    prompt_id: str
    turn: int
    condition: str
    drafter: str
    k: int
    position: int
    """Answer token at which the answers part, or at which the first differing round starts."""
    verdict: str
    explained: bool
    """Whether it is a tie of the target and not a defect."""


@dataclass(slots=True, kw_only=True)
class Agreement:
    """Rounds of one drafter compared."""

    rounds: int = 0
    equal: int = 0
    answers: int = 0
    equal_answers: int = 0

    def add(self, one: Outcome, other: Outcome, drafter: str, k: int) -> Difference | None:
        """Compare one answer's rounds; return the first difference, if any."""
        pairs = list(zip_longest(_shape(one, drafter, k), _shape(other, drafter, k)))
        self.rounds += len(pairs)
        self.equal += sum(a == b for a, b in pairs)
        self.answers += 1
        difference = first_difference(one, other, drafter, k)
        self.equal_answers += difference is None
        return difference


def _shape(outcome: Outcome, drafter: str, k: int) -> list[tuple[int, int]]:
    return [(r.start, r.num_accepted) for r in outcome.rounds[drafter, k]]


def first_difference(one: Outcome, other: Outcome, drafter: str, k: int) -> Difference | None:
    """Return where two outcomes of the same work part, or None.

    The answers are compared first: with another token in the answer, different rounds behind it mean nothing.
    """
    prompt = one.work.prompt
    assert prompt.ids_hash == other.work.prompt.ids_hash, "only rounds on the same token ids can be compared"

    def found(position: int, verdict: str, explained: bool) -> Difference:
        return Difference(
            prompt_id=prompt.prompt_id,
            turn=prompt.turn,
            condition=prompt.condition.id,
            drafter=drafter,
            k=k,
            position=position,
            verdict=verdict,
            explained=explained,
        )

    for i, (a, b) in enumerate(zip_longest(one.answer_ids, other.answer_ids)):
        if a != b:
            margin = abs(one.margins[i]) if i < len(one.margins) else float("inf")
            tie = margin < TIE_MARGIN
            what = "a tie of the target" if tie else "the answers differ"
            return found(i, f"{what}: tokens {a} and {b}, margin {margin:.2g}", tie)
    for a_round, b_round in zip_longest(one.rounds[drafter, k], other.rounds[drafter, k]):
        if (
            a_round is None
            or b_round is None
            or (a_round.start, a_round.num_accepted)
            != (
                b_round.start,
                b_round.num_accepted,
            )
        ):
            start = (a_round or b_round).start
            counts = [None if r is None else r.num_accepted for r in (a_round, b_round)]
            return found(
                start, f"accepted {counts[0]} against {counts[1]} draft tokens on the same answer", False
            )
    return None
