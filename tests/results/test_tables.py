"""Tables for people: nothing cut off at 80 columns, both acceptance lengths told apart, strings escaped."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specbench.errors import UserError
from specbench.results.aggregate import acceptance_table
from specbench.results.store import RunStore
from specbench.results.tables import LEGEND, render, rich_tables

HOSTILE = "<script>alert('|')</script>"


@pytest.fixture
def table(tmp_path: Path, synthetic: SimpleNamespace) -> Any:
    with RunStore(tmp_path) as store:
        for suite in ("mtbench", "gsm8k"):
            for condition in ("template/regular", "template/no_bos_no_template"):
                for drafter in ("ngram", "draft-lm=somebody/A-rather-long-model-name-0.5B"):
                    names = {"suite": suite, "prompt_id": f"{suite}/0", "condition": condition}
                    store.write(**synthetic.work([8, 0, 3, 1], k=8, drafter=drafter, **names))
    return acceptance_table(tmp_path)


def printed(table: Any, width: int) -> str:
    out = io.StringIO()
    console = Console(width=width, file=out, no_color=True)
    for block in rich_tables(table, width):
        console.print(block)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_nothing_is_cut_off(table: Any, width: int) -> None:
    text = printed(table, width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    for name in ("mtbench", "gsm8k", "all suites", "ngram", "A-rather-long-model-name", "k 8", "replay"):
        assert name in text
    (clean, *_) = [line for line in text.splitlines() if line.startswith(" template/regular")]
    values = clean.split()
    assert values[1:3] == ["3.00", "4.00"] and values[-2:] == ["4", "1"]
    assert len(values) == 1 + 3 + 8 + 2


def test_wide_terminals_get_full_names_and_narrow_ones_a_legend(table: Any) -> None:
    assert "accepted_per_round" in printed(table, 200) and "tokens_per_round" in printed(table, 200)
    short = printed(table, 80)
    for header in ("acc/r", "tok/r", "kept", "#pr"):
        assert header in short and header in LEGEND
    assert "acceptance length" not in short


def test_rates_that_do_not_fit_are_announced(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([16, 2], k=16))
    text = printed(acceptance_table(tmp_path), 80)
    assert "more c_i in a wider terminal" in text and "c4" in text and "c16" not in text
    assert "c_16" in printed(acceptance_table(tmp_path), 300)


def test_one_suite_is_printed_once(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([1, 2]))
    assert len(rich_tables(acceptance_table(tmp_path))) == 1


def test_keys_that_vary_are_shown(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    flush = synthetic.work([1, 2])
    flush["rounds"].append(synthetic.rounds([1], k=2))
    with RunStore(tmp_path) as store:
        store.write(**flush)
    text = printed(acceptance_table(tmp_path), 120)
    assert "ngram · k 2" in text and "ngram · k 4" in text


def test_programs_get_every_column(table: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(render(table, "csv"))))
    assert len(rows) == table.num_rows and list(rows[0]) == table.column_names
    assert float(rows[0]["accepted_per_round"]) == 3.0
    parsed = json.loads(render(table, "json"))
    assert parsed["rows"] == table.to_pylist()


def test_names_cannot_break_out_of_markdown_or_html(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([1, 2], drafter=HOSTILE, suite=HOSTILE))
    table = acceptance_table(tmp_path)
    page = render(table, "html")
    assert "<script>" not in page and "&lt;script&gt;" in page
    lines = [line for line in render(table, "md").splitlines() if line.startswith("| ")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "<script>" not in render(table, "md")


def test_an_unknown_format_is_refused(table: Any) -> None:
    with pytest.raises(UserError, match="unknown format 'htm'; did you mean 'html'"):
        render(table, "htm")
