"""The commands over finished runs: what they print, what they refuse, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.cli import main
from specbench.results.schema import ACCEPTANCE_DOCS
from specbench.results.store import RunStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, synthetic: SimpleNamespace) -> Path:
    counts = {
        "template/regular": {"a": [[4, 0, 2], [3, 1], [2, 2]], "b": [[0, 2, 2, 1], [1, 3], [1, 3]]},
        "text/caps": {"a": [[2, 0, 2], [3, 1], [1, 1]], "b": [[0, 1, 0, 1, 0], [1, 3], [2, 0]]},
    }
    path: Path = synthetic.whole_run(tmp_path_factory.mktemp("runs") / "run", RunStore, counts)
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_report_prints_the_table_in_every_form(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "report", run, "--draws", 200)
    assert code == 0 and "tokens_per_round" in text and "text/caps" in text
    _, page, _ = call(capsys, "report", run, "--draws", 200, "--format", "html")
    assert page.startswith("<!doctype html>") and page.count("<table>") == 1
    _, table, _ = call(capsys, "report", run, "--draws", 0, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(table)))
    assert {r["suite"] for r in rows} == {"toy", "all"} and "accepted_low" not in rows[0]
    _, record, _ = call(capsys, "report", run, "--draws", 200, "--format", "json")
    measured = set(json.loads(record)["rows"][0]) - {"run_id", "suite", "condition", "answer_path", "target"}
    documented = {name.replace("_i", f"_{i}") for name in ACCEPTANCE_DOCS for i in range(1, 5)}
    keys = {"drafter", "runner", "sampler", "temperature", "k", "family", "severity", "drafter_kind"}
    assert measured - keys <= documented


def test_report_groups_as_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, by, _ = call(capsys, "report", run, "--by", "category,turn", "--format", "csv", "--draws", 0)
    assert {"category", "turn"} <= set(by.splitlines()[0].split(","))
    _, pooled, _ = call(capsys, "report", run, "--pool", "suite,condition", "--format", "csv", "--draws", 0)
    assert len(pooled.splitlines()) == 3 and "condition" not in pooled.splitlines()[0]
    code, _, error = call(capsys, "report", run, "--by", "colour")
    assert code == 2 and "cannot be grouped by 'colour'" in error
    code, _, error = call(capsys, "report", run, "--pool", "conditions")
    assert code == 2 and "did you mean 'condition'" in error


def test_report_draws_and_scores(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = call(
        capsys,
        "report",
        run,
        "--robustness",
        "--draws",
        100,
        "--plots",
        tmp_path / "figures",
        "--figure-format",
        "png",
    )
    assert code == 0 and "robustness" in text and "½ worst" in text.replace("\n", " ")
    assert len(list((tmp_path / "figures").glob("*.png"))) == 3 and "figures" in error
    code, _, error = call(capsys, "report", run, run, "--plots", tmp_path)
    assert code == 2 and "one run" in error


def test_compare_pairs_and_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "compare", run, "--draws", 200)
    assert code == 0 and text.count("→") == 2 and "Holm" in text
    _, one, _ = call(capsys, "compare", run, "--draws", 200, "--condition", "text/caps", "--effect", 50)
    assert one.count("→") == 1 and "50 %" in one
    _, conditions, _ = call(capsys, "compare", run, "--pair", "condition", "--draws", 200, "--format", "csv")
    assert [r["right"] for r in csv.DictReader(io.StringIO(conditions))] == ["text/caps", "text/caps"]
    _, page, _ = call(capsys, "compare", run, "--draws", 200, "--format", "html")
    assert page.startswith("<!doctype html>")
    _, ranks, _ = call(capsys, "compare", run, "--budget", "drafts", "--draws", 200)
    assert "budget drafts" in ranks and "suite all" in ranks
    code, _, error = call(capsys, "compare", run, "--suite", "mtbench")
    assert code == 2 and "unknown suite 'mtbench'" in error


def test_from_run_to_site(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = call(capsys, "submit", run, "--out", tmp_path / "entries" / "mine")
    assert code == 0 and "a, b" in said and "checked" in said
    (tmp_path / "entries" / "bad").mkdir()
    site = ("leaderboard", tmp_path / "entries", "--out", tmp_path / "site", "--draws", 100)
    code, said, error = call(capsys, *site)
    assert code == 0 and "1 entries, 1 refused" in said and "entry bad is refused" in error
    assert (tmp_path / "site" / "index.html").is_file()
    code, _, _ = call(capsys, *site, "--strict", "--with-entries")
    assert code == 1 and len(list((tmp_path / "site" / "entries").glob("*/rounds/*.parquet"))) == 1


def test_schema_prints_and_migrates(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = call(capsys, "schema")
    assert "accepted_per_round" in text and "engine_accepted" in text and "retention_detectable" in text
    _, said, _ = call(capsys, "schema", "--migrate", run)
    assert said == f"0 files of {run} rewritten\n"


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_folder_that_is_no_run(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = call(capsys, command, tmp_path)
    assert code == 2 and out == "" and error.count("\n") == 1 and "is not a run directory" in error
