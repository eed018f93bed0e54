"""Published formats: the real files where they are, hand-made rows of the same shape, and the hub's field names."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from specbench.benchmarks import catalogue
from specbench.benchmarks.published import PublishedSuite
from specbench.benchmarks.resolve import load_suite
from specbench.errors import SpecbenchWarning, UserError
from specbench.types import Prompt, SuiteRequest

SIZES = {
    "mtbench": (80, 8),
    "gsm8k": (1319, 1),
    "humaneval": (164, 1),
    "mbpp": (427, 1),
    "math500": (500, 1),
    "alpaca": (80, 1),
    "eagle-sum": (80, 1),
    "eagle-qa": (80, 1),
    "specbench480": (480, 6),
}
SUITES = [value for value in vars(catalogue).values() if isinstance(value, PublishedSuite)]
FORTY_HEX = re.compile(r"[0-9a-f]{40}")


@pytest.mark.data
@pytest.mark.parametrize("name", SIZES)
def test_real_files(data_dir: Path, name: str) -> None:
    size, categories = SIZES[name]
    suite = load_suite(name)
    prompts = suite.load(SuiteRequest(data_dir=data_dir))
    assert len(prompts) == size
    assert len({prompt.id for prompt in prompts}) == size
    assert all(prompt.suite == name and prompt.id.startswith(f"{name}/") for prompt in prompts)
    assert len({prompt.category for prompt in prompts}) == categories
    assert {prompt.meta["source"] for prompt in prompts} <= set(suite.info.files)
    few = suite.load(SuiteRequest(data_dir=data_dir, limit=8))
    assert len(few) == 8 and len({prompt.category for prompt in few}) == categories
    assert few == [prompt for prompt in prompts if prompt in few]


@pytest.mark.data
def test_real_texts_are_kept_verbatim(data_dir: Path) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data_dir / name).read_text().split("\n") if line]

    def load(name: str) -> list[Prompt]:
        return load_suite(name).load(SuiteRequest(data_dir=data_dir))

    mtbench = load("mtbench")
    assert [list(p.turns) for p in mtbench] == [row["turns"] for row in rows("mt_bench.jsonl")]
    assert all(len(p.turns) == 2 for p in mtbench)
    assert [p.turns[0] for p in load("gsm8k")] == [row["question"] for row in rows("gsm8k_test.jsonl")]
    assert [p.turns[0] for p in load("math500")] == [row["question"] for row in rows("math500.jsonl")]
    code = [
        json.loads(line)
        for line in gzip.decompress((data_dir / "HumanEval.jsonl.gz").read_bytes()).splitlines()
    ]
    for prompt, row in zip(load("humaneval"), code, strict=True):
        assert row["prompt"] in prompt.turns[0]
        assert json.loads(prompt.meta["scoring"])["test"] == row["test"]
    tasks = json.loads((data_dir / "sanitized-mbpp.json").read_text())
    for prompt, row in zip(load("mbpp"), tasks, strict=True):
        assert row["prompt"] in prompt.turns[0]
        assert all(test in prompt.turns[0] for test in row["test_list"])


@pytest.mark.data
def test_real_humaneval_and_mbpp_references_pass_their_own_tests(data_dir: Path) -> None:
    # The published solutions, run with what `meta` keeps for scoring: the record is enough to score an answer.
    for prompt in load_suite("humaneval").load(SuiteRequest(data_dir=data_dir, limit=20)):
        scoring, space = json.loads(prompt.meta["scoring"]), {}
        exec(scoring["prompt"] + str(prompt.reference) + scoring["test"], space)
        space["check"](space[scoring["entry_point"]])
    for prompt in load_suite("mbpp").load(SuiteRequest(data_dir=data_dir, limit=20)):
        scoring, space = json.loads(prompt.meta["scoring"]), {}
        exec("\n".join([*scoring["test_imports"], str(prompt.reference), *scoring["test_list"]]), space)


@pytest.mark.data
def test_real_final_answers(data_dir: Path) -> None:
    gsm8k = load_suite("gsm8k").load(SuiteRequest(data_dir=data_dir))
    assert gsm8k[0].reference == "18" and gsm8k[1].reference == "3"
    assert all(re.fullmatch(r"-?[\d,]+", str(prompt.reference)) for prompt in gsm8k)
    math500 = load_suite("math500").load(SuiteRequest(data_dir=data_dir))
    assert math500[3].reference == "9"
    assert not any("The answer is" in str(prompt.reference) for prompt in math500)


HUMANEVAL_ROW = {
    "task_id": "HumanEval/7",
    "prompt": "def f(x):\n",
    "entry_point": "f",
    "canonical_solution": "    return x\n",
    "test": "def check(c):\n    assert c(1) == 1\n",
}
MBPP_ROW = {
    "task_id": 11,
    "prompt": "Write a function f.",
    "code": "def f(): pass",
    "test_imports": ["import math"],
    "test_list": ["assert f() is None"],
}


def put(folder: Path, name: str, *rows: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        json.dumps(list(rows)) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    )
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def load_few(suite: PublishedSuite, folder: Path | None) -> list[Prompt]:
    with pytest.warns(SpecbenchWarning, match="download it again"):
        return suite.load(SuiteRequest(data_dir=folder))


def test_humaneval_prompt_by_hand(tmp_path: Path) -> None:
    put(tmp_path, "HumanEval.jsonl.gz", HUMANEVAL_ROW)
    (prompt,) = load_few(catalogue.HUMANEVAL, tmp_path)
    assert prompt.id == "humaneval/7"
    assert prompt.turns == (catalogue.HUMANEVAL_INSTRUCTION + "\n\n```python\ndef f(x):\n```",)
    assert prompt.reference == "    return x\n"


def test_mbpp_prompt_by_hand(tmp_path: Path) -> None:
    put(tmp_path, "sanitized-mbpp.json", MBPP_ROW)
    (prompt,) = load_few(catalogue.MBPP, tmp_path)
    assert prompt.id == "mbpp/11"
    assert prompt.turns[0].endswith("```python\nimport math\nassert f() is None\n```")
    assert prompt.turns[0].startswith(catalogue.MBPP_INSTRUCTION + "\n\nWrite a function f.\n")


def test_references_of_questions_by_hand(tmp_path: Path) -> None:
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["a"]},
        {"question_id": 2, "category": "math", "turns": ["b", "c"], "reference": ["first", "second"]},
        {"question_id": 3, "category": "rag", "turns": ["d"], "reference": [["one", "other"]]},
        {"question_id": 4, "category": "qa", "turns": ["e"], "reference": "alone"},
    ]
    put(tmp_path, "spec_bench.jsonl", *rows)
    prompts = load_few(catalogue.SPECBENCH480, tmp_path)
    assert [p.reference for p in prompts] == [None, "first", "one", "alone"]
    assert [p.category for p in prompts] == ["mt_bench", "mt_bench", "rag", "qa"]
    assert [p.meta["published_category"] for p in prompts] == ["writing", "math", "rag", "qa"]
    assert json.loads(prompts[1].meta["references"]) == ["first", "second"]
    assert json.loads(prompts[2].meta["references"]) == [["one", "other"]]


def test_files_are_looked_for_in_the_published_folders_too(tmp_path: Path) -> None:
    put(tmp_path, "mt_bench/question.jsonl", {"question_id": 81, "category": "writing", "turns": ["a", "b"]})
    (prompt,) = load_few(catalogue.MTBENCH, tmp_path)
    assert (prompt.id, prompt.meta["source"]) == ("mtbench/81", "mt_bench/question.jsonl")


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("suite", "file", "row", "words"),
    [
        (catalogue.MTBENCH, "mt_bench.jsonl", {"category": "x"}, "'turns' or 'prompt'"),
        (catalogue.MTBENCH, "mt_bench.jsonl", {"turns": ["a", ""]}, "list of non-empty strings"),
        (catalogue.MTBENCH, "mt_bench.jsonl", {"turns": ["a"], "category": 3}, "'category' to be a string"),
        (catalogue.GSM8K, "gsm8k_test.jsonl", {"question": "q", "answer": "18"}, "end in '#### number'"),
        (catalogue.GSM8K, "gsm8k_test.jsonl", {"answer": "#### 1"}, "'question'"),
        (catalogue.MATH500, "math500.jsonl", {"answer": "1"}, "'question' or 'problem'"),
        (catalogue.HUMANEVAL, "HumanEval.jsonl", without(HUMANEVAL_ROW, "test"), "'test'"),
        (catalogue.MBPP, "sanitized-mbpp.json", without(MBPP_ROW, "test_imports"), "sanitised MBPP"),
        (catalogue.MBPP, "sanitized-mbpp.json", {**MBPP_ROW, "test_list": []}, "'test_list'"),
    ],
)
def test_malformed_rows(
    tmp_path: Path, suite: PublishedSuite, file: str, row: dict[str, Any], words: str
) -> None:
    put(tmp_path, file, row)
    with pytest.raises(UserError) as caught:
        suite.load(SuiteRequest(data_dir=tmp_path))
    assert re.search(rf"{re.escape(file)}, (line|item) 1: expected ", str(caught.value))
    assert words in str(caught.value)


def test_ids_used_twice(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["a"]}
    put(tmp_path, "mt_bench.jsonl", row, row)
    with pytest.raises(UserError, match="line 2: the id 'mtbench/81' was already used by .*line 1"):
        catalogue.MTBENCH.load(SuiteRequest(data_dir=tmp_path))


class Hub:
    """Stands in for ``datasets.load_dataset``: local data sets of the hub's shape, and the calls that were made."""

    def __init__(self, **splits: list[dict[str, Any]]) -> None:
        self.splits = splits
        self.calls: list[tuple[Any, ...]] = []

    def __call__(
        self, path: str, name: str | None, *, split: str, revision: str, data_files: str | None
    ) -> datasets.Dataset:
        self.calls.append((path, name, split, revision, data_files))
        return datasets.Dataset.from_list(self.splits[split])


def through_hub(monkeypatch: pytest.MonkeyPatch, suite: PublishedSuite, hub: Hub) -> list[Prompt]:
    monkeypatch.setattr(datasets, "load_dataset", hub)
    prompts = load_few(suite, None)
    assert suite.hub is not None
    for path, name, _, revision, data_files in hub.calls:
        assert (path, revision) == (suite.info.hub, suite.info.revision)
        assert (name, data_files) == (suite.hub.config, suite.hub.data_file)
    assert {p.meta["source"] for p in prompts} == {f"{suite.info.hub}@{suite.info.revision}"}
    return prompts


def test_hub_mtbench(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": ["a", "b"], "category": "math", "prompt_id": 12345678, "reference": ["r", ""]}
    other = {**row, "prompt": ["c", "d"], "reference": []}
    first, second = through_hub(monkeypatch, catalogue.MTBENCH, Hub(train=[row, other]))
    # The copy replaced the published ids with hashes and kept the order: ids start at 81 as published.
    assert (first.id, first.turns, first.reference, first.category) == ("mtbench/81", ("a", "b"), "r", "math")
    assert (second.id, second.reference) == ("mtbench/82", None)


def test_hub_math500_ends_as_the_published_file_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub_row = {
        "problem": "What is 1+1?",
        "solution": "It is $\\boxed{2}$.",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    }
    put(
        tmp_path,
        "math500.jsonl",
        {"question": "What is 1+1?", "answer": "It is $\\boxed{2}$.The answer is: 2"},
    )
    (local,) = load_few(catalogue.MATH500, tmp_path)
    (remote,) = through_hub(monkeypatch, catalogue.MATH500, Hub(test=[hub_row]))
    assert (local.id, local.turns, local.reference) == (remote.id, remote.turns, remote.reference)
    assert local.meta["solution"] == remote.meta["solution"] == "It is $\\boxed{2}$."
    assert (remote.meta["subject"], remote.meta["level"]) == ("Algebra", "1")


def test_hub_gsm8k_and_humaneval(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = through_hub(
        monkeypatch, catalogue.GSM8K, Hub(test=[{"question": "q", "answer": "so\n#### 1,234"}])
    )
    assert (prompt.turns, prompt.reference) == (("q",), "1,234")
    (prompt,) = through_hub(monkeypatch, catalogue.HUMANEVAL, Hub(test=[HUMANEVAL_ROW]))
    assert prompt.id == "humaneval/7"


def test_hub_mbpp_restores_the_published_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(number: int) -> dict[str, Any]:
        return {**MBPP_ROW, "task_id": number, "source_file": "x"}

    hub = Hub(train=[row(602)], test=[row(11), row(14)], validation=[row(511)], prompt=[row(2)])
    prompts = through_hub(monkeypatch, catalogue.MBPP, hub)
    assert [p.id for p in prompts] == ["mbpp/2", "mbpp/11", "mbpp/14", "mbpp/511", "mbpp/602"]


def test_hub_eagle_sets_have_one_prompt_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question_id": 400, "category": "qa", "prompt": "who?"}, {"category": "qa", "prompt": "what?"}]
    prompts = through_hub(monkeypatch, catalogue.EAGLE_QA, Hub(train=rows))
    assert [(p.id, p.turns) for p in prompts] == [("eagle-qa/400", ("who?",)), ("eagle-qa/322", ("what?",))]


def test_hub_row_errors_name_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset", Hub(test=[{"question": "q", "answer": "#### 1"}, {"question": "q"}])
    )
    with pytest.raises(UserError, match=r"openai/gsm8k, row 2: expected a field 'answer'"):
        catalogue.GSM8K.load(SuiteRequest())


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.info.name)
def test_revisions_are_commits(suite: PublishedSuite) -> None:
    if suite.hub is None:
        assert suite.info.hub is None and suite.info.revision is None
    else:
        assert FORTY_HEX.fullmatch(suite.hub.revision)
        assert (suite.info.hub, suite.info.revision) == (suite.hub.dataset, suite.hub.revision)


def test_data_directory_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(tmp_path, "gsm8k_test.jsonl", {"question": "q", "answer": "#### 1"})
    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub)
    load_few(catalogue.GSM8K, tmp_path)
    assert hub.calls == []


def unreachable(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("Couldn't reach the Hub\nmore lines")


def message(suite: PublishedSuite, data_dir: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        suite.load(SuiteRequest(data_dir=data_dir))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_sentence_when_nothing_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    text = message(catalogue.GSM8K, tmp_path)
    for part in (
        "gsm8k_test.jsonl",
        str(tmp_path),
        "openai/gsm8k",
        "Couldn't reach",
        "login",
        "SPECBENCH_DATA",
    ):
        assert part in text
    assert "no data directory was given" in message(catalogue.GSM8K, None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in message(catalogue.GSM8K, None)


def test_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'specbench[hub]'" in message(catalogue.MTBENCH, None)


def test_set_without_a_hub_copy(tmp_path: Path) -> None:
    text = message(catalogue.SPECBENCH480, tmp_path)
    assert "spec_bench.jsonl" in text and "github.com/hemingkx/Spec-Bench" in text


def test_data_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist; check --data-dir or SPECBENCH_DATA" in message(catalogue.GSM8K, tmp_path / "typo")
