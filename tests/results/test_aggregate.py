"""Acceptance rates: hand-computed rounds, and the definitions written as plain loops over random rows."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import UserError
from specbench.results.aggregate import GROUP, acceptance_table, write_acceptance
from specbench.results.store import RunStore


def find(table: Any, **keys: Any) -> dict[str, Any]:
    rows = [r for r in table.to_pylist() if all(r[k] == v for k, v in keys.items())]
    assert len(rows) == 1, (keys, len(rows))
    return rows[0]


def test_rates_of_hand_computed_rounds(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 0, 1, 4]))
        store.write(**synthetic.work([0], prompt_id="toy/1", num_drafted=[0]))
    row = find(acceptance_table(tmp_path), suite="toy")
    assert row["rounds"] == 5 and row["accepted"] == 7 and row["prompts"] == 2 and row["answers"] == 2
    assert row["accepted_per_round"] == 7 / 5 and row["tokens_per_round"] == 12 / 5
    assert [row[f"m_{i}"] for i in (1, 2, 3, 4)] == [3 / 5, 2 / 5, 1 / 5, 1 / 5]
    assert [row[f"c_{i}"] for i in (1, 2, 3, 4)] == [3 / 5, 2 / 3, 1 / 2, 1.0]
    assert [row[f"p_{i}"] for i in (1, 2, 3, 4)] == [4 / 5] * 4
    assert row["drafted_per_round"] == 16 / 5
    assert row["prompt_mean_accepted_per_round"] == (7 / 4 + 0) / 2
    assert row["emitted_per_round"] == 12 / 5


def test_weights_count_as_fractions_of_rounds(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    flush = synthetic.work([2, 0], weight=[0.25, 0.75], cut=[True, False])
    with RunStore(tmp_path) as store:
        store.write(**flush)
    row = find(acceptance_table(tmp_path), suite="toy")
    assert row["rounds"] == 1.0 and row["accepted_per_round"] == 0.5 and row["cut_rounds"] == 0.25
    assert row["m_1"] == 0.25 and row["c_2"] == 1.0 and row["m_3"] == 0 and row["c_4"] is None


def test_retention_is_paired_by_prompt(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    other = {"condition": "template/no_bos", "severity": 2}
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([4, 2]))
        store.write(**synthetic.work([0], prompt_id="toy/1"))  # only under the clean condition: left out
        store.write(**synthetic.work([1, 2], **other))
        store.write(**synthetic.work([4], prompt_id="toy/2", **other))  # only under the other one: left out
        store.write(**synthetic.work([3], answer_path="forced", **other))
    table = acceptance_table(tmp_path)
    row = find(table, suite="toy", condition="template/no_bos", answer_path="free")
    assert row["retention"] == (3 / 2) / (6 / 2) and row["retention_prompts"] == 1
    assert row["accepted_per_round"] == 7 / 3 and row["severity"] == 2 and row["family"] == "template"
    assert find(table, suite="toy", condition="template/regular")["retention"] == 1.0
    forced = find(table, suite="toy", answer_path="forced")
    assert forced["retention"] == (3 / 1) / (6 / 2)


def test_suites_are_pooled_and_averaged(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([4, 4, 4]))
        store.write(**synthetic.work([1], suite="other", category="maths", prompt_id="other/0"))
    table = acceptance_table(tmp_path)
    row = find(table, suite="all")
    assert table.to_pylist()[-1]["suite"] == "all"
    assert row["accepted_per_round"] == 13 / 4 and row["macro_accepted_per_round"] == (4 + 1) / 2
    assert row["prompts"] == 2 and row["prompt_mean_accepted_per_round"] == 2.5
    by_category = acceptance_table(tmp_path, by=("suite", "category", "drafter"))
    assert find(by_category, suite="all", category="all")["accepted"] == 13
    assert find(by_category, category="maths")["accepted"] == 1


def test_depths_keep_their_own_columns(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    flush = synthetic.work([2, 0], k=2)
    flush["rounds"].append(synthetic.rounds([2, 4], k=4))
    flush["items"] = [synthetic.item(forced_positions=[9, 8, 7, 6], forced_hits=[9, 4, 0, 3])]
    with RunStore(tmp_path) as store:
        store.write(**flush)
    table = acceptance_table(tmp_path)
    shallow, deep = find(table, suite="toy", k=2), find(table, suite="toy", k=4)
    assert shallow["accepted_per_round"] == 1 and shallow["m_2"] == 0.5 and shallow["m_3"] is None
    assert deep["accepted_per_round"] == 3 and deep["m_3"] == 0.5 and deep["p_4"] == 1
    assert [deep[f"f_{i}"] for i in range(1, 5)] == [1.0, 0.5, 0.0, 0.5]
    assert shallow["f_2"] == 0.5 and shallow["f_3"] is None


def test_answers_are_counted_once_whatever_the_drafters(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2]))
        again = synthetic.work([3], drafter="draft")
        again["answers"] = []
        store.write(**again)
        store.write(answers=[synthetic.answer(prompt_id="toy/9", degenerate=True, mean_entropy=0.5)])
        store.write(answers=[synthetic.answer(prompt_id="toy/8", error="boom", finish="")])
    for drafter in ("ngram", "draft"):
        row = find(acceptance_table(tmp_path), suite="toy", drafter=drafter)
        assert row["answers"] == 2 and row["degenerate_share"] == 0.5 and row["mean_entropy"] == 1.0


def test_runs_can_be_read_together(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    for run, accepted in (("a", [1, 1]), ("b", [3])):
        with RunStore(tmp_path / run) as store:
            store.write(**synthetic.work(accepted, run_id=run))
    table = acceptance_table([tmp_path / "a", tmp_path / "b"])
    assert find(table, suite="toy", run_id="b")["accepted_per_round"] == 3
    pooled = acceptance_table([tmp_path / "a", tmp_path / "b"], by=("drafter",))
    assert pooled.to_pylist()[0]["accepted_per_round"] == 5 / 3


def test_bad_groups_and_empty_runs(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        with pytest.raises(UserError, match="holds no rounds yet"):
            acceptance_table(store)
        store.write(**synthetic.work([2]))
        with pytest.raises(UserError, match="cannot be grouped by 'colour'"):
            acceptance_table(store, by=("colour",))
        with pytest.raises(UserError, match="cannot be grouped by 'weight'"):
            acceptance_table(store, by=("weight",))
        with pytest.raises(UserError, match="must be grouped by something"):
            acceptance_table(store, by=())
        assert acceptance_table(store, by=("suite", "family", "severity", "drafter_kind")).num_rows == 2


def test_the_written_table_is_the_returned_one(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    with RunStore(tmp_path) as store:
        store.write(**synthetic.work([2, 1]))
        path = write_acceptance(store)
    assert path == tmp_path / "acceptance.parquet"
    assert pq.read_table(path).equals(acceptance_table(tmp_path, draws=10_000))
    assert {"suite", "condition", "drafter", "k", "runner"} <= set(pq.read_schema(path).names)


ROW = st.fixed_dictionaries(
    {
        "suite": st.sampled_from(["s1", "s2"]),
        "prompt_id": st.sampled_from(["p1", "p2", "p3"]),
        "condition": st.sampled_from(["template/regular", "text/typos"]),
        "drafter": st.sampled_from(["ngram", "draft"]),
        "drafted": st.integers(0, 3),
        "accepted": st.integers(0, 3),
        "weight": st.sampled_from([1.0, 1.0, 0.25, 0.1]),
    }
)


@settings(max_examples=12, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=30))
def test_every_rate_equals_its_definition(rows: list[dict[str, Any]], synthetic: SimpleNamespace) -> None:
    for row in rows:
        row["accepted"] = min(row["accepted"], row["drafted"])
    with tempfile.TemporaryDirectory() as folder, RunStore(Path(folder) / "run") as store:
        names = ("suite", "prompt_id", "condition", "drafter")
        blocks = [
            synthetic.rounds(
                [r["accepted"]],
                k=3,
                num_drafted=[r["drafted"]],
                weight=r["weight"],
                **{n: r[n] for n in names},
            )
            for r in rows
        ]
        store.write(rounds=blocks, answers=[synthetic.answer()])
        table = acceptance_table(store)
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for r in rows:
        groups[r["suite"], r["condition"], r["drafter"]].append(r)
        groups["all", r["condition"], r["drafter"]].append(r)
    assert table.num_rows == len(groups)
    for (suite, condition, drafter), own in groups.items():
        got = find(table, suite=suite, condition=condition, drafter=drafter)
        total = sum(r["weight"] for r in own)
        at_least = [sum(r["weight"] for r in own if r["accepted"] >= i) for i in range(4)]
        assert got["rounds"] == pytest.approx(total)
        assert got["accepted_per_round"] == pytest.approx(
            sum(r["weight"] * r["accepted"] for r in own) / total
        )
        assert got["accepted_per_round"] == pytest.approx(sum(got[f"m_{i}"] for i in (1, 2, 3)), abs=1e-12)
        for i in (1, 2, 3):
            assert got[f"m_{i}"] == pytest.approx(at_least[i] / total)
            expected = at_least[i] / at_least[i - 1] if at_least[i - 1] else None
            assert got[f"c_{i}"] == (None if expected is None else pytest.approx(expected))
        assert got["retention"] == pytest.approx(_retention(groups, suite, condition, drafter))


def _retention(groups: Any, suite: str, condition: str, drafter: str) -> float | None:
    def per_prompt(name: str) -> dict[Any, tuple[float, float]]:
        sums: dict[Any, tuple[float, float]] = {}
        for r in groups.get((suite, name, drafter), []):
            a, w = sums.get((r["suite"], r["prompt_id"]), (0.0, 0.0))
            sums[r["suite"], r["prompt_id"]] = (a + r["weight"] * r["accepted"], w + r["weight"])
        return sums

    own, clean = per_prompt(condition), per_prompt("template/regular")
    both = own.keys() & clean.keys()
    if not both or sum(clean[p][0] for p in both) == 0:
        return None
    rate = [sum(s[p][0] for p in both) / sum(s[p][1] for p in both) for s in (own, clean)]
    return rate[0] / rate[1]


def test_the_default_grouping_is_what_the_pipeline_writes() -> None:
    assert {"suite", "condition", "drafter", "k", "runner"} <= set(GROUP)
