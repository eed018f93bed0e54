"""Leaderboard entries: a run packed for handing in, and the distrustful reading of one.

An entry is a directory that holds ``run.json``, the tables of the run store (answer texts left out) and
``SHA256SUMS`` over all of them. Nothing in it is believed: names, sizes, checksums, types, ranges and
identities are checked before a single number is used, and a refusal names its reason.

Example:
    write_entry("runs/first", "entry")
    validate_entry("entry").info.drafters
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import UserError
from specbench.results.aggregate import connect
from specbench.results.checks import ANSWER_RULES, ROUND_RULES, identity_problems, rule_problems
from specbench.results.runinfo import MAX_BYTES, MAX_NAME, RUN_FILE, RunInfo, read_run_info
from specbench.results.schema import SCHEMA_VERSION, TABLES, arrow_schema, schema_version
from specbench.results.store import RunStore

SUMS_FILE = "SHA256SUMS"
MAX_FILES = 2_000
MAX_DISK = 1 << 30
MAX_ROWS = 50_000_000
MAX_UNPACKED = 16 << 30
_ROWS_A_FILE = 1 << 20
_TABLE_FILE = re.compile(r"(rounds|answers|items)/part-[0-9]{6}-[0-9a-f]{8}\.parquet")
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_./-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checked entry."""

    path: Path
    digest: str
    """Of its ``SHA256SUMS``, first 12 hex digits: names the entry, whatever its directory is called."""
    info: RunInfo


def write_entry(run: str | Path, out: str | Path) -> Entry:
    """Pack a finished run.

    Args:
        run: run directory.
        out: directory to make; must not hold anything yet.

    Raises:
        UserError: the run is unfinished or fails a check, or ``out`` is not empty or cannot be written.
    """
    out = Path(out)
    store = RunStore(run, readonly=True)
    failures = store.failures()
    if failures:
        key, reason = next(iter(failures.items()))
        raise UserError(
            f"{len(failures)} items of {run} failed (first: {key.prompt_id}, {key.condition}, {key.drafter}: "
            f"{reason}); repeat the run's command, which tries them again"
        )
    read_run_info(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; give another directory")
    existed = out.exists()
    try:
        with RunStore(out) as packed:
            _copy(store, packed)
        for left in (".lock", ".partial"):
            path = out / left
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.copyfile(Path(run) / RUN_FILE, out / RUN_FILE)
        lines = [f"{_digest(out / name)}  {name}\n" for name in sorted(_present(out))]
        (out / SUMS_FILE).write_text("".join(lines))
        return validate_entry(out)
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    except UserError:
        shutil.rmtree(out, ignore_errors=True)
        if existed:
            out.mkdir()
        raise


def _copy(store: RunStore, packed: RunStore) -> None:
    """Copy the tables in few, large flushes; answers once each and without their token ids."""
    import pyarrow.parquet as pq

    answers = [{**row, "answer_ids": []} for row in store.answers() if row["error"] is None]
    items = [row for row in store.table("items").to_pylist() if row["error"] is None]
    packed.write(answers=answers, items=items)
    waiting: list[dict[str, Any]] = []
    rows = 0
    for file in store.files("rounds"):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=_ROWS_A_FILE):
            waiting.append({name: batch.column(name) for name in batch.schema.names})
            rows += batch.num_rows
            if rows >= _ROWS_A_FILE:
                packed.write(rounds=waiting)
                waiting, rows = [], 0
    if waiting:
        packed.write(rounds=waiting)


def _present(entry: Path) -> Iterator[str]:
    """Yield the entry's files by relative name, without following links.

    Raises:
        UserError: something there does not belong.
    """
    count = 0
    for path in entry.rglob("*"):
        count += 1
        name = path.relative_to(entry).as_posix()
        if count > MAX_FILES:
            raise UserError(f"{entry} holds more than {MAX_FILES} files; an entry holds a few")
        if path.is_symlink():
            raise UserError(f"{entry} holds a link ({name!r}); an entry holds plain files only")
        if path.is_dir() and name in TABLES:
            continue
        if name == SUMS_FILE:
            continue
        if not path.is_file() or not (name == RUN_FILE or _TABLE_FILE.fullmatch(name)):
            raise UserError(f"{entry} holds {name!r}, which does not belong into an entry; remove it")
        yield name


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def validate_entry(path: str | Path) -> Entry:
    """Check an entry from a stranger.

    Raises:
        UserError: anything is not as it must be; the message says what.
    """
    import duckdb

    entry = Path(path)
    if entry.is_symlink() or not entry.is_dir():
        raise UserError(f"{entry} is not a directory; unpack the entry and give its folder")
    try:
        digest = _check_sums(entry)
        info = read_run_info(entry)
        for name in TABLES:
            _check_table(entry, name)
        connection = connect()
        _check_rows(connection, entry, info)
    except UserError as error:
        raise UserError(f"entry {entry.name} is refused: {error}") from error
    except (duckdb.Error, OSError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"entry {entry.name} is refused: its tables cannot be read ({reason})") from error
    return Entry(path=entry, digest=digest, info=info)


def _check_sums(entry: Path) -> str:
    """Check that the sums name exactly the files that are there, and match."""
    sums = entry / SUMS_FILE
    if not sums.is_file() or sums.is_symlink():
        raise UserError(f"it holds no {SUMS_FILE}; make it with `specbench submit`")
    if sums.stat().st_size > MAX_BYTES:
        raise UserError(f"{SUMS_FILE} is larger than {MAX_BYTES >> 20} MiB")
    content = sums.read_bytes()
    listed: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise UserError(f"{SUMS_FILE} holds a malformed line: {line[:80]!r}")
        listed[match[2]] = match[1]
    present = set(_present(entry))
    if set(listed) != present:
        odd = sorted(set(listed) ^ present)[0]
        where = "is there but not listed" if odd in present else "is listed but not there"
        raise UserError(f"{odd!r} {where} in {SUMS_FILE}")
    if sum((entry / name).stat().st_size for name in present) > MAX_DISK:
        raise UserError(f"it is larger than {MAX_DISK >> 30} GiB")
    for name, wanted in listed.items():
        if _digest(entry / name) != wanted:
            raise UserError(f"the checksum of {name!r} does not match; it was changed after packing")
    return hashlib.sha256(content).hexdigest()[:12]


def _check_table(entry: Path, name: str) -> None:
    """Check version, columns, types and sizes from the Parquet footers alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = arrow_schema(name)
    rows = unpacked = 0
    for file in sorted((entry / name).glob("*.parquet")):
        try:
            metadata = pq.read_metadata(file)
            schema = metadata.schema.to_arrow_schema()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise UserError(f"{name}/{file.name} is not readable Parquet") from error
        version = schema_version(schema)
        if version != SCHEMA_VERSION:
            raise UserError(f"{name} is of schema version {version}; this specbench reads {SCHEMA_VERSION}")
        for field in wanted:
            found = schema.field(field.name).type if field.name in schema.names else None
            if found != field.type:
                raise UserError(f"the column {field.name!r} of {name} is {found}, not {field.type}")
        if len(schema) != len(wanted):
            extra = sorted(set(schema.names) - set(wanted.names))
            raise UserError(f"{name} holds unknown columns: {', '.join(map(repr, extra))[:200]}")
        rows += metadata.num_rows
        unpacked += sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        if rows > MAX_ROWS or unpacked > MAX_UNPACKED:
            raise UserError(f"{name} unpacks to more than {MAX_ROWS:,} rows or {MAX_UNPACKED >> 30} GiB")


def _check_rows(connection: Any, entry: Path, info: RunInfo) -> None:
    """Check strings, ranges, identities, and that the rows are those of ``run.json``."""
    for name in ("rounds", "answers", "items"):
        pattern = str(entry / name / "*.parquet").replace("'", "''")
        connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM read_parquet('{pattern}')")
        for problem in _string_problems(connection, name):
            raise UserError(problem)
    for view, rules in (("rounds", ROUND_RULES), ("answers", ANSWER_RULES)):
        for problem in rule_problems(connection, view, rules):
            raise UserError(problem)
    for problem in (*_foreign_rows(connection, info), *identity_problems(connection)):
        raise UserError(problem)
    store = RunStore(entry, readonly=True)
    for name in TABLES:
        loose = {f.name for f in (entry / name).iterdir()} - {f.name for f in store.files(name)}
        if loose:
            raise UserError(f"{name}/{min(loose)} belongs to no whole flush of the run")


def _string_problems(connection: Any, view: str) -> Iterator[str]:
    import pyarrow as pa

    for column in TABLES[view]:
        if not (pa.types.is_dictionary(column.type) or pa.types.is_string(column.type)):
            continue
        longest, control, empty = connection.execute(
            f"""
            SELECT max(length("{column.name}")), count_if(regexp_matches("{column.name}",
            '[\\x00-\\x1f\\x7f]')),
                   count_if("{column.name}" IS NULL)
            FROM (SELECT DISTINCT "{column.name}" FROM {view})
            """
        ).fetchall()[0]
        if (longest or 0) > MAX_NAME:
            yield f"a {column.name} of {view} is longer than {MAX_NAME} characters"
        if control:
            yield f"a {column.name} of {view} holds control characters"
        if empty and not column.nullable:
            yield f"a {column.name} of {view} is null"


def _foreign_rows(connection: Any, info: RunInfo) -> Iterator[str]:
    """Yield what the rows hold that ``run.json`` does not know."""
    known: Mapping[str, Sequence[str]] = {
        "run_id": [info.run_id],
        "target": [info.target],
        "drafter": list(info.drafters),
    }
    for column, values in known.items():
        found = {r[0] for r in connection.execute(f"SELECT DISTINCT {column} FROM rounds").fetchall()}
        foreign = sorted(found - set(values))
        if foreign:
            yield f"its rounds are of the {column} {foreign[0]!r}, which {RUN_FILE} does not name"
    twice = connection.execute(
        """
        SELECT min(prompt_id), max(prompt_id) FROM answers WHERE turn = 0 AND error IS NULL
        GROUP BY suite, condition, answer_path, ids_hash
        HAVING count(DISTINCT prompt_id) > 1 AND bool_and(condition = 'template/regular') LIMIT 1
        """
    ).fetchall()
    if twice:
        yield f"the prompts {twice[0][0]!r} and {twice[0][1]!r} are one prompt under two names"
