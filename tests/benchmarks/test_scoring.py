"""Scorers agree with the published answers: right ones score, wrong ones do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specbench.benchmarks import lm_eval_tasks
from specbench.benchmarks.catalogue import HUMANEVAL, MBPP
from specbench.benchmarks.resolve import load_suite
from specbench.benchmarks.sandbox import CodeEval
from specbench.benchmarks.scoring import Answer, Scored, code_of, humaneval_program, mbpp_program, scorers
from specbench.errors import UserError
from specbench.types import Prompt, SuiteRequest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'specbench[lm-eval]'")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lm_eval_tasks._load.cache_clear()


def prompt(suite: str, number: int, **changes: Any) -> Prompt:
    return Prompt(id=f"{suite}/{number}", suite=suite, category="c", turns=("?",), **changes)


def values(found: Scored, filter: str) -> list[float | None]:
    return [s.value for s in found.scores if s.filter == filter]


def test_gsm8k_is_lm_evals() -> None:
    prompts = [
        prompt("gsm8k", n, meta={"solution": f"Because.\n#### {v}"})
        for n, v in enumerate(["18", "1,200", "7"])
    ]
    scorer = scorers(["gsm8k", "mtbench"], prompts)["gsm8k"]
    texts = ["16 - 3 = 18 dollars.", "so #### 1200", "I think 8"]
    found = scorer.score([Answer(prompt=p, text=t) for p, t in zip(prompts, texts, strict=True)])
    assert values(found, "flexible-extract") == [1.0, 1.0, 0.0]
    assert values(found, "strict-match") == [0.0, 1.0, 0.0]
    totals = {t.filter: t for t in found.totals}
    assert totals["flexible-extract"].value == pytest.approx(2 / 3) and totals["flexible-extract"].primary
    assert not totals["strict-match"].primary
    assert scorer.task == "gsm8k" and scorer.version == "3.0" and not scorer.runs_code


def test_math500_reads_the_last_box() -> None:
    prompts = [prompt("math500", n, reference=r) for n, r in enumerate(["\\frac{1}{2}", "3", "4"])]
    texts = ["\\boxed{2} no, \\boxed{\\dfrac12}", "it is 3", "\\boxed{5}"]
    scorer = scorers(["math500"], prompts)["math500"]
    found = scorer.score([Answer(prompt=p, text=t) for p, t in zip(prompts, texts, strict=True)])
    assert values(found, "last-boxed") == [1.0, 0.0, 0.0]


def test_code_of_an_answer() -> None:
    assert code_of("Sure:\n```python\nx = 1\n```\nand\n```\ny\n```") == "x = 1\n"
    assert code_of("```\nx = 1\ny = 2") == "x = 1\ny = 2"
    assert code_of("x = 1") == "x = 1"


@pytest.mark.data
def test_published_solutions_pass_and_others_do_not(data_dir: Path) -> None:
    request = SuiteRequest(data_dir=data_dir, limit=3)
    for suite, program in ((HUMANEVAL, humaneval_program), (MBPP, mbpp_program)):
        prompts = suite.load(request)
        scorer = scorers([suite.info.name], prompts)[suite.info.name]
        assert scorer.runs_code
        right = []
        for p in prompts:
            stub = json.loads(p.meta["scoring"]).get("prompt", "")
            right.append(Answer(prompt=p, text=f"Here:\n```python\n{stub}{p.reference}\n```\nDone."))
        with pytest.raises(UserError, match="allow it with --run-generated-code"):
            scorer.score(right)
        wrong = Answer(prompt=prompts[0], text="```python\nprint('I cannot')\n```")
        bare = Answer(prompt=prompts[0], text=prompts[0].reference or "")
        with CodeEval.permitted(True):
            assert [s.value for s in scorer.score([*right, bare, wrong]).scores] == [1.0] * 4 + [0.0]
        assert program(wrong).count("I cannot") == 1


STUB = 'def double(n):\n    """Return twice n."""\n'


@pytest.fixture
def humaneval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """lm-eval's own humaneval_instruct, over a data set of the same shape where `datasets` looks for it."""
    folder = tmp_path / "openai" / "openai_humaneval"
    folder.mkdir(parents=True)
    row = {
        "task_id": "HumanEval/0",
        "prompt": STUB,
        "canonical_solution": "    return 2 * n\n",
        "test": "def check(candidate):\n    assert candidate(4) == 8\n",
        "entry_point": "double",
    }
    (folder / "test.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({**row, "task_id": "HumanEval/1"}) + "\n"
    )
    head = yaml.safe_dump(
        {"configs": [{"config_name": "default", "data_files": [{"split": "test", "path": "test.jsonl"}]}]}
    )
    (folder / "README.md").write_text(f"---\n{head}---\n")
    monkeypatch.chdir(tmp_path)
    return load_suite("lm-eval:humaneval_instruct").load(SuiteRequest())


def test_code_tasks_of_lm_eval_run_here_and_only_when_allowed(humaneval: list[Prompt]) -> None:
    assert humaneval[0].prefill == f"Here is the completed function:\n```python\n{STUB}\n"
    assert "\ndef" in humaneval[0].stop_strings and humaneval[0].max_new_tokens == 1024
    scorer = scorers(["lm-eval:humaneval_instruct"], humaneval)["lm-eval:humaneval_instruct"]
    texts = ["    return n + n\n```\nDone", "    return n * n\n"]
    answers = [Answer(prompt=p, text=t) for p, t in zip(humaneval, texts, strict=True)]
    with pytest.raises(UserError, match="--run-generated-code"):
        scorer.score(answers)
    with CodeEval.permitted(True):
        found = scorer.score(answers)
    assert [s.value for s in found.scores] == [1.0, 0.0] and found.scores[0].metric == "pass@1"
    assert found.totals[0].value == 0.5 and found.totals[0].primary


def test_code_that_cannot_be_confined_is_not_run(
    humaneval: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    (loaded,) = lm_eval_tasks.load_tasks("humaneval_instruct")
    monkeypatch.setitem(loaded.task._metric_fn_list["pass_at_k"].__self__.__globals__, "compute_", object())
    scorer = scorers(["lm-eval:humaneval_instruct"], humaneval)["lm-eval:humaneval_instruct"]
    with CodeEval.permitted(True), pytest.raises(UserError, match="cannot be confined here"):
        scorer.score([Answer(prompt=humaneval[0], text="")])
