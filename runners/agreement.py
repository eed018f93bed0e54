"""One judge: do two runners make the same rounds on the same token ids, and if not, where do they part?

Greedy decoding is deterministic but for floating-point ties: two correct implementations may differ only where the
target's (or the drafter's) two best tokens are within rounding of each other. Everything else is a bug.

Example:
    difference = first_difference(replay_outcome, decode_outcome, "ngram", 8)
    difference is None or difference.verdict   # "tie: the target's tokens 11 and 260 are 0.0002 apart"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from specbench.runners.runner import Outcome
from specbench.types import Round

TIE_MARGIN = 1e-3
"""Logit differences below this are rounding: about a hundred times what batching changes in float32."""

Kind = Literal[
    "tie",
    "taps",
    "vocabulary map",
    "norm flags",
    "positions",
    "window",
    "BOS",
    "after-EOS counting",
    "prefill counted",
    "answers differ",
    "unexplained",
]
"""Why two runners part."""


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
    round: int
    """Index of the first differing round (in the first runner's counting)."""
    step: int
    """Draft step 1..k at which they part within it; 0: not inside a round."""
    counts: tuple[int | None, int | None] = (None, None)
    """Accepted draft tokens of that round, by either runner."""
    tokens: tuple[int | None, int | None] = (None, None)
    """The two answers' tokens where they part; else the first runner's draft and the target's token."""
    margin: float | None = None
    """The target's margin there: its token's logit minus the best other one."""
    kind: Kind = "unexplained"
    verdict: str
    explained: bool
    """Whether it is a tie and not a defect."""


@dataclass(slots=True, kw_only=True)
class Agreement:
    """Rounds of one drafter compared."""

    rounds: int = 0
    equal: int = 0
    answers: int = 0
    equal_answers: int = 0

    def add(self, one: Outcome, other: Outcome, drafter: str, k: int) -> Difference | None:
        """Compare one answer's rounds; return the first difference, if any."""
        pairs = list(zip_longest(shape(one.rounds[drafter, k]), shape(other.rounds[drafter, k])))
        self.rounds += len(pairs)
        self.equal += sum(a == b for a, b in pairs)
        self.answers += 1
        difference = first_difference(one, other, drafter, k)
        self.equal_answers += difference is None
        return difference


def shape(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """Return what must be equal: (start, accepted) of every round."""
    return [(r.start, r.num_accepted) for r in rounds]


def first_difference(one: Outcome, other: Outcome, drafter: str, k: int) -> Difference | None:
    """Return where two outcomes of the same work part, or None.

    The answers are compared first: with another token in the answer, different rounds behind it mean nothing.
    """
    prompt = one.work.prompt
    assert prompt.ids_hash == other.work.prompt.ids_hash, "only rounds on the same token ids can be compared"
    ours, theirs = one.rounds[drafter, k], other.rounds[drafter, k]

    def found(kind: Kind, position: int, verdict: str, **more: object) -> Difference:
        index = next((r.index for r in reversed(ours) if r.start <= position), 0)
        step = position - ours[index].start if ours and kind in ("tie", "answers differ") else 0
        return Difference(
            **{
                "prompt_id": prompt.prompt_id,
                "turn": prompt.turn,
                "condition": prompt.condition.id,
                "drafter": drafter,
                "k": k,
                "position": position,
                "round": index,
                "step": step,
                "kind": kind,
                "verdict": verdict,
                "explained": kind == "tie",
                "margin": one.margins[position] if position < len(one.margins) else None,
                **more,
            }  # type: ignore[arg-type]
        )

    for i, (a, b) in enumerate(zip_longest(one.answer_ids, other.answer_ids)):
        if a != b:
            margin = abs(one.margins[i]) if i < len(one.margins) else float("inf")
            if margin < TIE_MARGIN:
                verdict = f"tie: the target's tokens {a} and {b} are {margin:.2g} apart"
                return found("tie", i, verdict, tokens=(a, b))
            verdict = f"the answers differ: tokens {a} and {b}, margin {margin:.2g}"
            return found("answers differ", i, verdict, tokens=(a, b))
    if shape(ours) == shape(theirs):
        return None
    if [0, *(r.num_accepted for r in ours)] == [r.num_accepted for r in theirs]:
        return found(
            "prefill counted", 0, "prefill counted: the second runner has a round for the first token"
        )
    for a_round, b_round in zip_longest(ours, theirs):
        if a_round is not None and b_round is not None and shape([a_round]) == shape([b_round]):
            continue
        start = (a_round or b_round).start
        counts = tuple(None if r is None else r.num_accepted for r in (a_round, b_round))
        left = len(one.answer_ids) - 1 - start
        if max(c or 0 for c in counts) > left:
            verdict = (
                f"after-EOS counting: {max(c or 0 for c in counts)} accepted where {left} tokens were left"
            )
            return found("after-EOS counting", start, verdict, counts=counts)
        step = min((c for c in counts if c is not None), default=0) + 1
        at = start + step
        return found(
            "unexplained",
            start,
            f"accepted {counts[0]} against {counts[1]} draft tokens on the same answer",
            counts=counts,
            step=step,
            tokens=(None, one.answer_ids[at] if at < len(one.answer_ids) else None),
            margin=one.margins[at] if at < len(one.margins) else None,
        )
    return None
