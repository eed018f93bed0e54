"""The split of a drop, against rates computed by hand."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.results.attribution import attribution, render
from specbench.results.robustness import render as render_scores
from specbench.results.robustness import robustness
from specbench.results.store import RunStore


@pytest.fixture
def run(tmp_path: Path, synthetic: SimpleNamespace) -> Path:
    """Clean 4 a round, 3 on the same answer under the condition, 1 on the answer the target gives there."""
    counts = {"template/regular": [[4, 4], [4]], "text/caps": [[1, 1], [1]], "text/typos": [[2, 2], [2]]}
    path = synthetic.whole_run(tmp_path, RunStore, {c: {"ngram": p} for c, p in counts.items()}, k=5)
    with RunStore(path) as store:
        for prompt in (0, 1):
            rows = synthetic.work(
                [3],
                k=5,
                condition="text/caps",
                family="text",
                answer_path="forced",
                prompt_id=f"toy/{prompt}",
            )
            store.write(**rows)
    return Path(path)


def test_the_parts_add_up_to_the_drop(run: Path) -> None:
    (found,) = attribution(run)  # text/typos has no forced answer
    assert found.keys["condition"] == "text/caps" and found.family == "text"
    assert (found.clean, found.forced, found.free) == (4.0, 3.0, 1.0)
    assert (found.drop.value, found.drafter_part.value, found.target_part.value) == (3.0, 1.0, 2.0)
    # every prompt shows the same, so resampling them changes nothing
    assert (found.drafter_part.low, found.drafter_part.high) == (1.0, 1.0)
    assert found.num_prompts == 2


def test_every_form_holds_the_parts(run: Path) -> None:
    parts = attribution(run)
    for form in ("text", "md", "html"):
        page = render(parts, form).replace("\\", "")
        for cell in ("text/caps", "+3.00", "+1.00", "+2.00", "drafter part"):
            assert cell in page, (form, cell)
    (record,) = json.loads(render(parts, "json"))
    (row,) = csv.DictReader(render(parts, "csv").splitlines())
    assert record["target_part"] == float(row["target_part"]) == 2.0


def test_both_paths_of_a_drafter_share_a_table(run: Path) -> None:
    page = render_scores(robustness(run), "text", 200)
    assert page.count("robustness") == 1
    assert "free mean" in page and "forced worst condition" in page


def test_a_run_of_many_conditions_ends_in_its_families(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("specbench.cli.run")
    command._print_results(run)
    whole = capsys.readouterr().out
    monkeypatch.setattr(command, "_MANY_CONDITIONS", 2)
    command._print_results(run)
    short = capsys.readouterr().out
    assert "text/typos" in whole and "text/typos" not in short  # the family's worst is text/caps
    assert "whose loss is it?" in whole and "whose loss is it?" not in short
    for page in (whole, short):
        assert "template/regular" in page and "text/caps" in page and "robustness" in page
    assert "3 conditions: shown are the clean one and the families" in short
    assert short.count("specbench report") == 2
