"""The Parquet store of a run: append-safe, resumable, readable with pandas, Polars or DuckDB.

A run directory holds ``rounds/``, ``answers/`` and ``items/``, each a flat data set of zstd Parquet files
``part-<number>-<id>.parquet`` (flat, so that no reader loses a column to a directory name). One call of
:meth:`RunStore.write` is one flush: its files are staged beside the tables and renamed into place, the
``items`` file last. That file names how many rows the flush put into the other tables, so a flush counts only
when it is whole; what a killed process left behind is ignored by readers and removed by the next writer.

Example:
    with RunStore("runs/first") as store:
        store.write(answers=[{...}], rounds=[{"run_id": "r", ..., "num_accepted": [3, 0, 1]}], items=[{...}])
        store.finished_keys()   # {ItemKey(prompt_id="mtbench/81", turn=0, ...)}
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specbench.errors import UserError
from specbench.results.checks import round_problems
from specbench.results.schema import SCHEMA_VERSION, TABLES, arrow_schema, schema_version, to_table

_FLUSH_KEY = b"specbench.flush"
_STAGING = ".partial"


class ItemKey(NamedTuple):
    """One piece of work: an answer scored with a drafter."""

    prompt_id: str
    turn: int
    condition: str
    answer_path: str
    drafter: str
    runner: str
    sampler: str


class AnswerKey(NamedTuple):
    """One target answer within a run."""

    prompt_id: str
    turn: int
    condition: str
    answer_path: str


class RunStore:
    """The tables of one run.

    Args:
        path: the run directory; made where it does not exist.
        readonly: take no lock, repair nothing, refuse to write.

    Raises:
        UserError: the directory cannot be made or written, another process writes to it, a file is corrupt,
            or the tables are of another schema version.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self.path = Path(path)
        self.readonly = readonly
        self._lock: Any = None
        if readonly:
            if not (self.path / "items").is_dir():
                raise UserError(f"{self.path} is not a run directory: it has no items/ folder")
        else:
            self._make_directories()
            self._lock = _take_lock(self.path)
        try:
            self._flushes = self._committed()
            self._finished = _finished(self._items())
            if not readonly:
                self._repair()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(
        self,
        *,
        rounds: Sequence[Mapping[str, Any]] = (),
        answers: Sequence[Mapping[str, Any]] = (),
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Add rows to the tables, all or nothing.

        Args:
            rounds: each element is a row, or a block of rows: columns given as sequences or arrays (all of
                one length) and scalars that hold for the whole block.
            answers: rows.
            items: rows; an item listed without an ``error`` counts as finished.

        Raises:
            UserError: a row does not fit the schema or holds impossible counts, or the disk refuses.
        """
        assert not self.readonly and self._lock is not None, "the store was opened readonly or is closed"
        tables = {
            "rounds": _rounds_table(rounds),
            "answers": _rows_table("answers", answers),
            "items": _rows_table("items", items),
        }
        problem = next(iter(round_problems(tables["rounds"])), None)
        if problem:
            raise UserError(f"these rounds are impossible: {problem}")
        keys = _finished(tables["items"].to_pylist())
        again = next(iter(keys & self._finished), None)
        assert again is None, f"{again} is already finished; its rounds would count twice"
        number = 1 + max((int(f.split("-")[1]) for f in self._flushes), default=-1)
        flush = f"part-{number:06d}-{uuid.uuid4().hex[:8]}"
        try:
            self._flush(flush, tables)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror or error}; free space or mend its rights"
            ) from error
        self._flushes.append(flush)
        self._finished |= keys

    def finished_keys(self) -> set[ItemKey]:
        """Return the items that need no more work; failed ones are not among them."""
        return set(self._finished)

    def failures(self) -> dict[ItemKey, str]:
        """Return the items that failed and were not finished later, with the reason."""
        failed = {_key(row): str(row["error"]) for row in self._items() if row["error"] is not None}
        return {key: error for key, error in failed.items() if key not in self._finished}

    def answers(self) -> list[dict[str, Any]]:
        """Return the target answers as dicts, token ids included.

        Of several rows for one answer (it failed, then a resumed run got it) the last good one is kept.
        """
        kept: dict[AnswerKey, dict[str, Any]] = {}
        for row in self.table("answers").to_pylist():
            key = AnswerKey(*(row[name] for name in AnswerKey._fields))
            if key not in kept or row["error"] is None or kept[key]["error"] is not None:
                kept[key] = row
        return list(kept.values())

    def table(self, name: str) -> Any:
        """Return one table as a pyarrow.Table; ``rounds`` may be large, see :func:`files` for streaming."""
        schema = arrow_schema(name)
        parts = [_read(f) for f in self.files(name)]
        if not parts:
            return schema.empty_table()
        return pa.concat_tables(parts).unify_dictionaries().cast(schema)

    def files(self, name: str) -> list[Path]:
        """Return the Parquet files of one table that belong to whole flushes, oldest first."""
        paths = (self.path / name / f"{flush}.parquet" for flush in self._flushes)
        return [p for p in paths if p.exists()]

    def _items(self) -> Iterator[dict[str, Any]]:
        for path in self.files("items"):
            yield from _read(path).to_pylist()

    def _make_directories(self) -> None:
        try:
            for name in (*TABLES, _STAGING):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror}; give another directory"
            ) from error

    def _committed(self) -> list[str]:
        """Return the flushes that are whole, oldest first, after checking the version of each."""
        flushes = []
        for path in sorted((self.path / "items").glob("part-*.parquet")):
            promised = json.loads(
                (_metadata(path).schema.to_arrow_schema().metadata or {}).get(_FLUSH_KEY, b"{}")
            )
            whole = all(_num_rows(self.path / name / path.name) == rows for name, rows in promised.items())
            if whole:
                flushes.append(path.stem)
        return flushes

    def _repair(self) -> None:
        """Remove what a killed process left: staged files, and files of flushes that never became whole."""
        shutil.rmtree(self.path / _STAGING)
        (self.path / _STAGING).mkdir()
        for name in TABLES:
            for path in (self.path / name).glob("part-*.parquet"):
                if path.stem not in self._flushes:
                    path.unlink()

    def _flush(self, flush: str, tables: Mapping[str, Any]) -> None:
        """Stage the files of one flush, then rename them into place, ``items`` last."""
        promised = {name: t.num_rows for name, t in tables.items() if name != "items" and t.num_rows}
        marked = dict(tables["items"].schema.metadata)
        marked[_FLUSH_KEY] = json.dumps(promised).encode()
        written = {
            **{name: tables[name] for name in promised},
            "items": tables["items"].replace_schema_metadata(marked),
        }
        staged = {}
        for name, table in written.items():
            staged[name] = self.path / _STAGING / f"{name}-{flush}"
            pq.write_table(table, staged[name], compression="zstd", row_group_size=1 << 20)
            _sync(staged[name])
        for name, source in staged.items():
            source.replace(self.path / name / f"{flush}.parquet")
            _sync(self.path / name)


def _key(row: Mapping[str, Any]) -> ItemKey:
    return ItemKey(*(row[name] for name in ItemKey._fields))


def _finished(rows: Iterable[Mapping[str, Any]]) -> set[ItemKey]:
    return {_key(row) for row in rows if row["error"] is None}


def _take_lock(path: Path) -> Any:
    """Hold an exclusive lock on the run directory, where the platform has one."""
    try:
        handle = (path / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}; give another directory") from error
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise UserError(
                f"another process is writing to {path}; wait for it or give another directory"
            ) from error
    return handle


def _sync(path: Path) -> None:
    """Ask the disk to keep a file or a directory entry through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _metadata(path: Path) -> Any:
    """Return a part's Parquet footer after checking that it is ours and of this version."""
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is corrupt ({error}); delete it and run again, which redoes what it held"
        ) from error
    version = schema_version(metadata.schema.to_arrow_schema())
    if version is None:
        raise UserError(f"{path} was not written by specbench; move it out of the run directory")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} is of schema version {version} and this specbench writes version {SCHEMA_VERSION}; "
            + (
                "install a newer specbench"
                if version > SCHEMA_VERSION
                else "run `specbench schema --migrate RUN`"
            )
        )
    return metadata


def _num_rows(path: Path) -> int:
    return int(_metadata(path).num_rows) if path.exists() else -1


def _read(path: Path) -> Any:
    _metadata(path)
    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is corrupt ({error}); delete it and run again, which redoes what it held"
        ) from error


def _rows_table(name: str, rows: Iterable[Mapping[str, Any]]) -> Any:
    """Turn rows into a table; a key that no row has is left to the schema's own checks."""
    rows = list(rows)
    if not rows:
        return arrow_schema(name).empty_table()
    keys = dict.fromkeys(key for row in rows for key in row)
    return to_table(name, {key: [row.get(key) for row in rows] for key in keys})


def _is_column(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray, pa.Array, pa.ChunkedArray))


def _rounds_table(blocks: Iterable[Mapping[str, Any]]) -> Any:
    """Turn rows and blocks of rows into one table."""
    rows: list[Mapping[str, Any]] = []
    tables = []
    for block in blocks:
        if any(_is_column(v) for v in block.values()):
            tables.append(_block_table(block))
        else:
            rows.append(block)
    tables.append(_rows_table("rounds", rows))
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _block_table(block: Mapping[str, Any]) -> Any:
    """Turn one block (scalars hold for all its rows) into a table."""
    lengths = {key: len(value) for key, value in block.items() if _is_column(value)}
    length = next(iter(lengths.values()))
    odd = next((key for key, n in lengths.items() if n != length), None)
    if odd is not None:
        raise UserError(
            f"the column {odd!r} of a block of rounds has {lengths[odd]} rows where others have {length}"
        )
    spread: dict[str, Any] = {}
    for key, value in block.items():
        if _is_column(value):
            spread[key] = value
        elif isinstance(value, str):
            spread[key] = pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(length, np.int32)), pa.array([value])
            )
        else:
            spread[key] = [value] * length
    return to_table("rounds", spread)
