"""Packs: whole sequences, a fixed order, and no leakage between neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.drafters.training.data import Batch, Example, check_examples, load_batch, make_packs
from specbench.drafters.training.step import ChainSetting, chain_loss
from specbench.drafters.training.trainer import PackOrder
from specbench.errors import UserError

from .toy import HALF, Memory, make_example, make_model, make_target

CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    budget=st.integers(1, 100),
    seed=st.integers(0, 9),
)
def test_packs_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int, seed: int) -> None:
    packs = make_packs(lengths, budget=budget, seed=seed, epoch=0)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= budget or len(pack) == 1 for pack in packs)
    assert packs == make_packs(lengths, budget=budget, seed=seed, epoch=0)


def test_epochs_and_seeds_change_the_order() -> None:
    lengths = [5] * 50
    orders = {
        tuple(map(tuple, make_packs(lengths, budget=20, seed=seed, epoch=epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_pack_order_runs_through_the_epochs() -> None:
    order = PackOrder([7] * 10, budget=14, seed=3)
    assert order.packs_per_epoch() == 5
    seen = [order[i] for i in range(15)]
    assert [epoch for epoch, _ in seen] == [0] * 5 + [1] * 5 + [2] * 5
    expected = [p for e in range(3) for p in make_packs([7] * 10, budget=14, seed=3, epoch=e)]
    assert [pack for _, pack in seen] == expected
    # any index can be asked for first: a resume does
    assert PackOrder([7] * 10, budget=14, seed=3)[12] == seen[12]


def only(batch: Batch, first: bool, size: int) -> Batch:
    """The batch with chains on the first sequence's rows only, or on the others'."""
    rows = batch.rows[(batch.rows < size) == first]
    return Batch(ids=batch.ids, packed=batch.packed, rows=rows, final=batch.final, top=batch.top)


@settings(max_examples=15, deadline=None)
@given(
    mine=st.tuples(st.integers(1, 6), st.integers(2, 9), st.integers(0, 99)),
    others=st.lists(
        st.tuples(st.integers(1, 6), st.integers(2, 9), st.integers(100, 199)), min_size=1, max_size=3
    ),
    gate=st.booleans(),
)
def test_no_sequence_changes_anothers_loss(
    mine: tuple[int, int, int], others: list[tuple[int, int, int]], gate: bool
) -> None:
    target, source = make_target(torch.float64), Memory(torch.float64)
    model = make_model(target, gate=gate)
    example = make_example(*mine)
    size = example.num_rows
    results = []
    for neighbours in ([], [make_example(*o) for o in others]):
        examples = [example, *neighbours]
        batch = load_batch(examples, source, range(len(examples)), device=CPU)
        model.zero_grad()
        report = chain_loss(
            model, only(batch, True, size), target.head[list(HALF)], ChainSetting(depth=3), normaliser=1.0
        )
        report.loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((report.hits, report.kl, grads))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-9, atol=1e-9)


def test_rows_hang_on_answer_tokens_or_on_all() -> None:
    example = make_example(4, 3, 0)
    # 7 tokens, 6 rows; the last row has nothing left to foresee, the first answer token is the prefill's
    assert list(example.loss_rows("answer")) == [3, 4]
    assert list(example.loss_rows("all")) == [0, 1, 2, 3, 4]


def test_examples_without_anything_to_learn_are_left_out() -> None:
    good = make_example(3, 4, 0)
    short = Example(id="short", prompt_ids=(1, 2), answer_ids=(3,))
    long = make_example(10, 60, 1)
    kept, dropped = check_examples([good, short, long], max_positions=64)
    assert kept == [good] and dropped == ["short", long.id]
    with pytest.raises(UserError, match="none of the 1 answers has two tokens"):
        check_examples([short], max_positions=64)
