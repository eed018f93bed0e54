"""The prompts of our own writing: reproducible, and none of them in an evaluation set."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("zoo_prompts", ROOT / "drafters" / "zoo" / "prompts.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_prompts_are_distinct_and_follow_from_the_seed(module: Any) -> None:
    prompts = module.make_prompts(500, seed=1)
    assert len(set(prompts)) == 500
    assert prompts == module.make_prompts(500, seed=1) and prompts != module.make_prompts(500, seed=2)
    assert not [p for p in prompts if "{" in p or "}" in p]


def test_the_second_set_has_second_turns(module: Any) -> None:
    talks = module.make_more(600, seed=1)
    assert len({tuple(talk) for talk in talks}) == 600
    assert talks == module.make_more(600, seed=1) and talks != module.make_more(600, seed=2)
    assert {len(talk) for talk in talks} == {1, 2}
    assert 0.25 < sum(len(talk) == 2 for talk in talks) / 600 < 0.45
    assert not [turn for talk in talks for turn in talk if "{" in turn or "}" in turn or "~" in turn]


def everything(module: Any) -> set[str]:
    """All prompts of both sets that a recipe could draw, as far as 5,000 draws of each show them, and the third leg's."""
    talks = [*module.make_more(5000), *module.make_more(500, seed=1)]
    prompts = [*module.make_prompts(5000), *module.make_prompts(650, seed=1)]
    return {turn.lower() for talk in talks for turn in talk} | {prompt.lower() for prompt in prompts}


def test_another_seed_can_leave_out_what_is_there(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, *arguments: str) -> list[dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["prompts.py", *arguments, "--out", str(tmp_path / name)])
        module.main()
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    first = write("first", "--second", "--count", "300")
    all_of_it = write("all", "--second", "--count", "300", "--seed", "1")
    rest = write("rest", "--second", "--count", "300", "--seed", "1", "--without", str(tmp_path / "first"))
    known = [row["turns"] for row in first]
    assert [row["turns"] for row in rest] == [r["turns"] for r in all_of_it if r["turns"] not in known]
    assert 100 < len(rest) < 300
    # answers of both are read as one file, by id
    assert not {row["id"] for row in first} & {row["id"] for row in rest}


def turns(path: Path) -> set[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {turn.strip().lower() for row in rows for turn in row["turns"]}


def test_none_is_in_the_built_in_set(module: Any) -> None:
    ours = everything(module)
    assert not ours & turns(ROOT / "benchmarks" / "data" / "mini.jsonl")


@pytest.mark.data
def test_none_is_in_a_public_set(module: Any, data_dir: Path) -> None:
    ours = everything(module)
    for name in ("alpaca_eagle", "mt_bench", "qa_eagle"):
        assert not ours & turns(data_dir / f"{name}.jsonl")


def test_mixing_keeps_so_many_of_a_source(module: Any) -> None:
    ours = module.rows([[prompt] for prompt in module.make_prompts(20)])
    others = [{"id": f"{s}-{i}", "source": s, "turns": ["?"]} for s in ("a", "b") for i in range(30)]
    mixed = module.mix(ours, others, {"a": 7}, seed=3)
    found = [row["source"] for row in mixed]
    assert (found.count("ours"), found.count("a"), found.count("b")) == (20, 7, 30)
    assert mixed == module.mix(ours, others, {"a": 7}, seed=3) != module.mix(ours, others, {"a": 7}, seed=4)
