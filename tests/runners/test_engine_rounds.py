"""An engine's bookkeeping against the rounds of a simulated verification loop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import UserError
from specbench.runners.engine_rounds import (
    records_from_counters,
    rounds_from_counters,
    rounds_from_steps,
)


class Simulation:
    """One answer verified the way engines do it: they count, then cut at the end of the answer."""

    def __init__(self, script: list[tuple[int, int]], answer_length: int, depth: int) -> None:
        """``script``: (accepted, drafted) per round; goes on until the answer is full."""
        self.depth = depth
        self.records: list[tuple[int, int]] = []
        self.emitted = [1]
        self.truth: list[
            tuple[int, int, int, int]
        ] = []  # start, drafted, accepted by the user, by the engine
        start = i = 0
        while start < answer_length - 1:
            accepted, drafted = script[i % len(script)]
            i += 1
            accepted = min(accepted, drafted)
            if drafted:
                self.records.append((accepted, drafted))
            left = answer_length - 1 - start
            self.truth.append((start, drafted, min(accepted, left), accepted))
            self.emitted.append(min(accepted + 1, left))
            start += self.emitted[-1]


scripts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)


@given(script=scripts, answer_length=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_rounds_are_those_of_the_simulation(script: list[tuple[int, int]], answer_length: int) -> None:
    sim = Simulation(script, answer_length, 4)
    silent = {start for start, drafted, _a, _e in sim.truth if drafted == 0}
    for emitted in (sim.emitted, None):
        rounds = rounds_from_steps(
            sim.records,
            answer_length=answer_length,
            depth=4,
            emitted=emitted,
            proposes=lambda s: s not in silent,
        )
        found = [(r.start, r.num_drafted, r.num_accepted, r.engine_accepted) for r in rounds]
        assert found == sim.truth
        assert 1 + sum(r.num_emitted for r in rounds) == answer_length
        assert all(r.cut == (answer_length - 1 - r.start < 4) for r in rounds)


@given(script=scripts, answer_length=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_accepted_counts_need_no_hint(script: list[tuple[int, int]], answer_length: int) -> None:
    """Which of several one-token steps had a refused proposal is not known, what was accepted is."""
    sim = Simulation(script, answer_length, 4)
    rounds = rounds_from_steps(sim.records, answer_length=answer_length, depth=4, emitted=sim.emitted)
    assert [(r.start, r.num_accepted) for r in rounds] == [(s, a) for s, _d, a, _e in sim.truth]
    assert sum(r.num_drafted for r in rounds) == sum(d for _s, d, _a, _e in sim.truth)


@given(script=scripts, answer_length=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_counters_give_exact_rates(script: list[tuple[int, int]], answer_length: int) -> None:
    sim = Simulation(script, answer_length, 4)
    raw = [a for a, _d in sim.records]
    rounds = rounds_from_counters(
        num_rounds=len(sim.records),
        num_drafted=sum(d for _a, d in sim.records),
        accepted_per_position=[sum(a >= i for a in raw) for i in range(1, 5)],
        answer_length=answer_length,
        depth=4,
    )
    assert 1 + sum(r.num_emitted for r in rounds) == answer_length
    assert all(r.num_accepted <= r.num_drafted <= 4 for r in rounds)
    assert sum(r.num_drafted for r in rounds) == sum(d for _s, d, _a, _e in sim.truth)
    assert sorted(filter(None, (r.engine_accepted for r in rounds))) == sorted(filter(None, raw))
    if sum(e + 1 for _s, _d, _a, e in sim.truth) == answer_length - 1:
        # with the end cut off, steps without a proposal hide behind the tokens nobody received
        assert len(rounds) == len(sim.truth)
        assert sum(r.num_accepted for r in rounds) == sum(raw)


@given(script=scripts, answer_length=st.integers(1, 40), always=st.booleans())
@settings(max_examples=200, deadline=None)
def test_counters_and_growth_give_every_round(
    script: list[tuple[int, int]], answer_length: int, always: bool
) -> None:
    """As before but for how many were drafted in rounds that proposed fewer than k."""
    sim = Simulation([(a, 4 if always else d) for a, d in script], answer_length, 4)
    silent = {start for start, drafted, _a, _e in sim.truth if drafted == 0}
    records = records_from_counters(
        emitted=sim.emitted,
        num_rounds=len(sim.records),
        num_drafted=sum(d for _a, d in sim.records),
        num_accepted=sum(a for a, _d in sim.records),
        depth=4,
        proposes=None if always else lambda s: s not in silent,
    )
    assert [a for a, _d in records] == [a for a, _d in sim.records]
    assert sum(d for _a, d in records) == sum(d for _a, d in sim.records)
    assert not always or list(records) == sim.records


@pytest.mark.parametrize(
    ("num_rounds", "num_accepted"), [(3, 3), (1, 3), (2, 2), (2, 7)], ids=["more", "fewer", "less", "deeper"]
)
def test_counters_of_another_answer_are_refused(num_rounds: int, num_accepted: int) -> None:
    with pytest.raises(UserError, match="do not fit steps"):
        records_from_counters(
            emitted=[1, 3, 2],
            num_rounds=num_rounds,
            num_drafted=4 * num_rounds,
            num_accepted=num_accepted,
            depth=4,
        )


@pytest.mark.parametrize(("length", "expected"), [(1.5, 1.5), (2.8, 2.8), (4.0, 4.0)])
def test_a_chosen_acceptance_length_comes_out(length: float, expected: float) -> None:
    """An engine that accepts ``length - 1`` drafts on average, by script: the pipeline's number is that length."""
    tenths = round((length - 1) * 10)
    script = [(tenths // 10 + (i < tenths % 10), 4) for i in range(10)]
    per_answer = sum(a + 1 for a, _d in script)
    totals = [0, 0]
    for repeats in (1, 2, 3):
        sim = Simulation(script, 1 + per_answer * repeats, 4)
        rounds = rounds_from_steps(
            sim.records, answer_length=1 + per_answer * repeats, depth=4, emitted=sim.emitted
        )
        totals[0] += sum(r.num_accepted for r in rounds)
        totals[1] += len(rounds)
    assert totals[0] / totals[1] + 1 == pytest.approx(expected)


def test_a_padded_one_token_prompt_is_no_round() -> None:
    rounds = rounds_from_steps([(0, 4), (2, 4)], answer_length=4, depth=4, emitted=[1, 3])
    assert [(r.start, r.num_accepted) for r in rounds] == [(0, 2)]
    rounds = rounds_from_steps([(0, 4), (2, 4)], answer_length=4, depth=4)
    assert [r.num_accepted for r in rounds] == [0, 2], "without the steps' sizes it cannot be told apart"


@pytest.mark.parametrize(
    ("records", "emitted"),
    [([(2, 4)], [1, 2, 1]), ([(1, 4), (0, 4), (0, 4), (0, 4)], [1, 1, 1, 1]), ([(1, 4)], [2, 2])],
)
def test_metrics_of_another_answer_are_refused(records: list[tuple[int, int]], emitted: list[int]) -> None:
    with pytest.raises(UserError, match="do not belong to this answer"):
        rounds_from_steps(records, answer_length=4, depth=4, emitted=emitted)


@pytest.mark.parametrize(
    "counters",
    [
        {"num_rounds": 2, "num_drafted": 6, "accepted_per_position": [1, 2, 0]},
        {"num_rounds": 2, "num_drafted": 9, "accepted_per_position": [1, 0, 0]},
        {"num_rounds": 9, "num_drafted": 27, "accepted_per_position": [9, 9, 9]},
        {"num_rounds": 2, "num_drafted": 1, "accepted_per_position": [2, 0, 0]},
    ],
)
def test_impossible_counters_are_refused(counters: dict[str, object]) -> None:
    with pytest.raises(UserError, match="do not belong to this answer"):
        rounds_from_counters(**counters, answer_length=5, depth=3)  # type: ignore[arg-type]
