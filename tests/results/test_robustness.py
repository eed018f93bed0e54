"""The robustness score against its formula, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.results.robustness import FORMULA, render, robustness
from specbench.results.store import RunStore

# Accepted per round 4, 2, 3, 5 and 1: retentions 0.5, 0.75, 1.25 (capped at 1) and 0.25.
COUNTS = {
    "template/regular": [[4, 4], [4]],
    "template/no_bos": [[2, 2], [2]],
    "template/none": [[3, 3], [3]],
    "text/caps": [[5, 5], [5]],
    "context/long": [[1, 1], [1]],
}


def test_the_score_by_hand(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {c: {"ngram": p} for c, p in COUNTS.items()}, k=5)
    (found,) = robustness(run)
    template = (0.5 + 0.75) / 2 / 2 + 0.5 / 2
    assert found.score == pytest.approx(100 * (template + 1.0 + 0.25) / 3)
    assert found.low == found.high == found.score
    assert found.families["template"].worst_condition == "template/no_bos"
    assert found.families["template"].mean == 0.625 and found.families["text"].mean == 1.25
    assert found.sensitivity["mean only"] == pytest.approx(100 * (0.625 + 1 + 0.25) / 3)
    assert found.sensitivity["worst only"] == pytest.approx(100 * (0.5 + 1 + 0.25) / 3)
    assert found.sensitivity["without context"] == pytest.approx(100 * (template + 1) / 2)
    assert found.num_prompts == 2 and found.keys["drafter"] == "ngram"


def test_each_condition_keeps_its_own_pairs(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    counts = {
        "template/regular": {"ngram": [[4, 4], [2], [3, 3]]},
        "text/caps": {"ngram": [[2, 2], [2]]},
    }
    run = synthetic.whole_run(tmp_path, RunStore, counts)
    (found,) = robustness(run)
    assert found.families["text"].retentions["text/caps"] == pytest.approx((6 / 3) / (10 / 3))
    assert found.low <= found.score <= found.high


def test_forced_answers_have_a_score_of_their_own(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {c: {"ngram": p} for c, p in COUNTS.items()}, k=5)
    with RunStore(run) as store:
        store.write(**synthetic.work([3], k=5, condition="text/caps", family="text", answer_path="forced"))
    by_path = {s.keys["answer_path"]: s for s in robustness(run)}
    assert by_path["forced"].families["text"].mean == 0.75
    assert by_path["free"].families["text"].mean == 1.25


def test_a_run_of_the_clean_condition_alone_has_no_score(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": {"ngram": [[1], [2]]}})
    assert robustness(run) == []


def test_the_parts_are_never_hidden(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {c: {"ngram": p} for c, p in COUNTS.items()}, k=5)
    scores = robustness(run)
    for form in ("text", "md", "html"):
        page = render(scores, form).replace("\\", "")
        for part in ("template", "context", "0.250", "0.625", "worst only", "without text"):
            assert part in page, (form, part)
    assert "½ worst" in render(scores, "text").replace("\n", " ")
    record = json.loads(render(scores, "json"))
    assert record["formula"] == FORMULA
    assert record["scores"][0]["families"]["template"]["template/no_bos"] == 0.5
    assert "score" in render(scores, "csv").splitlines()[0]
