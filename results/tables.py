"""The acceptance table for people: a terminal, Markdown, CSV, JSON or HTML.

One table a suite and one over all suites; rows are drafter x condition; keys that do not vary are named once
in the title. Both acceptance lengths are always told apart.

Example (80 columns):
    mtbench · target smollm2-135m · runner replay · k 4
                      acc/r tok/r kept  c1  c2  c3  c4 rounds #pr
    ngram
     template/regular  1.52  2.52 1.00 .52 .61 .70 .70   8112  80
     template/no_bos   1.49  2.49 0.98 .51 .61 .69 .70   8190  80
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.errors import unknown_name
from specbench.results.intervals import OVERALL
from specbench.results.text import Sheet, csv_text, json_text, plain, wrap

if TYPE_CHECKING:
    from rich.text import Text

ACCURACY_LEGEND = (
    " accuracy (score) = the answers' own score, which no lossless drafter changes; accuracy_retention (held) = "
    "accuracy relative to template/regular."
)

LEGEND = (
    "accepted_per_round (acc/r) = draft tokens accepted per round, the target's own token not counted. "
    "tokens_per_round (tok/r) = accepted_per_round + 1, which other tools print as acceptance length. "
    "retention (kept) = accepted_per_round relative to template/regular over the same prompts. "
    "95 %: interval, bootstrap over prompts. "
    "c_i = of the rounds with at least i-1 accepted tokens, the share that accepts an i-th. #pr = prompts."
)

_KEYS = (
    "suite",
    "category",
    "drafter",
    "condition",
    "answer_path",
    "target",
    "runner",
    "sampler",
    "temperature",
    "k",
)
_ROW_KEYS = ("drafter", "condition")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """One printed table: what holds for all its rows, and the rows."""

    title: str
    keys: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    depth: int
    intervals: bool
    accuracy: bool = False


def sections(table: Any) -> list[_Section]:
    """Split an acceptance table into one section a suite, the overall one last.

    Args:
        table: from :func:`specbench.results.aggregate.acceptance_table`.
    """
    rows = table.to_pylist()
    keys = [
        c for c in table.column_names[: _num_keys(table)] if c not in ("family", "severity", "drafter_kind")
    ]
    suites = list(dict.fromkeys(r.get("suite") for r in rows))
    if len(suites) == 2 and OVERALL in suites and "category" not in keys:
        suites.remove(OVERALL)  # one suite: the overall table would repeat it
    result = []
    for suite in suites:
        own = [r for r in rows if r.get("suite") == suite]
        varying = [k for k in keys if k in _ROW_KEYS or len({r[k] for r in own}) > 1]
        fixed = [
            k for k in keys if k not in varying and k not in ("suite", "run_id", "temperature", "answer_path")
        ]
        name = {OVERALL: "all suites", None: "acceptance"}.get(suite, str(suite))
        title = " · ".join([name, *(f"{k} {plain(own[0][k])}" for k in fixed if own[0][k] != OVERALL)])
        order = sorted(varying, key=lambda k: _KEYS.index(k) if k in _KEYS else -1)
        depth = max((i for r in own for i in _steps(table) if r[f"c_{i}"] is not None), default=0)
        intervals = "accepted_low" in table.column_names
        result.append(
            _Section(
                title=title,
                keys=tuple(order),
                rows=tuple(own),
                depth=depth,
                intervals=intervals,
                accuracy=any(r.get("accuracy") is not None for r in own),
            )
        )
    return result


def legend(table: Any) -> str:
    """Return the legend of a table's columns."""
    return LEGEND + (ACCURACY_LEGEND if "accuracy" in table.column_names else "")


def rich_tables(table: Any, width: int = 120) -> list[Text]:
    """Return one printable block a suite: a title, then the conditions of each drafter under its name.

    Args:
        table: from :func:`specbench.results.aggregate.acceptance_table`.
        width: terminal columns. Where the full headers do not fit they are shortened, as :data:`LEGEND`
            explains; conditional rates that do not fit either are left out and the title says so.
    """
    return [_block(section, _fit(section, width)) for section in sections(table)]


def _block(section: _Section, layout: _Layout) -> Text:
    """Draw one section; every column is as wide as the layout says, so groups line up."""
    from rich.text import Text

    block = Text(no_wrap=False)
    block.append(section.title + "\n", style="bold")
    if layout.note:
        block.append(layout.note + "\n", style="dim")
    block.append(_line("", [head for _, head, _ in layout.measures], layout) + "\n", style="dim")
    groups = [k for k in section.keys if k != "condition"]
    heading = None
    for row in section.rows:
        wanted = " · ".join(plain(row[k]) if k == "drafter" else f"{k} {plain(row[k])}" for k in groups)
        if wanted != heading:
            heading = wanted
            block.append(heading + "\n", style="bold cyan")
        values = [_cell(row, name, layout.narrow) for name, _, _ in layout.measures]
        block.append(_line(str(row.get("condition", "")), values, layout) + "\n")
    return block


def _line(label: str, cells: Sequence[str], layout: _Layout) -> str:
    """Return one row; a label too long for its column goes on in further lines."""
    first, *rest = wrap(" " + label, layout.label)
    gap = " " if layout.narrow else "  "
    numbers = [cell.rjust(width) for cell, (_, _, width) in zip(cells, layout.measures, strict=True)]
    return "\n".join([gap.join([first.ljust(layout.label), *numbers]), *rest])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What fits: width of the label column, and (measure, header, width) of the others."""

    label: int
    measures: tuple[tuple[str, str, int], ...]
    narrow: bool
    note: str = ""


def _fit(section: _Section, width: int) -> _Layout:
    """Choose full headers, short ones, or short ones with fewer steps."""
    wanted = max((len(str(row.get("condition", ""))) + 1 for row in section.rows), default=1)
    most = {
        narrow: {
            n: max(len(_cell(r, n, narrow)) for r in section.rows)
            for n, _ in _measures(section.depth, section.intervals, section.accuracy)
        }
        for narrow in (False, True)
    }
    for intervals in (True, False) if section.intervals else (False,):
        full = tuple(
            (n, n, max(len(n), most[False][n]))
            for n, _ in _measures(section.depth, intervals, section.accuracy)
        )
        if wanted + sum(w + 2 for *_, w in full) <= width:
            return _Layout(label=wanted, measures=full, narrow=False)
    # Steps come before intervals where both do not fit.
    choices = [(section.depth, True)] if section.intervals else []
    for shown, intervals in [*choices, *((s, False) for s in range(section.depth, -1, -1))]:
        short = tuple(
            (n, head, max(len(head), most[True][n]))
            for n, head in _measures(shown, intervals, section.accuracy)
        )
        room = width - sum(w + 1 for *_, w in short)
        if room >= min(wanted, 17):
            break
    missing = section.depth - shown
    note = f"({missing} more c_i in a wider terminal or with --format csv)" if missing else ""
    return _Layout(label=max(min(room, wanted), 12), measures=short, narrow=True, note=note)


def render(table: Any, form: str) -> str:
    """Return the acceptance table as text.

    Args:
        table: from :func:`specbench.results.aggregate.acceptance_table`.
        form: ``md`` and ``html`` for people, ``csv`` and ``json`` with every column for programs.

    Raises:
        UserError: the form is unknown.
    """
    forms: dict[str, Callable[[Any], str]] = {"md": _markdown, "csv": _csv, "json": _json, "html": _html}
    if form not in forms:
        raise unknown_name("format", form, forms)
    return forms[form](table)


def _num_keys(table: Any) -> int:
    return int(table.column_names.index("accepted_per_round"))


def _steps(table: Any) -> list[int]:
    return [int(c[2:]) for c in table.column_names if c.startswith("c_") and c[2:].isdigit()]


def _measures(depth: int, intervals: bool = False, accuracy: bool = False) -> list[tuple[str, str]]:
    """Return (full header, short header) of the numeric columns."""
    return [
        ("accepted_per_round", "acc/r"),
        *([("accepted 95 %", "acc/r 95 %")] if intervals else []),
        ("tokens_per_round", "tok/r"),
        ("retention", "kept"),
        *([("retention 95 %", "kept 95 %")] if intervals else []),
        *([("accuracy", "score"), ("accuracy_retention", "held")] if accuracy else []),
        *((f"c_{i}", f"c{i}") for i in range(1, depth + 1)),
        ("rounds", "rounds"),
        ("prompts", "#pr"),
    ]


def _cell(row: dict[str, Any], name: str, narrow: bool = False) -> str:
    """Format one measure of a row; an interval comes from two columns."""
    if not name.endswith(" 95 %"):
        return _number(row[name], name, narrow)
    measure = name.removesuffix(" 95 %")
    low, high = row[f"{measure}_low"], row[f"{measure}_high"]
    digits = 3 if measure == "retention" and not narrow else 2
    return "–" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float | None, name: str, narrow: bool = False) -> str:
    """Format one measure; a dash stands for what does not exist."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if name in ("rounds", "prompts"):
        return f"{value:.0f}"
    if name.startswith("c_") and narrow:
        return f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0"
    thousandths = name.startswith("c_") or (
        name in ("retention", "accuracy_retention", "accuracy") and not narrow
    )
    return f"{value:.3f}" if thousandths else f"{value:.2f}"


def _sheet(section: _Section) -> Sheet:
    measures = [name for name, _ in _measures(section.depth, section.intervals, section.accuracy)]
    return Sheet(
        title=section.title,
        headers=(*section.keys, *measures),
        rows=tuple(
            (*(plain(row[k]) for k in section.keys), *(_cell(row, m) for m in measures))
            for row in section.rows
        ),
        num_labels=len(section.keys),
    )


def _markdown(table: Any) -> str:
    return "\n".join([*(_sheet(s).markdown() for s in sections(table)), legend(table), ""])


def _csv(table: Any) -> str:
    return csv_text(table.column_names, [list(row.values()) for row in table.to_pylist()])


def _json(table: Any) -> str:
    return json_text({"legend": legend(table), "rows": table.to_pylist()})


def _html(table: Any) -> str:
    return "".join([*(_sheet(s).html() for s in sections(table)), f"<p>{html.escape(legend(table))}</p>\n"])
