"""Accuracy and what a condition keeps of it, computed by hand, and shown beside acceptance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.results.accuracy import accuracy_rows, write_scores
from specbench.results.aggregate import acceptance_table, write_acceptance
from specbench.results.robustness import render, robustness
from specbench.results.schema import arrow_schema, schema_text
from specbench.results.store import RunStore
from specbench.results.tables import legend
from specbench.results.tables import render as render_table

KEYS: dict[str, Any] = {
    "run_id": "r1",
    "suite": "toy",
    "condition": "template/regular",
    "family": "template",
    "answer_path": "free",
    "task": "gsm8k",
    "version": "3.0",
    "filter": "flexible-extract",
    "metric": "exact_match",
}


def scored(
    values: dict[int, float | None], total: float | None = None, primary: bool = True, **changes: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Scores of prompts toy/N, and their total; the mean where none is given."""
    keys = {**KEYS, **changes}
    rows = [
        {
            **keys,
            "primary": primary,
            "prompt_id": f"{keys['suite']}/{p}",
            "turn": 0,
            "num_fewshot": None,
            "fewshot_seed": None,
            "value": value,
            "text": "18",
        }
        for p, value in values.items()
    ]
    mean = total if total is not None else sum(v or 0 for v in values.values()) / len(values)
    return rows, [{**keys, "primary": primary, "higher_is_better": True, "total": mean}]


def joined(*parts: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> tuple[Any, Any]:
    return [row for rows, _ in parts for row in rows], [row for _, totals in parts for row in totals]


CAPS = {"condition": "text/caps", "family": "text"}


def test_retention_is_over_the_prompts_of_both() -> None:
    # clean 3 of 4; caps 1 of the 3 prompts it has, of which clean got 2
    scores, totals = joined(scored({0: 1, 1: 1, 2: 0, 3: 1}), scored({0: 1, 1: 0, 2: 0}, **CAPS))
    clean, caps = accuracy_rows(scores, totals)
    assert clean["accuracy"] == 0.75 and clean["accuracy_retention"] is None and clean["scored"] == 4
    assert clean["accuracy_low"] <= 0.75 <= clean["accuracy_high"]
    assert caps["accuracy"] == pytest.approx(1 / 3)
    assert caps["accuracy_retention"] == pytest.approx(1 / 2)
    assert caps["accuracy_retention_low"] <= 0.5 <= caps["accuracy_retention_high"]


def test_a_metric_over_many_answers_has_a_ratio_and_no_interval() -> None:
    scores, totals = joined(
        scored({0: None, 1: None}, total=40.0), scored({0: None, 1: None}, total=30.0, **CAPS)
    )
    clean, caps = accuracy_rows(scores, totals)
    assert clean["accuracy"] == 40.0 and clean["accuracy_low"] is None
    assert caps["accuracy_retention"] == 0.75 and caps["accuracy_retention_low"] is None


def test_nothing_right_under_the_clean_condition_keeps_nothing_to_speak_of() -> None:
    scores, totals = joined(scored({0: 0, 1: 0}), scored({0: 1, 1: 0}, **CAPS))
    assert accuracy_rows(scores, totals)[1]["accuracy_retention"] is None


def test_several_suites_are_pooled_by_prompt() -> None:
    scores, totals = joined(
        scored({0: 1, 1: 1, 2: 0}),
        scored({0: 0}, suite="other", task="mbpp"),
        scored({0: 1, 1: 1, 2: 1}, primary=False, filter="strict-match"),
    )
    pooled = [row for row in accuracy_rows(scores, totals) if row["suite"] == "all"]
    assert len(pooled) == 1
    assert pooled[0]["accuracy"] == 0.5 and pooled[0]["scored"] == 4 and pooled[0]["task"] == "several"


@pytest.fixture
def run(tmp_path: Path, synthetic: SimpleNamespace) -> Path:
    counts = {
        "template/regular": {"ngram": [[4, 4], [4], [4]]},
        "text/caps": {"ngram": [[2, 2], [2], [2]]},
        "text/typos": {"ngram": [[4, 4], [4], [4]]},
    }
    path: Path = synthetic.whole_run(tmp_path / "run", RunStore, counts)
    scores, totals = joined(scored({0: 1, 1: 1, 2: 0}), scored({0: 1, 1: 0, 2: 0}, **CAPS))
    write_scores(path, scores, totals)
    return path


def test_the_files_are_of_their_schema(run: Path) -> None:
    for name, rows in (("scores", 6), ("accuracy", 2)):
        table = pq.read_table(run / f"{name}.parquet")
        assert table.schema.equals(arrow_schema(name), check_metadata=True) and table.num_rows == rows
        assert f"{name}.parquet" in schema_text()
    write_scores(run, [], [])
    assert not (run / "scores.parquet").exists()


def test_accuracy_stands_beside_acceptance(run: Path) -> None:
    table = pq.read_table(write_acceptance(run, draws=50))
    rows = {r["condition"]: r for r in table.to_pylist() if r["suite"] == "toy"}
    assert rows["template/regular"]["accuracy"] == pytest.approx(2 / 3)
    assert rows["text/caps"]["accuracy"] == pytest.approx(1 / 3)
    assert rows["text/caps"]["accuracy_retention"] == pytest.approx(0.5)
    assert rows["text/caps"]["retention"] == pytest.approx(0.5)
    assert rows["text/typos"]["accuracy"] is None
    assert "accuracy_retention" in legend(table)
    page = render_table(table, "md").replace("\\", "")
    assert "| accuracy | accuracy_retention |" in page and "0.333 | 0.500" in page
    # grouped by something that scores do not know
    assert "accuracy" not in acceptance_table(run, by=("suite", "category", "condition")).column_names


def test_runs_that_were_not_scored_look_as_before(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    path = synthetic.whole_run(tmp_path / "bare", RunStore, {"template/regular": {"ngram": [[1], [2]]}})
    table = acceptance_table(path)
    assert "accuracy" not in table.column_names and "accuracy" not in legend(table)


def test_two_runs_keep_their_own_accuracy(run: Path, tmp_path: Path, synthetic: SimpleNamespace) -> None:
    other = synthetic.whole_run(tmp_path / "other", RunStore, {"template/regular": {"ngram": [[1], [2]]}})
    write_scores(other, *scored({0: 0, 1: 1}))
    rows = acceptance_table([run, other], by=("run_id", "suite", "condition", "drafter")).to_pylist()
    clean = {
        r["run_id"]: r["accuracy"]
        for r in rows
        if r["condition"] == "template/regular" and r["suite"] == "toy"
    }
    assert clean == {"run": pytest.approx(2 / 3), "other": 0.5}


def test_the_robustness_report_has_both_retentions(run: Path) -> None:
    (score,) = robustness(run, draws=50)
    assert score.accuracy["text/caps"].retention == pytest.approx(0.5)
    text = render([score], "text")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["text/caps"][1:4] == ["0.500", "0.333", "0.500"]
    assert lines["text/typos"][1:4] == ["1.000", "–", "–"]
    assert lines["template/regular"][1:4] == ["1.000", "0.667", "1.000"]
    assert '"accuracy": 0.3333' in render([score], "json")
    assert "accuracy" not in render([score], "csv").splitlines()[0]


def test_a_broken_file_is_named(run: Path) -> None:
    (run / "accuracy.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="accuracy.parquet cannot be read.*score the run again"):
        acceptance_table(run)
