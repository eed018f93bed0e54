"""An engine's own bookkeeping, turned into rounds as specbench defines them.

Engines count what they verify, not what the user receives: tokens drafted behind a stop token or beyond the answer's
limit count as accepted there, a step without a proposal is left out, and the step that yields the first token may
appear as one. Here the answer's length decides, and the engine's own count is kept beside ours.

Example:
    rounds = rounds_from_steps([(2, 4), (4, 4)], answer_length=6, depth=4)
    [(r.start, r.num_accepted, r.engine_accepted) for r in rounds]   # [(0, 2, 2), (3, 2, 4)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbench.errors import UserError
from specbench.types import Round

Record = tuple[int, int]
"""(accepted, drafted) of one step that the engine verified drafts in."""


def rounds_from_steps(
    records: Sequence[Record],
    *,
    answer_length: int,
    depth: int,
    emitted: Sequence[int] | None = None,
    proposes: Callable[[int], bool] | None = None,
) -> list[Round]:
    """Return the rounds of one answer.

    Args:
        records: the engine's verified steps, in order; steps in which nothing was proposed are missing.
        answer_length: A, tokens the user received, the prefill's included.
        depth: k.
        emitted: tokens the answer grew by at each engine step, the prefill's single one first, where that was seen.
        proposes: whether a drafter proposes anything in the round that starts at s; settles which of several
            one-token steps had a proposal that was refused and which had none.

    Raises:
        UserError: the records cannot belong to this answer.
    """
    if emitted is None:
        steps, records = _walk(list(records), answer_length, proposes)
    else:
        steps = list(emitted[1:])
        if sum(emitted) != answer_length or (emitted and emitted[0] != 1):
            raise _impossible(f"its steps emitted {list(emitted)} tokens, the answer has {answer_length}")
    taken = _assign(steps, list(records), proposes)
    rounds: list[Round] = []
    start = 0
    for size, record in zip(steps, taken, strict=True):
        left = answer_length - 1 - start
        accepted, drafted = record or (0, 0)
        rounds.append(
            Round(
                index=len(rounds),
                start=start,
                num_drafted=min(drafted, depth),
                num_accepted=min(accepted, left),
                num_emitted=size,
                cut=left < depth,
                engine_accepted=accepted,
            )
        )
        start += size
    return rounds


def _walk(
    records: list[Record], answer_length: int, proposes: Callable[[int], bool] | None
) -> tuple[list[int], list[Record]]:
    """Tokens per step where only the verified steps are known: a step without a proposal is one token."""
    if answer_length == 1:
        # drafts behind a stop token that the prefill gave
        return [], []
    for silent in (proposes, None):
        steps: list[int] = []
        start = used = 0
        while start < answer_length - 1:
            size = 1
            if used < len(records) and (silent is None or silent(start)):
                size = min(records[used][0] + 1, answer_length - 1 - start)
                used += 1
            steps.append(size)
            start += size
        if used == len(records):
            return steps, records
    if records[0][0] == 0:
        # a prompt of one token is padded like a verified step; its only token is the prefill's
        return _walk(records[1:], answer_length, proposes)
    raise _impossible(f"{len(records)} verified steps are too many for its {answer_length} tokens")


def _assign(
    steps: Sequence[int], records: list[Record], proposes: Callable[[int], bool] | None
) -> list[Record | None]:
    """Give every step its record, or None where nothing was proposed."""
    if len(records) == len(steps) + 1 and records[0][0] == 0:
        records = records[1:]
    fits = _feasible(steps, records)
    if not fits[0][0]:
        raise _impossible(f"verified steps {records} do not fit steps of {list(steps)} tokens")
    taken: list[Record | None] = []
    start = used = 0
    for i, size in enumerate(steps):
        with_record = used < len(records) and _fits(steps, i, records[used]) and fits[i + 1][used + 1]
        without = size == 1 and fits[i + 1][used]
        if with_record and without and proposes is not None:
            with_record = proposes(start)
        if with_record:
            taken.append(records[used])
            used += 1
        else:
            taken.append(None)
        start += size
    return taken


def _fits(steps: Sequence[int], index: int, record: Record) -> bool:
    """Whether a step of this size can be the record's: equal, or cut by the answer's end."""
    accepted, size = record[0], steps[index]
    return accepted + 1 == size or (index == len(steps) - 1 and accepted + 1 > size)


def _feasible(steps: Sequence[int], records: Sequence[Record]) -> list[list[bool]]:
    """[i][j]: steps i.. can be matched with all of records j.. ."""
    width = len(records) + 1
    table = [[False] * width for _ in range(len(steps) + 1)]
    table[len(steps)][len(records)] = True
    for i in range(len(steps) - 1, -1, -1):
        for j in range(width):
            skipped = steps[i] == 1 and table[i + 1][j]
            table[i][j] = skipped or (
                j < len(records) and table[i + 1][j + 1] and _fits(steps, i, records[j])
            )
    return table


def records_from_counters(
    *,
    emitted: Sequence[int],
    num_rounds: int,
    num_drafted: int,
    num_accepted: int,
    depth: int,
    proposes: Callable[[int], bool] | None = None,
) -> tuple[Record, ...]:
    """Return an answer's verified steps where its growth was watched and only counters are there for the rest.

    A step that grew the answer by n tokens accepted n - 1 drafts; only in the last one may more have been accepted,
    behind the answer's end, and that is what the counters are needed for.

    Args:
        emitted: tokens the answer grew by at each step, the prefill's first.
        num_rounds: steps with a proposal.
        num_drafted: draft tokens in all of them; how they spread over rounds that proposed fewer than k is not known.
        num_accepted: accepted ones.
        depth: k.
        proposes: as for :func:`rounds_from_steps`.

    Raises:
        UserError: the counters cannot belong to this answer.
    """
    found: list[int] = []
    start = 0
    for size in emitted[1:]:
        if size > 1 or proposes is None or proposes(start):
            found.append(size - 1)
        start += size
    behind_the_end = num_accepted - sum(found)
    if found:
        found[-1] += behind_the_end
    fits = len(found) == num_rounds and behind_the_end >= 0 and max(found, default=0) <= depth
    if not fits or (behind_the_end and not found):
        raise _impossible(
            f"{num_rounds} rounds with {num_accepted} accepted tokens do not fit steps of {list(emitted)} tokens"
        )
    return tuple(zip(found, _share(num_drafted, found, depth), strict=True))


def rounds_from_counters(
    *, num_rounds: int, num_drafted: int, accepted_per_position: Sequence[int], answer_length: int, depth: int
) -> list[Round]:
    """Return rounds that have an answer's totals right, and nothing else.

    Counters say how many rounds accepted at least i tokens, not in which order: the rounds come out shortest first,
    ``start`` means nothing, per-position rates are exact. Tokens accepted behind the answer's end are taken off the
    longest round; where there were some, a round without a proposal may be missing.

    Args:
        num_rounds: rounds with a proposal.
        num_drafted: draft tokens in all of them.
        accepted_per_position: [k], entry i: rounds whose first i + 1 drafts were accepted.
        answer_length: A.
        depth: k.

    Raises:
        UserError: the counters contradict each other.
    """
    per = [num_rounds, *accepted_per_position, 0]
    if any(a < b for a, b in zip(per, per[1:], strict=False)) or num_drafted > num_rounds * depth:
        raise _impossible(f"counters {per[:-1]} with {num_drafted} draft tokens contradict each other")
    counts = [a for a in range(len(per) - 1) for _ in range(per[a] - per[a + 1])]
    surplus = sum(a + 1 for a in counts) - (answer_length - 1)
    if surplus > (counts[-1] if counts else 0):
        raise _impossible(f"counters {per[:-1]} give more than its {answer_length} tokens")
    silent = max(0, -surplus)
    proposed = _share(num_drafted, counts, depth)
    rounds: list[Round] = []
    start = 0
    for accepted, drafted in [(0, 0)] * silent + list(zip(counts, proposed, strict=True)):
        left = answer_length - 1 - start
        emitted = min(accepted + 1, left)
        rounds.append(
            Round(
                index=len(rounds),
                start=start,
                num_drafted=drafted,
                num_accepted=min(accepted, left),
                num_emitted=emitted,
                cut=left < depth,
                engine_accepted=accepted,
            )
        )
        start += emitted
    return rounds


def _share(total: int, counts: Sequence[int], depth: int) -> list[int]:
    """Spread ``total`` draft tokens over rounds, at least what each accepted and at most ``depth``."""
    shares = list(counts)
    rest = total - sum(shares)
    if rest < 0:
        raise _impossible(f"{total} draft tokens are fewer than the {sum(shares)} accepted ones")
    for i, share in enumerate(shares):
        more = min(depth - share, rest)
        shares[i] += more
        rest -= more
    return shares


def _impossible(text: str) -> UserError:
    return UserError(
        f"the engine's metrics do not belong to this answer: {text}; report the engine's version with it"
    )
