"""The log is readable with other tools, and the plot is a picture."""

from __future__ import annotations

from pathlib import Path

import duckdb

from specbench.drafters.training.history import LogRow, describe_row, plot_log, write_log

ROWS = [
    LogRow(
        split="train", step=10, epoch=0, seconds=1.5, lr=1e-3, loss=2.5, grad_norm=0.5,
        rows_per_second=100.0, kl=(1.0, 2.0), accuracy=(0.5, 0.25),
    ),
    LogRow(
        split="held_out", step=10, seconds=1.5, accuracy=(0.5, 0.25), marginal=(0.5, 0.2),
        rms=(1.0, 1.5), accepted_per_round=0.7, rounds=40,
    ),
]  # fmt: skip


def test_the_log_is_parquet_that_duckdb_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write_log(ROWS, path)
    write_log(ROWS, path)
    rows = duckdb.sql(
        f"select split, step, accuracy[2], accepted_per_round, loss from '{path}' order by split"
    ).fetchall()
    assert rows == [("held_out", 10, 0.25, 0.7, None), ("train", 10, 0.25, None, 2.5)]
    assert not list(tmp_path.glob("*.part"))


def test_lines_and_plot(tmp_path: Path) -> None:
    assert "loss 2.500" in describe_row(ROWS[0]) and "accepted per round 0.700" in describe_row(ROWS[1])
    plot_log(ROWS, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
