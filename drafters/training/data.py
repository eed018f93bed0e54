"""What training reads: sequences with the target's states, cut into packs of whole sequences.

Example:
    packs = make_packs([e.num_rows for e in examples], budget=2048, seed=0, epoch=0)
    batch = load_batch(examples, source, packs[0], device=torch.device("cpu"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from specbench.drafters.chains import Packed
from specbench.errors import UserError

LossRows = Literal["answer", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt with the target's answer."""

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer tokens, length N."""
        return self.prompt_ids + self.answer_ids

    @property
    def num_rows(self) -> int:
        """Positions with taps: all but the last token's."""
        return len(self.prompt_ids) + len(self.answer_ids) - 1

    def loss_rows(self, which: LossRows) -> range:
        """Return the rows that chains hang on: row p's step 1 predicts token p+2."""
        first = len(self.prompt_ids) - 1 if which == "answer" else 0
        return range(first, self.num_rows - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """The target's states over one example's rows."""

    taps: tuple[Tensor, ...]
    """Per tap [N-1, H_target]."""
    final: Tensor
    """[N-1, H_target] state after the final norm: times the head it gives the logits of token p+1."""
    top: Tensor
    """[N-1] int64 target's most probable token p+1; -1 where nobody asked (prompt rows)."""


class TapSource(Protocol):
    """Where the target's states come from: computed on the fly, or read from a cache."""

    def read(self, example: Example) -> Features:
        """Return the states of one example."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One pack, ready for a step."""

    ids: tuple[str, ...]
    packed: Packed
    rows: Tensor
    """[R] int64 packed rows that chains hang on, ascending."""
    final: Tensor
    """[N, H_target]"""
    top: Tensor
    """[N] int64"""


def check_examples(examples: Sequence[Example], max_positions: int) -> tuple[list[Example], list[str]]:
    """Leave out what cannot be trained on.

    Returns:
        The examples with at least one row to learn from that fit ``max_positions``; ids of the others.

    Raises:
        UserError: nothing is left.
    """
    kept = [e for e in examples if len(e.answer_ids) > 1 and len(e.ids) <= max_positions]
    if not kept:
        raise UserError(
            f"none of the {len(examples)} answers has two tokens or more and at most {max_positions} positions; "
            "write longer answers with specbench answers --max-new-tokens"
        )
    names = {e.id for e in kept}
    return kept, [e.id for e in examples if e.id not in names]


def make_packs(lengths: Sequence[int], *, budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Cut one epoch into packs of whole sequences.

    The order depends on the number of sequences, the seed and the epoch only, so every arm of a comparison sees the
    same packs.

    Args:
        lengths: rows of each sequence.
        budget: rows of a pack at most; a longer sequence goes alone.
        seed: of the order.
        epoch: counts from 0.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()
    packs: list[list[int]] = []
    room = 0
    for index in order:
        if not packs or lengths[index] > room:
            packs.append([])
            room = budget
        packs[-1].append(index)
        room -= lengths[index]
    return packs


def load_batch(
    examples: Sequence[Example],
    source: TapSource,
    pack: Sequence[int],
    *,
    device: torch.device,
    loss_rows: LossRows = "answer",
) -> Batch:
    """Read one pack's states and lay them out back to back."""
    chosen = [examples[i] for i in pack]
    features = [source.read(e) for e in chosen]
    packed = Packed.build(
        [(torch.tensor(e.ids), f.taps) for e, f in zip(chosen, features, strict=True)], device=device
    )
    starts = packed.cu_seqlens[:-1].tolist()
    rows = [torch.tensor(e.loss_rows(loss_rows)) + s for e, s in zip(chosen, starts, strict=True)]
    return Batch(
        ids=tuple(e.id for e in chosen),
        packed=packed,
        rows=torch.cat(rows).to(device),
        final=torch.cat([f.final for f in features]).to(device),
        top=torch.cat([f.top for f in features]).to(device),
    )
