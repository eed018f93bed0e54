"""Migration: an older table is brought up to date, once, and keeps what its flush promised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.results import migrate as module
from specbench.results import schema, store
from specbench.results.migrate import migrate
from specbench.results.store import RunStore


def age(run: Path) -> None:
    """Make a run look as if version 0 had written it: ``k`` was called ``depth``."""
    for name in schema.TABLES:
        for path in (run / name).glob("*.parquet"):
            table = pq.read_table(path)
            renamed = table.rename_columns(["depth" if c == "k" else c for c in table.column_names])
            metadata = {**table.schema.metadata, b"specbench.schema_version": b"0"}
            pq.write_table(renamed.replace_schema_metadata(metadata), path)


def step(name: str, table: Any) -> Any:
    return table.rename_columns(["k" if c == "depth" else c for c in table.column_names])


@pytest.fixture
def old(tmp_path: Path, synthetic: SimpleNamespace) -> Path:
    with RunStore(tmp_path / "run") as opened:
        opened.write(**synthetic.work([2, 0]))
        opened.write(**synthetic.work([1], prompt_id="toy/1"))
    age(tmp_path / "run")
    return tmp_path / "run"


def test_an_old_run_is_read_again_after_migration(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="schema version 0 .*specbench schema --migrate"):
        RunStore(old)
    monkeypatch.setattr(module, "STEPS", {0: step})
    assert migrate(old) == 6
    with RunStore(old) as opened:
        assert len(opened.finished_keys()) == 2
        assert opened.table("rounds")["k"].to_pylist() == [4, 4, 4]
    assert migrate(old) == 0


def test_an_interrupted_migration_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(name: str, table: Any) -> Any:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(name, table)

    monkeypatch.setattr(module, "STEPS", {0: failing})
    with pytest.raises(KeyboardInterrupt):
        migrate(old)
    assert migrate(old) == 4
    assert len(RunStore(old, readonly=True).finished_keys()) == 2


def test_what_cannot_be_migrated_is_named(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no way to go on"):
        migrate(old)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", -1)
    with pytest.raises(UserError, match="install a newer specbench"):
        migrate(old)
    with pytest.raises(UserError, match="is not a run directory"):
        migrate(tmp_path)
    pq.write_table(pa.table({"x": [1]}), old / "rounds" / "part-x.parquet")
    monkeypatch.undo()
    monkeypatch.setattr(module, "STEPS", {0: step})
    with pytest.raises(UserError, match="not written by specbench"):
        migrate(old)
    assert store.SCHEMA_VERSION == 1
