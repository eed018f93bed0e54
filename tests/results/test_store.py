"""The Parquet store: read back by three other libraries, killed between writes, resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.results import store as store_module
from specbench.results.schema import ROUNDS, TABLES, arrow_schema, schema_text
from specbench.results.store import AnswerKey, ItemKey, RunStore

KEY = ItemKey("toy/0", 0, "template/regular", "free", "ngram", "replay", "greedy")


def test_rows_come_back_through_pandas_polars_and_duckdb(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 0, 1]))
        store.write(**synthetic.work([4], prompt_id="toy/1", suite="other", drafter="draft"))
    folder = tmp_path / "rounds"
    frame = pd.read_parquet(folder)
    assert frame["num_accepted"].tolist() == [2, 0, 1, 4]
    assert frame["drafter"].astype(str).tolist() == ["ngram"] * 3 + ["draft"]
    assert pl.read_parquet(folder)["suite"].cast(pl.String).to_list() == ["toy"] * 3 + ["other"]
    assert pl.scan_parquet(folder).select(pl.col("num_accepted").sum()).collect().item() == 7
    found = duckdb.connect().sql(f"SELECT sum(num_accepted), count(*) FROM '{folder}/*.parquet'").fetchall()
    assert found == [(7, 4)]


def test_every_file_carries_version_and_docs(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2]))
    for name in TABLES:
        (path,) = (tmp_path / name).glob("*.parquet")
        schema = pq.read_schema(path)
        assert schema.metadata[b"specbench.schema_version"] == b"1"
        for field in schema:
            assert field.metadata[b"doc"], field.name
        assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    text = schema_text()
    assert all(c.name in text and c.doc in text for columns in TABLES.values() for c in columns)


def test_a_block_of_rounds_is_the_same_as_its_rows(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    block = synthetic.rounds(
        [2, 0, 1], engine_accepted=np.array([2, 0, 4]), cut=np.array([False, False, True])
    )
    rows = [
        {k: (v[i] if isinstance(v, (list, np.ndarray)) else v) for k, v in block.items()} for i in range(3)
    ]
    for row in rows:
        row["engine_accepted"], row["cut"] = int(row["engine_accepted"]), bool(row["cut"])
    with RunStore(tmp_path / "a") as a, RunStore(tmp_path / "b") as b:
        a.write(rounds=[block])
        b.write(rounds=rows)
        assert a.table("rounds").to_pylist() == b.table("rounds").to_pylist()
        assert a.table("rounds").schema.equals(arrow_schema("rounds"))
    assert len(ROUNDS) == len(a.table("rounds").column_names)


def test_finished_items_survive_and_failed_ones_are_retried(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    with RunStore(tmp_path) as store:
        failed = KEY._replace(prompt_id="toy/1")
        store.write(**synthetic.work([2]))
        store.write(items=[synthetic.item(prompt_id="toy/1", error="boom")])
        assert store.finished_keys() == {KEY}
    with RunStore(tmp_path) as store:
        assert store.finished_keys() == {KEY}
        assert store.failures() == {failed: "boom"}
        store.write(**synthetic.work([1], prompt_id="toy/1"))
        assert store.failures() == {}
        assert store.finished_keys() == {KEY, failed}


def test_an_answer_that_failed_first_is_replaced_by_the_good_one(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    with RunStore(tmp_path) as store:
        store.write(answers=[synthetic.answer(0, error="out of memory", finish="")])
        assert [a["error"] for a in store.answers()] == ["out of memory"]
        store.write(answers=[synthetic.answer(3)])
        store.write(answers=[synthetic.answer(0, error="again", finish="")])
        (row,) = store.answers()
        assert row["answer_ids"] == [0, 1, 2] and row["error"] is None
        assert AnswerKey(*(row[f] for f in AnswerKey._fields)) == AnswerKey(
            "toy/0", 0, "template/regular", "free"
        )


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import conftest
from specbench.results.store import RunStore

store = RunStore(sys.argv[1])
store.write(**conftest.work([2, 0]))
left = int(sys.argv[3])
real = Path.replace
def replace(self, target):
    global left
    if left == 0:
        os._exit(9)
    left -= 1
    return real(self, target)
Path.replace = replace
store.write(**conftest.work([1, 1, 1], prompt_id="toy/1"))
"""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_process_killed_between_the_tables_loses_only_that_flush(
    tmp_path: Path, synthetic: SimpleNamespace, renames: int
) -> None:
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(here), str(renames)], check=False)
    assert done.returncode == 9
    reader = RunStore(tmp_path, readonly=True)
    assert reader.table("rounds").num_rows == 2
    assert len(reader.answers()) == 1
    with RunStore(tmp_path) as store:
        assert store.finished_keys() == {KEY}
        assert [len(list((tmp_path / n).glob("*"))) for n in TABLES] == [1, 1, 1]
        store.write(**synthetic.work([1, 1, 1], prompt_id="toy/1"))
        assert store.table("rounds").num_rows == 5


def test_a_deleted_part_makes_its_items_unfinished(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 0]))
        store.write(**synthetic.work([3], prompt_id="toy/1"))
    sorted((tmp_path / "rounds").glob("*"))[1].unlink()
    with RunStore(tmp_path) as store:
        assert store.finished_keys() == {KEY}
        assert store.table("rounds")["num_accepted"].to_pylist() == [2, 0]


def test_a_truncated_file_is_named(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 0]))
    (path,) = (tmp_path / "rounds").glob("*")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=f"{path.name} is corrupt .*delete it and run again"):
        RunStore(tmp_path)


def test_another_schema_version_is_refused(
    tmp_path: Path, synthetic: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 0]))
    monkeypatch.setattr(store_module, "SCHEMA_VERSION", 0)
    with pytest.raises(UserError, match="schema version 1 .* install a newer specbench"):
        RunStore(tmp_path)


def test_a_stranger_in_the_folder_is_refused(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 0]))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "items" / "part-x.parquet")
    with pytest.raises(UserError, match="not written by specbench"):
        RunStore(tmp_path)


def test_a_path_that_is_a_file_and_a_full_disk(
    tmp_path: Path, synthetic: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write to"):
        RunStore(tmp_path / "file")
    with pytest.raises(UserError, match="is not a run directory"):
        RunStore(tmp_path / "nothing", readonly=True)
    with RunStore(tmp_path / "run") as store:

        def full(*args: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store_module.pq, "write_table", full)
        with pytest.raises(UserError, match="No space left on device"):
            store.write(**synthetic.work([2, 0]))
        assert store.finished_keys() == set()


def test_two_writers_are_told_apart(tmp_path: Path) -> None:
    with RunStore(tmp_path), pytest.raises(UserError, match="another process is writing"):
        RunStore(tmp_path)
    RunStore(tmp_path).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_accepted": [5]}, "num_accepted is above num_drafted"),
        ({"num_accepted": [-1], "num_emitted": [0]}, "num_accepted is negative"),
        ({"num_drafted": [9]}, "num_drafted is above k"),
        ({"num_emitted": [7]}, "num_emitted is neither"),
        ({"weight": float("nan")}, "weight is not above 0"),
        ({"weight": 0.0}, "weight is not above 0"),
        ({"temperature": float("inf")}, "temperature is negative or not finite"),
        ({"engine_accepted": [0]}, "engine_accepted is below num_accepted"),
        ({"k": 0, "num_drafted": [0], "num_accepted": [0], "num_emitted": [1]}, "k is below 1"),
        ({"num_accepted": ["two"]}, "'num_accepted' of rounds must be int32"),
        ({"colour": "red"}, "no column 'colour'"),
        ({"drafter": None}, "'drafter' of rounds must not be null"),
        ({"num_drafted": [4, 4]}, "'.*' of a block of rounds has"),
    ],
)
def test_impossible_rows_are_refused(
    tmp_path: Path, synthetic: SimpleNamespace, changes: dict[str, object], message: str
) -> None:
    with RunStore(tmp_path) as store:
        with pytest.raises(UserError, match=message):
            store.write(rounds=[synthetic.rounds([2], **changes)])
        assert store.table("rounds").num_rows == 0


def test_a_missing_column_is_named(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    block = synthetic.rounds([2])
    del block["sampler"]
    with RunStore(tmp_path) as store, pytest.raises(UserError, match="rounds needs the column 'sampler'"):
        store.write(rounds=[block])


def test_finishing_an_item_twice_is_our_own_bug(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2]))
        with pytest.raises(AssertionError, match="already finished"):
            store.write(**synthetic.work([2]))
