"""A run over tasks of lm-eval from end to end: scored, with what cannot be run named and left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from specbench.benchmarks import lm_eval_tasks
from specbench.cli import main
from specbench.config import RunConfig
from specbench.errors import UserError

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'specbench[lm-eval]'")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lm_eval_tasks._load.cache_clear()


def write_task(folder: Path, name: str, **changes: Any) -> str:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": f"{n}+{n}=", "a": str(2 * n)}) + "\n" for n in range(12)))
    settings = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "generate_until",
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{q}}",
        # any answer of a random model has a letter or a sign, so that the score is one of both kinds
        "doc_to_target": "1",
        "num_fewshot": 1,
        "generation_kwargs": {"until": ["never said"], "max_gen_toks": 12},
        "filter_list": [
            {
                "name": "signs",
                "filter": [
                    {"function": "regex", "regex_pattern": "([a-zA-Z])", "fallback": "0"},
                    {"function": "map", "mapping_dict": {"0": "0"}, "default_value": "1"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 7},
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return f"lm-eval:{path}"


def test_a_scored_run(tmp_path: Path, tiny_target_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_task(tmp_path, "good")
    long = write_task(tmp_path, "long", doc_to_text="{{q}}" + "x" * 600)
    other = write_task(tmp_path, "other", output_type="multiple_choice", doc_to_choice=["1"])
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        main(
            ["run", "--suite", f"{good},{long},{other},lm-eval:{tmp_path}/gone.yaml", "--limit", "3"]
            + ["--perturb", "template/no_bos", "--target", str(tiny_target_path), "--drafter", "ngram"]
            + ["--depth", "2", "--device", "cpu", "--score", "--out", str(out)]
        )
    shown = capsys.readouterr()
    assert stop.value.code == 2
    ends = [line for line in shown.err.splitlines() if line.startswith("specbench: ")]
    assert len(ends) == 3
    assert "gone.yaml; check the spelling" in shown.err
    assert "other.yaml asks for multiple_choice" in shown.err
    assert "lm-eval:long: with 1 few-shot examples its longest prompt has" in shown.err
    plain = " ".join(shown.out.split())
    assert "lm-eval:good: 6 of 6 answers met neither a stop token nor 'never said'" in plain
    assert " score held " in plain and "accuracy_retention (held)" in plain

    scores = pq.read_table(out / "scores.parquet").to_pylist()
    assert len(scores) == 6
    assert {(s["suite"], s["task"], s["version"], s["num_fewshot"], s["fewshot_seed"]) for s in scores} == {
        ("lm-eval:good", "good", "7", 1, 1234)
    }
    for row in scores:
        assert row["value"] == float(any(c.isascii() and c.isalpha() for c in row["text"]))
    table = pq.read_table(out / "acceptance.parquet").to_pylist()
    clean = [r["accuracy"] for r in table if r["condition"] == "template/regular" and r["suite"] != "all"]
    mine = [s["value"] for s in scores if s["condition"] == "template/regular"]
    assert clean == [pytest.approx(sum(mine) / 3)]
    (answers,) = (out / "answers").glob("*.parquet")
    notes = {note for row in pq.read_table(answers).to_pylist() for note in row["notes"]}
    assert "lm-eval task good, version 7, 1 examples, few-shot seed 1234" in notes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_fewshot": -1}, "--num-fewshot must be 0 or more"),
        ({"run_generated_code": True}, "--run-generated-code is for scoring: add --score"),
        ({"score": True, "traces": "pack"}, "--score needs the prompts' own references"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        RunConfig(**options)


def test_scoring_is_no_part_of_what_a_run_measures() -> None:
    plain = RunConfig()
    assert plain.identity() == RunConfig(score=True, run_generated_code=True).identity()
    assert plain.identity() != RunConfig(num_fewshot=0).identity() != RunConfig(num_fewshot=1).identity()


def test_one_bad_task_alone_is_an_error(tmp_path: Path, tiny_target_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--suite", f"lm-eval:{tmp_path}/gone.yaml", "--target", str(tiny_target_path)])
    assert stop.value.code == 2
    assert "there is no task file" in capsys.readouterr().err
