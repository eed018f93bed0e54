"""The tables of a diagnosis: Parquet, one file a table, written a group of answers at a time.

========================  ============================================================================
``magnitudes.parquet``    RMS of taps, fused input, raw residual and fed-back state, per answer and step
``attention.parquet``     share of every region, recent positions and entropy, per answer and step
``attention_heads``       the same per head, where asked for
``depth.parquet``         forced-chain hits per answer and step, fed with target tokens or own ones
``acceptance.parquet``    rounds by accepted count, per answer and arm (clean, noise, pin, windows)
``lengths.parquet``       rounds and accepted tokens by position of the round, per answer
``chain.parquet``         where the queries of one chain look, position by position
``diagnosis.json``        drafters, target, sinks, settings, versions
========================  ============================================================================

Example:
    with DiagnosisWriter(Path("diag")) as writer:
        writer.add("depth", [{"drafter": "zoo:eagle3", "suite": "mtbench", "prompt_id": "mtbench/81", ...}])
        writer.finish({"depth": 8, ...})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbench.errors import UserError

RECORD = "diagnosis.json"
_TEXT = pa.dictionary(pa.int32(), pa.string())
_KEYS: tuple[tuple[str, Any, str], ...] = (
    ("drafter", _TEXT, "as the user wrote it"),
    ("suite", _TEXT, "prompt set"),
    ("prompt_id", _TEXT, "suite/name; the unit of all statistics"),
    ("turn", pa.int32(), "0 for the first user turn"),
)
_ATTENTION: tuple[tuple[str, Any, str], ...] = (
    *_KEYS,
    ("arm", _TEXT, "plain, or pin: fed-back state rescaled to the fused input's RMS"),
    ("step", pa.int32(), "draft step, from 1"),
    (
        "measure",
        _TEXT,
        "region (sink, system, markup, user, context, answer, own, self), recent_w, entropy (nats)",
    ),
    ("value", pa.float64(), "mean over heads, then over chains"),
    ("control", pa.float64(), "the same of step-1 queries at the same positions; null where undefined"),
    ("num_chains", pa.int64(), "chains it is the mean of"),
)
COLUMNS: Mapping[str, tuple[tuple[str, Any, str], ...]] = {
    "magnitudes": (
        *_KEYS,
        ("arm", _TEXT, "plain or pin"),
        ("quantity", _TEXT, "tap_i, fused, raw (residual before the final norm), fed_back"),
        ("step", pa.int32(), "draft step, from 1"),
        ("rms", pa.float64(), "||x||_2 / sqrt(d) in float32, mean over chains"),
        ("num_chains", pa.int64(), "chains it is the mean of"),
    ),
    "attention": _ATTENTION,
    "attention_heads": (*_ATTENTION, ("head", pa.int32(), "query head")),
    "depth": (
        *_KEYS,
        ("feeding", _TEXT, "target: the target's tokens; own: the chain's own draft tokens"),
        ("step", pa.int32(), "draft step, from 1"),
        ("positions", pa.int64(), "chains that reach this step before the answer ends"),
        ("hits", pa.int64(), "chains whose draft token is the target's, whatever came before"),
    ),
    "acceptance": (
        *_KEYS,
        ("part", _TEXT, "clean (deepest k), base (k of the other parts), noise, pin, window"),
        ("arm", _TEXT, "the part's setting in words"),
        ("path", _TEXT, "noise: hidden or embed; else empty"),
        ("alpha", pa.float64(), "noise: size in RMS of the state; else 0"),
        ("seed", pa.int32(), "noise: which draw; else 0"),
        ("window", pa.int32(), "window: positions a query sees; 0: all"),
        ("sink", _TEXT, "window: positions that stay visible"),
        ("positions", _TEXT, "window: absolute or repacked"),
        ("length", pa.int64(), "prompt and answer tokens"),
        ("at_least", pa.list_(pa.int64()), "rounds with at least 0, 1, ..., k accepted tokens"),
    ),
    "lengths": (
        *_KEYS,
        ("low", pa.int64(), "position of the round's newest known token: from"),
        ("high", pa.int64(), "to, exclusive"),
        ("rounds", pa.int64(), "rounds that start there"),
        ("accepted", pa.int64(), "draft tokens they accept"),
    ),
    "chain": (
        ("drafter", _TEXT, "as the user wrote it"),
        ("prompt_id", _TEXT, "whose answer"),
        ("row", pa.int64(), "position the chain hangs on"),
        ("step", pa.int32(), "draft step, from 1"),
        ("position", pa.int64(), "position looked at"),
        ("region", _TEXT, "its region"),
        ("token", pa.string(), "its text"),
        ("mass", pa.float64(), "mean share over heads"),
    ),
}
"""table -> (column, type, meaning)."""


def schema(table: str) -> Any:
    """Return the arrow schema of a table, the columns' meanings as field metadata."""
    return pa.schema([pa.field(name, kind, metadata={"doc": doc}) for name, kind, doc in COLUMNS[table]])


class DiagnosisWriter:
    """Writes the tables of one diagnosis; nothing stays in memory.

    Args:
        out: the directory; made where it does not exist.

    Raises:
        UserError: it holds something that is no diagnosis, or cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
            raise UserError(f"--out {out} is not empty and holds no {RECORD}; give another directory")
        try:
            out.mkdir(parents=True, exist_ok=True)
            # marks the directory as ours from the start, and as unfinished
            (out / RECORD).write_text("{}\n")
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror or error}") from error
        for table in COLUMNS:
            (out / f"{table}.parquet").unlink(missing_ok=True)
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> DiagnosisWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to a table."""
        if not rows:
            return
        if table not in self._writers:
            path = self.out / f"{table}.parquet"
            self._writers[table] = pq.ParquetWriter(path, schema(table), compression="zstd")
        self._writers[table].write_table(pa.Table.from_pylist(list(rows), schema=schema(table)))

    def close(self) -> None:
        """Finish the files."""
        while self._writers:
            self._writers.popitem()[1].close()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write ``diagnosis.json``, which says that the tables are whole."""
        self.close()
        (self.out / RECORD).write_text(json.dumps(record, indent=1, default=str) + "\n")


def read_record(out: Path) -> dict[str, Any]:
    """Return ``diagnosis.json``.

    Raises:
        UserError: there is none, or the diagnosis did not finish.
    """
    try:
        record: dict[str, Any] = json.loads((out / RECORD).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{out} holds no diagnosis; make one with `specbench diagnose --out {out}`"
        ) from error
    if not record:
        raise UserError(f"the diagnosis in {out} did not finish; run the same command again")
    return record


def read_table(out: Path, table: str) -> Any:
    """Return a table; empty where the diagnosis had nothing to put there."""
    path = out / f"{table}.parquet"
    return pq.read_table(path) if path.is_file() else schema(table).empty_table()
