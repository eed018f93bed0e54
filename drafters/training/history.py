"""What a training run writes down: one row every few steps, as Parquet, and a plot of it.

Example: ``write_log(rows, Path("drafters/mine/log.parquet")); plot_log(rows, Path("drafters/mine/loss.png"))``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One line of the log; fields that do not apply are None or empty."""

    split: Literal["train", "held_out"]
    step: int
    """Optimiser steps taken."""
    epoch: int | None = None
    seconds: float
    """Spent in training steps so far."""
    lr: float | None = None
    loss: float | None = None
    """Weighted sum over the chains' steps of the mean KL, in nats; of one batch."""
    grad_norm: float | None = None
    """Before clipping."""
    rows_per_second: float | None = None
    """Rows that chains hang on."""
    kl: tuple[float, ...] = ()
    """Per chain step, nats."""
    accuracy: tuple[float, ...] = ()
    """Per chain step: share of rows whose most probable draft token is the target's, in forced chains."""
    marginal: tuple[float, ...] = ()
    """Per chain step: share of rounds that accept at least that many tokens."""
    rms: tuple[float, ...] = ()
    """Per chain step: RMS of the state that is fed back."""
    accepted_per_round: float | None = None
    rounds: int | None = None


def describe_row(row: LogRow) -> str:
    """Return a row as one line for people."""
    accuracy = " ".join(f"{a:.3f}" for a in row.accuracy)
    if row.split == "held_out":
        return f"step {row.step:6d}  held out: accepted per round {row.accepted_per_round:.3f}  accuracy {accuracy}"
    return (
        f"step {row.step:6d}  loss {row.loss:.3f}  accuracy {accuracy}  lr {row.lr:.1e}  "
        f"norm {row.grad_norm:.2f}  {row.rows_per_second:.0f} rows/s"
    )


def write_log(rows: Sequence[LogRow], path: Path) -> None:
    """Write all rows as Parquet, replacing the file in one move."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists, floats = pa.list_(pa.float32()), pa.float64()
    schema = pa.schema(
        [
            ("split", pa.string()), ("step", pa.int64()), ("epoch", pa.int64()), ("seconds", floats),
            ("lr", floats), ("loss", floats), ("grad_norm", floats), ("rows_per_second", floats),
            ("kl", lists), ("accuracy", lists), ("marginal", lists), ("rms", lists),
            ("accepted_per_round", floats), ("rounds", pa.int64()),
        ]
    )  # fmt: skip
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), part)
    part.replace(path)


def plot_log(rows: Sequence[LogRow], path: Path) -> None:
    """Draw the loss, and the accuracy of every chain step with the accepted tokens per round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    train = [r for r in rows if r.split == "train"]
    held_out = [r for r in rows if r.split == "held_out"]
    left.plot([r.step for r in train], [r.loss for r in train], lw=0.8)
    left.set(xlabel="optimiser step", ylabel="loss [nats]")
    for i in range(max((len(r.accuracy) for r in held_out), default=0)):
        right.plot(
            [r.step for r in held_out], [r.accuracy[i] for r in held_out], lw=0.8, label=f"step {i + 1}"
        )
    right.plot(
        [r.step for r in held_out],
        [r.accepted_per_round for r in held_out],
        "k.-",
        label="accepted per round",
    )
    right.set(xlabel="optimiser step", ylabel="held-out answers", ylim=(0, None))
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)
