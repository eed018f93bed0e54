"""Paired comparison: no difference where there is none, a planted one found or declared invisible."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specbench.errors import UserError
from specbench.results.compare import Comparison, Row, compare, render
from specbench.results.store import RunStore


def fill(
    path: Path, synthetic: SimpleNamespace, chances: dict[str, float], prompts: int = 80, **keys: Any
) -> Path:
    """A run of drafters whose every draft token is accepted with a chance of their own, easier on easy prompts."""
    rng = np.random.default_rng(keys.pop("rng", 5))
    rounds, answers, items = [], [], []
    ease = rng.normal(0, 0.05, prompts)
    for p in range(prompts):
        names = {"prompt_id": f"toy/{p}", "ids_hash": f"{p:04x}", **keys}
        for drafter, chance in chances.items():
            accepted = np.minimum(rng.geometric(1 - (chance + ease[p]).clip(0, 0.99), 60) - 1, 4).tolist()
            flush = synthetic.work(accepted, drafter=drafter, **names)
            rounds += flush["rounds"]
            items += flush["items"]
        answers += flush["answers"]
    with RunStore(path) as store:
        store.write(rounds=rounds, answers=answers, items=items)
    return path


def only(result: Comparison) -> Row:
    (row,) = result.rows
    return row


def test_the_same_drafter_in_two_runs_does_not_differ(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    a = fill(tmp_path / "a", synthetic, {"ngram": 0.5}, run_id="a")
    b = fill(tmp_path / "b", synthetic, {"ngram": 0.5}, run_id="b")
    row = only(compare([a, b]))
    assert row.outcome == "same" and row.verdict == "the same on every prompt"
    assert row.p == row.p_holm == 1.0 and row.difference == 0.0 and row.ratio == 1.0
    assert (row.left, row.right) == ("ngram (a)", "ngram (b)")


def test_the_same_chances_in_two_runs_do_not_differ_beyond_chance(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    a = fill(tmp_path / "a", synthetic, {"ngram": 0.5}, run_id="a", rng=1)
    b = fill(tmp_path / "b", synthetic, {"ngram": 0.5}, run_id="b", rng=2)
    row = only(compare([a, b]))
    assert row.outcome in ("no difference", "undecided") and "smallest visible" in row.verdict


def planted(path: Path, synthetic: SimpleNamespace, prompts: int) -> Row:
    """Chances chosen so that accepted per round of the second is 5 % above the first (truncated geometric law)."""

    def accepted(c: float) -> float:
        return sum(c**i for i in range(1, 5))

    low, high = 0.5, 0.6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) < 1.05 * accepted(0.5) else (low, middle)
    return only(compare(fill(path, synthetic, {"a": 0.5, "b": low}, prompts)))


def test_a_planted_five_per_cent_in_80_prompts_is_found_or_declared_invisible(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    row = planted(tmp_path, synthetic, 80)
    assert row.num_prompts == 80
    assert row.ratio_low <= 1.05 <= row.ratio_high
    assert row.detectable is not None and row.detectable == pytest.approx(2.83 * row.ratio_error, rel=0.02)
    if row.outcome == "higher":
        assert row.p_holm < 0.05 and "b accepts" in row.verdict and "more than a" in row.verdict
    else:
        assert ("could be missed" in row.verdict) == (row.detectable > 0.05)


def test_a_sample_too_small_says_so(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    row = planted(tmp_path, synthetic, 6)
    assert row.detectable > 0.05
    if row.outcome != "higher":
        assert row.outcome == "undecided" and "5 % could be missed" in row.verdict


def test_rows_equal_a_hand_computed_case(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        for drafter, accepted in (("a", ([4, 2], [0])), ("b", ([2, 1], [3]))):
            for p, counts in enumerate(accepted):
                store.write(**synthetic.work(counts, drafter=drafter, prompt_id=f"toy/{p}"))
        store.write(**synthetic.work([4, 4, 4], drafter="b", prompt_id="toy/9"))
    row = only(compare(tmp_path))
    assert row.left_value == 2.0 and row.right_value == 2.0 and row.difference == 0.0
    assert row.num_prompts == 2 and "1 prompts left out: only one side has them" in row.note


def test_conditions_are_compared_with_the_clean_one(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        for p in range(4):
            name = {"prompt_id": f"toy/{p}"}
            store.write(**synthetic.work([4, 2, p], **name))
            for condition in ("template/no_bos", "text/typos"):
                store.write(**synthetic.work([1, p], condition=condition, **name))
            store.write(**synthetic.work([3, 3], condition="text/typos", answer_path="forced", **name))
    result = compare(tmp_path, "condition")
    assert {(r.left, r.right) for r in result.rows} == {
        ("template/regular", "template/no_bos"),
        ("template/regular", "text/typos"),
    }
    forced = [r for r in result.rows if r.context["answer_path"] == "forced"]
    assert len(result.rows) == 3 and len(forced) == 1 and forced[0].right_value == 3.0


def test_holm_counts_every_row(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    result = compare(fill(tmp_path, synthetic, {"a": 0.5, "b": 0.52, "c": 0.7}, 20))
    assert len(result.rows) == 3
    smallest = min(result.rows, key=lambda r: r.p)
    assert smallest.p_holm == pytest.approx(min(1, 3 * smallest.p))
    alone = compare(tmp_path, baseline="c")
    assert [r.left for r in alone.rows] == ["c", "c"]


def test_suites_are_also_pooled(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        for suite in ("s1", "s2"):
            for drafter in ("a", "b"):
                for p in range(3):
                    names = {"suite": suite, "prompt_id": f"{suite}/{p}", "drafter": drafter}
                    store.write(**synthetic.work([p, 1, 2 if drafter == "a" else 3], **names))
    rows = compare(tmp_path).rows
    assert [r.context["suite"] for r in rows] == ["s1", "s2", "all"]
    assert rows[-1].num_prompts == 6


def test_prompts_with_other_token_ids_are_left_out(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    for run, other in (("a", "00"), ("b", "11")):
        with RunStore(tmp_path / run) as store:
            for p in range(3):
                ids = other if p == 0 else "00"
                store.write(**synthetic.work([p, 1], run_id=run, prompt_id=f"toy/{p}", ids_hash=ids))
    row = only(compare([tmp_path / "a", tmp_path / "b"]))
    assert row.num_prompts == 2 and "1 prompts left out: their token ids differ" in row.note


def test_different_targets_are_paired_by_prompt(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    for run, target in (("a", "small"), ("b", "large")):
        with RunStore(tmp_path / run) as store:
            for p in range(3):
                store.write(
                    **synthetic.work([p, 1], run_id=run, target=target, prompt_id=f"toy/{p}", ids_hash=run)
                )
    row = only(compare([tmp_path / "a", tmp_path / "b"], "target"))
    assert (row.left, row.right, row.num_prompts) == ("large (b)", "small (a)", 3)


def test_one_prompt_says_nothing(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    row = only(compare(fill(tmp_path, synthetic, {"a": 0.5, "b": 0.9}, 1)))
    assert row.outcome == "unknown" and row.verdict == "nothing to say from one prompt"
    assert row.difference_low is None


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = fill(tmp_path, synthetic, {"a": 0.5, "b": 0.6}, 10)
    assert compare(run, seed=3) == compare(run, seed=3)
    assert compare(run, seed=3).rows != compare(run, seed=4).rows


def test_bad_questions_are_refused(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = fill(tmp_path, synthetic, {"a": 0.5}, 2)
    with pytest.raises(UserError, match="unknown column to pair 'drafters'; did you mean 'drafter'"):
        compare(run, "drafters")
    with pytest.raises(UserError, match="no two drafters can be paired: the runs hold a;"):
        compare(run)
    with pytest.raises(UserError, match="unknown drafter 'z'"):
        compare(run, baseline="z")


def test_every_form_holds_every_row(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    result = compare(fill(tmp_path, synthetic, {"a<b>": 0.5, "b": 0.7, "c|d": 0.6}, 10))
    records = list(csv.DictReader(io.StringIO(render(result, "csv"))))
    assert [r["verdict"] for r in records] == [r.verdict for r in result.rows]
    assert [r["p_holm"] for r in json.loads(render(result, "json"))["rows"]] == [
        r.p_holm for r in result.rows
    ]
    assert "<b>" not in render(result, "html") and render(result, "html").count("<tr>") == 4
    assert render(result, "text").count("prompts") == 3
    assert len([line for line in render(result, "md").splitlines() if line.startswith("| ")]) == 5
    with pytest.raises(UserError, match="unknown format"):
        render(result, "pdf")
