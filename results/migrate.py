"""Bring the tables of an older schema version up to date, file by file.

Every raise of ``SCHEMA_VERSION`` comes with one step here, from the version before to the new one. A file
is replaced in one rename after its rows have been read back, so an interrupted migration is repeated, not
repaired.

Example:
    migrate("runs/old")    # number of files rewritten
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbench.errors import UserError
from specbench.results import schema as schemas
from specbench.results.schema import TABLES, schema_version

Step = Callable[[str, Any], Any]

STEPS: Mapping[int, Step] = {}
"""version -> (table name, pyarrow table of that version) -> table of the next. Version 1 is the first."""


def migrate(run: str | Path) -> int:
    """Rewrite what an older specbench wrote.

    Args:
        run: run directory; no other process may write to it meanwhile.

    Returns:
        Number of files rewritten.

    Raises:
        UserError: not a run directory, a file is unreadable, newer than this specbench or of a version no
            step starts from, or the directory cannot be written.
    """
    folder = Path(run)
    if not (folder / "items").is_dir():
        raise UserError(f"{folder} is not a run directory: it has no items/ folder")
    # The items file of a flush vouches for the others, so it is the last to say that it is current.
    order = sorted(TABLES, key=lambda name: name == "items")
    return sum(
        _migrate_file(name, path) for name in order for path in sorted((folder / name).glob("*.parquet"))
    )


def _migrate_file(name: str, path: Path) -> int:
    try:
        old = pq.ParquetFile(path).read()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is corrupt ({error}); delete it and run again, which redoes what it held"
        ) from error
    version = schema_version(old.schema)
    if version is None:
        raise UserError(f"{path} was not written by specbench; move it out of the run directory")
    if version == schemas.SCHEMA_VERSION:
        return 0
    table = old
    for step in range(version, schemas.SCHEMA_VERSION):
        if step not in STEPS:
            raise UserError(
                f"{path} is of schema version {version}, from which this specbench has no way to go on"
            )
        table = STEPS[step](name, table)
    if version > schemas.SCHEMA_VERSION:
        raise UserError(f"{path} is of schema version {version}; install a newer specbench")
    new = schemas.to_table(name, {column: table.column(column) for column in table.column_names})
    # What a flush promises about its other files is kept beside the new version and docs.
    new = new.replace_schema_metadata({**(old.schema.metadata or {}), **new.schema.metadata})
    partial = path.with_suffix(".partial")
    try:
        pq.write_table(new, partial, compression="zstd", row_group_size=1 << 20)
        assert pq.read_metadata(partial).num_rows == old.num_rows
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return 1
