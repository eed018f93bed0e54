"""Entries: packed whole, and refused with the reason whatever a stranger does to them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.results import entry as entry_module
from specbench.results.aggregate import acceptance_table
from specbench.results.entry import SUMS_FILE, validate_entry, write_entry
from specbench.results.store import RunStore

COUNTS = {
    "template/regular": {"ngram": [[4, 0, 2], [3, 1]]},
    "text/caps": {"ngram": [[2, 0], [1, 1, 1]]},
}


@pytest.fixture
def run(tmp_path: Path, synthetic: SimpleNamespace) -> Path:
    path: Path = synthetic.whole_run(tmp_path / "run", RunStore, COUNTS)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, synthetic: SimpleNamespace) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_entry(synthetic.whole_run(folder / "run", RunStore, COUNTS), folder / "entry")
    return folder / "entry"


@pytest.fixture
def packed(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "entry")


def resign(entry: Path) -> None:
    """Make the checksums fit again, as a liar would."""
    names = sorted(
        p.relative_to(entry).as_posix() for p in entry.rglob("*") if p.is_file() and p.name != SUMS_FILE
    )
    lines = [f"{hashlib.sha256((entry / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (entry / SUMS_FILE).write_text("".join(lines))


def edit_rows(entry: Path, table: str, edit: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change rows of one table and sign again."""
    for path in (entry / table).glob("*.parquet"):
        old = pq.read_table(path)
        rows = old.to_pylist()
        if rows:
            edit(rows)
            # Metadata says how many rows belong to a flush; the footer stays as it was.
            pq.write_table(pa.Table.from_pylist(rows, schema=old.schema), path)
    resign(entry)


def test_an_entry_gives_the_numbers_of_its_run(run: Path, packed: Path) -> None:
    assert acceptance_table(packed).equals(acceptance_table(run))
    entry = validate_entry(packed)
    assert list(entry.info.drafters) == ["ngram"]
    assert entry.digest == hashlib.sha256((packed / SUMS_FILE).read_bytes()).hexdigest()[:12]
    with RunStore(packed, readonly=True) as store:
        assert [a["answer_ids"] for a in store.answers()] == [[]] * 4
        assert len(store.finished_keys()) == 4


def test_an_unfinished_run_is_not_packed(run: Path, tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(run) as store:
        store.write(items=[synthetic.item(prompt_id="toy/7", error="out of memory")])
    with pytest.raises(UserError, match="1 items .* failed .first: toy/7, .*out of memory.*repeat the run"):
        write_entry(run, tmp_path / "entry")
    assert not (tmp_path / "entry").exists()


def test_a_full_directory_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        write_entry(run, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    with pytest.raises(UserError, match="is not a run directory"):
        write_entry(tmp_path / "mine", tmp_path / "entry")


def test_a_retried_answer_is_packed_once(run: Path, tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(run) as store:
        flush = synthetic.work([1], prompt_id="toy/5", ids_hash="5" * 16)
        store.write(answers=[{**flush["answers"][0], "error": "boom", "answer_tokens": 0}])
        store.write(
            items=flush["items"],
            rounds=flush["rounds"],
            answers=[{**flush["answers"][0], "answer_tokens": 3}],
        )
    write_entry(run, tmp_path / "entry")
    assert len(RunStore(tmp_path / "entry", readonly=True).table("answers")) == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_accepted": -1, "num_emitted": 0}, "num_accepted is negative"),
        ({"num_accepted": 99, "num_emitted": 100}, "num_accepted is above num_drafted"),
        ({"weight": float("nan")}, "weight is not above 0"),
        ({"weight": float("inf")}, "weight is not above 0"),
        ({"draft_ms": float("nan")}, "draft_ms is negative or not finite"),
        ({"k": 2}, "num_drafted is above k"),
        ({"k": 0, "num_drafted": 0, "num_accepted": 0, "num_emitted": 1}, "k is below 1"),
        ({"start": 7}, "do not follow each other"),
        ({"num_accepted": 3, "num_emitted": 4}, "do not"),
        ({"drafter": "somebody else's"}, "which run.json does not name"),
        ({"target": "another"}, "which run.json does not name"),
        ({"run_id": "another"}, "which run.json does not name"),
        ({"drafter": "x" * 400}, "longer than 300 characters"),
        ({"prompt_id": "bell\x07"}, "control characters"),
        ({"answer_path": "stolen"}, "neither free nor forced"),
        ({"ids_hash": "other"}, "rounds belong to no answer"),
    ],
)
def test_impossible_rounds_are_refused(packed: Path, change: dict[str, Any], reason: str) -> None:
    edit_rows(packed, "rounds", lambda rows: rows[1].update(change))
    with pytest.raises(UserError, match=reason):
        validate_entry(packed)


@pytest.mark.parametrize(
    ("table", "edit", "reason"),
    [
        ("rounds", lambda rows: rows.__setitem__(0, rows[1]), "the same round is there twice"),
        ("answers", lambda rows: rows.__setitem__(0, rows[1]), "one answer is there twice"),
        ("answers", lambda rows: rows[0].update(answer_tokens=50), "do not add up to its length"),
        ("answers", lambda rows: rows[0].update(prompt_tokens=-1), "prompt_tokens is below 1"),
        ("answers", lambda rows: rows[0].update(mean_entropy=float("nan")), "mean_entropy is negative"),
    ],
)
def test_broken_identities_are_refused(packed: Path, table: str, edit: Any, reason: str) -> None:
    edit_rows(packed, table, edit)
    with pytest.raises(UserError, match=reason):
        validate_entry(packed)


def test_one_prompt_under_two_names_is_refused(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path / "run", RunStore, COUNTS)
    with RunStore(run) as store:
        flush = synthetic.work([3, 1], prompt_id="toy/copy", ids_hash=f"{1:016x}")
        flush["answers"][0]["answer_tokens"] = 7
        store.write(**flush)
    with pytest.raises(UserError, match="'toy/1' and 'toy/copy' are one prompt under two names"):
        write_entry(run, tmp_path / "entry")
    assert not (tmp_path / "entry").exists()


def test_a_changed_byte_is_found(packed: Path) -> None:
    record = packed / "run.json"
    record.write_text(record.read_text().replace("r1", "r2"))
    with pytest.raises(UserError, match="checksum of 'run.json' does not match"):
        validate_entry(packed)


def test_names_must_be_those_of_an_entry(packed: Path) -> None:
    sums = (packed / SUMS_FILE).read_text()
    for line, reason in (
        (f"{'0' * 64}  ../../etc/passwd\n", "listed but not there"),
        (f"{'0' * 64}  /etc/passwd\n", "listed but not there"),
        ("<script>alert(1)</script>\n", "malformed line"),
    ):
        (packed / SUMS_FILE).write_text(sums + line)
        with pytest.raises(UserError, match=reason):
            validate_entry(packed)
    (packed / SUMS_FILE).write_text(sums)
    (packed / "rounds" / "evil.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="does not belong into an entry"):
        validate_entry(packed)


def test_links_are_not_followed(packed: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    shutil.move(packed / "run.json", secret)
    (packed / "run.json").symlink_to(secret)
    with pytest.raises(UserError, match="holds a link"):
        validate_entry(packed)
    (tmp_path / "door").symlink_to(packed)
    with pytest.raises(UserError, match="is not a directory"):
        validate_entry(tmp_path / "door")


def test_a_parquet_bomb_is_refused_before_it_is_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, *_) = (packed / "rounds").glob("*.parquet")
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table] * 3000), path)
    resign(packed)
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(entry_module, "MAX_ROWS", 10_000)
    with pytest.raises(UserError, match="unpacks to more than 10,000 rows"):
        validate_entry(packed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a run's record"),
        ("[" * 100_000, "is not a run's record"),
        ('{"run_id": NaN}', "NaN is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"run_id": "r1", "target": {"name": "t", "fingerprint": "f"}}', "'drafters' must be a list"),
        (
            '{"run_id": 5, "target": {"name": "t", "fingerprint": "f"}, "drafters": [{"name": "n"}]}',
            "must be a string",
        ),
        (
            '{"run_id": "r1", "target": {"name": "t", "fingerprint": "f"}, '
            '"drafters": [{"name": "n", "num_parameters": -3}]}',
            "must be a non-negative integer",
        ),
        (
            '{"run_id": "r1", "target": {"name": "t", "fingerprint": "f"}, "drafters": [{"name": "n"}, {"name": "n"}]}',
            "two drafters have the same name",
        ),
        ('{"run_id": "a\\u0007"}', "control characters"),
    ],
)
def test_a_bad_record_is_refused(packed: Path, text: str, reason: str) -> None:
    record = json.loads((packed / "run.json").read_text())
    if reason == "control characters":
        text = json.dumps({**record, "run_id": "a\x07"})
    (packed / "run.json").write_text(text)
    resign(packed)
    with pytest.raises(UserError, match=reason):
        validate_entry(packed)


def test_wrong_types_and_columns_are_refused(packed: Path) -> None:
    (path, *_) = sorted((packed / "rounds").glob("*.parquet"))
    whole = pq.read_table(path)

    def rewrite(table: Any, reason: str) -> None:
        pq.write_table(table, path)
        resign(packed)
        with pytest.raises(UserError, match=reason):
            validate_entry(packed)

    index = whole.column_names.index("num_accepted")
    text = whole.set_column(
        index, pa.field("num_accepted", pa.string()), whole["num_accepted"].cast(pa.string())
    )
    rewrite(text, "the column 'num_accepted' of rounds is string, not int32")
    rewrite(whole.drop(["k"]), "the column 'k' of rounds is None, not int32")
    rewrite(whole.append_column("<b>", whole["k"]), "unknown columns: '<b>'")
    rewrite(whole.replace_schema_metadata({}), "schema version None")
    path.write_bytes(b"not parquet")
    resign(packed)
    with pytest.raises(UserError, match="is not readable Parquet"):
        validate_entry(packed)


def test_damage_inside_a_page_is_refused(packed: Path) -> None:
    (path, *_) = [p for p in (packed / "rounds").glob("*.parquet") if p.stat().st_size > 3000]
    content = bytearray(path.read_bytes())
    content[40:400] = bytes(360)
    path.write_bytes(content)
    resign(packed)
    with pytest.raises(UserError, match="is refused"):
        validate_entry(packed)
