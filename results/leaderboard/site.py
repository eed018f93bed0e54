"""Write the leaderboard: one page without a single outside request, and its numbers as Parquet.

Example:
    build_site(["entries/a", "entries/b"], "site")    # site/index.html, site/leaderboard.parquet
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from specbench.errors import UserError
from specbench.results.leaderboard.board import DRAWS, Board, collect
from specbench.results.robustness import FORMULA

TITLE = "Drafter leaderboard"
_MARK = "leaderboard.parquet"


def build_site(
    entries: Sequence[str | Path],
    out: str | Path,
    *,
    title: str = TITLE,
    with_entries: bool = False,
    draws: int = DRAWS,
    seed: int = 0,
) -> Board:
    """Check entries and write the site.

    Args:
        entries: entry directories.
        out: folder of the site: a new or empty one, or an earlier site, which is replaced.
        title: the page's heading.
        with_entries: copy the accepted entries beside the page and link to their rounds.
        draws: resamples behind the intervals.
        seed: of the resamples.

    Returns:
        What is shown, and what was refused and why.

    Raises:
        UserError: no entry can be shown, or ``out`` holds something else or cannot be written.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / _MARK).exists())):
        raise UserError(f"{folder} is not empty and is no earlier site; give another directory")
    board = collect(entries, draws=draws, seed=seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(board, folder, title, with_entries)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    return board


def entry_folders(folder: str | Path) -> list[Path]:
    """Return the entries in a folder: every directory in it, hidden ones aside.

    Raises:
        UserError: the folder does not exist or is empty.
    """
    try:
        found = sorted(
            p for p in Path(folder).iterdir() if not p.name.startswith(".") and (p.is_dir() or p.is_symlink())
        )
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error
    if not found:
        raise UserError(
            f"{folder} holds no entries; make one with `specbench submit RUN --out {folder}/NAME`"
        )
    return found


def _write(board: Board, folder: Path, title: str, with_entries: bool) -> None:
    import pyarrow.parquet as pq

    payload = {**board.payload, "title": title}
    copies = folder / "entries"
    if copies.exists():
        shutil.rmtree(copies)
    if with_entries:
        for entry, facts in zip(board.entries, payload["entries"], strict=True):
            shutil.copytree(entry.path, copies / entry.digest)
            facts["download"] = f"entries/{entry.digest}/rounds/"
    (folder / "index.html").write_text(page(payload, title), encoding="utf-8")
    pq.write_table(board.table, folder / _MARK, compression="zstd", compression_level=15)


def page(payload: Mapping[str, Any], title: str) -> str:
    """Return the page as HTML.

    Everything runs inline and only what is meant to: the content security policy names the hashes of the
        style and
    of both scripts, and allows no connection at all.
    """
    import jinja2

    from specbench import __version__

    style, app, chart = (_asset(n) for n in ("style.css", "app.js", "vendor/chart.umd.min.js"))
    for inline in (style, app, chart):
        assert "</script" not in inline and "</style" not in inline and "<!--" not in inline
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(chart)} {_hash(app)}"
    )
    environment = jinja2.Environment(
        autoescape=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    mark = environment.filters["safe"]
    return environment.from_string(_asset("page.html")).render(
        policy=policy,
        title=title,
        formula=FORMULA,
        footer=f"Made with specbench {__version__}. Figures: Chart.js (MIT licence).",
        style=mark(style),
        app=mark(app),
        chart=mark(chart),
        data=mark(_packed(payload)),
    )


def _asset(name: str) -> str:
    return (resources.files("specbench.results.leaderboard") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(payload: Mapping[str, Any]) -> str:
    """Return the payload as base64 of deflated JSON: letters and digits only, so nothing in it
    can be markup.
    """
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
