"""Small tables as text: Markdown, CSV, HTML, or columns on a terminal. Every cell is escaped here.

Example:
    sheet = Sheet(title="mtbench", headers=("drafter", "acc"), rows=(("ngram", "1.52"),), num_labels=1)
    print(sheet.markdown())
"""

from __future__ import annotations

import csv
import html
import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbench.errors import unknown_name

SEPARATORS = "/+_-=· "
"""Where a long name may be broken, after the character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One table of strings."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int
    """The first columns name the row (left, header cells); the others are values (right)."""
    text_last: bool = False
    """The last column is a sentence, not a number."""

    def markdown(self) -> str:
        """Return a GitHub-flavoured Markdown table under a heading."""
        right = [self.num_labels <= i < len(self.headers) - self.text_last for i in range(len(self.headers))]
        lines = [
            f"### {escape_markdown(self.title)}",
            "",
            _markdown_row([escape_markdown(h) for h in self.headers]),
            _markdown_row(["---:" if r else "---" for r in right]),
            *(_markdown_row([escape_markdown(cell) for cell in row]) for row in self.rows),
            "",
        ]
        return "\n".join(lines)

    def html(self) -> str:
        """Return an HTML table element."""
        head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in self.headers)
        body = []
        for row in self.rows:
            labels = "".join(f'<th scope="row">{html.escape(c)}</th>' for c in row[: self.num_labels])
            values = "".join(f"<td>{html.escape(c)}</td>" for c in row[self.num_labels :])
            body.append(f"<tr>{labels}{values}</tr>")
        parts = [
            f"<table>\n<caption>{html.escape(self.title)}</caption>",
            f"<thead><tr>{head}</tr></thead>\n<tbody>",
            *body,
            "</tbody>\n</table>\n",
        ]
        return "\n".join(parts)

    def text(self, width: int) -> str:
        """Return aligned columns, or one short block a row where these do not fit."""
        columns = list(zip(self.headers, *self.rows, strict=True))
        used = [i for i, column in enumerate(columns) if any(cell not in ("", "–") for cell in column[1:])]
        widths = {i: max(map(len, columns[i])) for i in used}
        if sum(widths.values()) + 2 * len(used) > width:
            return self._blocks(used, width)
        right = [i for i in used if self.num_labels <= i < len(self.headers) - self.text_last]
        lines = ["\n".join(textwrap.wrap(self.title, width))]
        for row in (self.headers, *self.rows):
            cells = [row[i].rjust(widths[i]) if i in right else row[i].ljust(widths[i]) for i in used]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines) + "\n"

    def _blocks(self, used: Sequence[int], width: int) -> str:
        lines = ["\n".join(textwrap.wrap(self.title, width))]
        for row in self.rows:
            lines.append("  ".join(row[i] for i in used if i < self.num_labels))
            values = [f"{self.headers[i]} {row[i]}" for i in used if i >= self.num_labels and row[i]]
            lines += textwrap.wrap("; ".join(values), width, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines) + "\n"


def render_sheets(sheets: Sequence[Sheet], legend: str, form: str, width: int) -> str:
    """Return several tables and their legend as ``text``, ``md`` or ``html``.

    Raises:
        UserError: the form is unknown.
    """
    if form == "text":
        return "\n".join([*(s.text(width) for s in sheets), *textwrap.wrap(legend, width), ""])
    if form == "md":
        return "\n".join([*(s.markdown() for s in sheets), escape_markdown(legend), ""])
    if form == "html":
        return "".join([*(s.html() for s in sheets), f"<p>{html.escape(legend)}</p>\n"])
    raise unknown_name("format", form, ("text", "md", "html", "csv", "json"))


def html_page(title: str, body: str) -> str:
    """Return a whole HTML document around tables."""
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}"
        "table{border-collapse:collapse;margin:1.5rem 0;font-variant-numeric:tabular-nums}"
        "caption{text-align:left;font-weight:600;padding:.3rem 0}th,td{padding:.3rem .6rem;text-align:right;"
        "border-bottom:1px solid #ddd}tbody th{text-align:left;font-weight:400}"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    return "".join("\\" + c if c in "\\|`*_<>[]" else c for c in text).replace("\n", " ")


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def csv_text(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return CSV with a header line; None is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([["" if v is None else v for v in row] for row in rows])
    return out.getvalue()


def json_text(value: Any) -> str:
    """Return indented JSON; NaN is refused, since no other language reads it."""
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def wrap(text: str, width: int) -> list[str]:
    """Break a name into lines of at most ``width``, after a separator where there is one."""
    lines = []
    indent = text[: len(text) - len(text.lstrip())]
    while len(text) > width:
        cuts = (i + 1 for i in range(len(indent) + 1, width) if text[i] in SEPARATORS)
        cut = max(cuts, default=width)
        lines.append(text[:cut])
        text = indent + " " + text[cut:]
    return [*lines, text]


def plain(value: Any) -> str:
    """Return a key's value as people write it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def percent(share: float, digits: int = 1) -> str:
    """Return 0.05 as ``5 %`` and 0.0523 as ``5.2 %``."""
    return f"{100 * share:.{digits}f}".removesuffix("." + "0" * digits) + " %"
