"""Ranks only where a budget is shared; otherwise the reason."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specbench.errors import UserError
from specbench.results.fairness import Entry, fair_comparison, render
from specbench.results.store import RunStore


def sampled(chance: float, prompts: int = 30, seed: int = 0, k: int = 4) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [np.minimum(rng.geometric(1 - chance, 30) - 1, k).tolist() for _ in range(prompts)]


def add(run: Path, synthetic: SimpleNamespace, counts: list[list[int]], k: int, **columns: Any) -> None:
    """Further rounds for prompts that have their answers."""
    blocks = []
    for p, accepted in enumerate(counts):
        blocks += synthetic.work(accepted, k, prompt_id=f"toy/{p}", ids_hash=f"{p:016x}", **columns)["rounds"]
    with RunStore(run) as store:
        store.write(rounds=blocks)


def by_drafter(entries: tuple[Entry, ...]) -> dict[tuple[str, int], Entry]:
    return {(e.drafter, e.k): e for e in entries}


def test_drafters_the_prompts_cannot_tell_apart_share_a_rank(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    drafters = {
        "a": sampled(0.5, seed=1),
        "b": sampled(0.5, seed=2),
        "best": sampled(0.8),
        "worst": sampled(0.2),
    }
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": drafters})
    (league,) = fair_comparison(run, draws=2000)
    ranks = {e.drafter: e.rank for e in league.entries}
    assert ranks == {"best": 1, "a": 2, "b": 2, "worst": 4}
    assert league.num_prompts == 30
    assert [e.drafter for e in league.entries][0] == "best"
    best = league.entries[0]
    assert best.value == best.tokens_per_round and best.verified_per_round == 5
    assert best.flops_per_round == 2 * 1000 * 4


def test_another_depth_is_not_ranked(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(
        tmp_path, RunStore, {"template/regular": {"a": sampled(0.5), "b": sampled(0.6)}}
    )
    add(run, synthetic, sampled(0.6, k=16), 16, drafter="block")
    (league,) = fair_comparison(run, draws=500)
    entries = by_drafter(league.entries)
    assert entries["block", 16].rank is None
    assert entries["block", 16].reason == (
        "measured at k = 16, where no other drafter was (they have 4); run both at one depth"
    )
    assert entries["a", 4].rank and entries["b", 4].rank


def test_the_verify_budget_is_what_was_verified(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(
        tmp_path, RunStore, {"template/regular": {"a": sampled(0.5), "b": sampled(0.6)}}
    )
    short = sampled(0.4, k=2)
    for p, counts in enumerate(short):
        short[p] = synthetic.rounds(
            counts,
            4,
            num_drafted=[2] * len(counts),
            prompt_id=f"toy/{p}",
            ids_hash=f"{p:016x}",
            drafter="lookup",
        )
    with RunStore(run) as store:
        store.write(rounds=short)
    assert all(e.rank for e in fair_comparison(run, "drafts", draws=500)[0].entries)
    entries = by_drafter(fair_comparison(run, "verify", draws=500)[0].entries)
    assert entries["lookup", 4].rank is None and "verify 3.00 positions" in entries["lookup", 4].reason
    assert entries["a", 4].rank == 2 and entries["b", 4].rank == 1


def test_time_needs_measured_times(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    drafters = {"slow": sampled(0.6), "quick": sampled(0.5)}
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": drafters})
    (league,) = fair_comparison(run, "time", draws=500)
    assert {e.rank for e in league.entries} == {None}
    assert "measures no time; run it with --runner decode" in league.entries[0].reason
    for name, ms in (("slow", 8.0), ("quick", 1.0)):
        add(run, synthetic, drafters[name], 4, drafter=name, runner="decode", draft_ms=ms, verify_ms=2.0)
    entries = [e for e in fair_comparison(run, "time", draws=500)[0].entries if e.rank]
    assert [(e.drafter, e.rank) for e in entries] == [("quick", 1), ("slow", 2)]
    assert entries[0].value == pytest.approx(1000 * entries[0].tokens_per_round / 3.0)


def test_other_prompts_or_another_target_are_another_league(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    counts = {"template/regular": {"a": sampled(0.5)}}
    runs = [
        synthetic.whole_run(tmp_path / "one", RunStore, counts),
        synthetic.whole_run(tmp_path / "two", RunStore, counts),
        synthetic.whole_run(tmp_path / "fewer", RunStore, {"template/regular": {"a": sampled(0.5, 20)}}),
        synthetic.whole_run(
            tmp_path / "other",
            RunStore,
            counts,
            changes={"target": {"name": "tiny", "fingerprint": "x" * 16}},
        ),
    ]
    leagues = fair_comparison(runs, draws=500)
    assert [len(league.entries) for league in leagues] == [2, 1, 1]
    together = {e.run_id for e in leagues[0].entries}
    assert together == {"one", "two"} and {e.rank for e in leagues[0].entries} == {1}
    assert "no other drafter ran on the same prompts" in leagues[1].entries[0].reason


def test_times_of_two_runs_need_a_machine(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    counts = {"template/regular": {"a": sampled(0.5)}}
    timed = {"draft_ms": 1.0, "verify_ms": 2.0, "runner": "decode"}
    runs = []
    for name, machine in (
        ("one", {"platform": "Linux", "gpu": "H"}),
        ("two", {"platform": "Linux", "gpu": "B"}),
    ):
        run = synthetic.whole_run(tmp_path / name, RunStore, counts, changes={"machine": machine})
        add(run, synthetic, counts["template/regular"]["a"], 4, drafter="a", **timed)
        runs.append(run)
    reasons = {e.reason for e in fair_comparison(runs, "time", draws=500)[0].entries if e.runner == "decode"}
    assert reasons == {"no other drafter was timed by the same runner on the same machine"}
    record = json.loads((runs[0] / "run.json").read_text())
    del record["machine"]
    (runs[0] / "run.json").write_text(json.dumps(record))
    reasons = {e.reason for e in fair_comparison(runs, "time", draws=500)[0].entries if e.runner == "decode"}
    assert any("names no machine" in r for r in reasons)


def test_bad_questions_are_refused(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": {"a": [[1], [2]]}})
    with pytest.raises(UserError, match="unknown budget 'draft'; did you mean 'drafts'"):
        fair_comparison(run, "draft")
    with pytest.raises(UserError, match="unknown suite 'tox'"):
        fair_comparison(run, suite="tox")
    with pytest.raises(UserError, match="unknown condition 'all'"):
        fair_comparison(run, condition="all")
    (run / "run.json").unlink()
    with pytest.raises(UserError, match="holds no run.json"):
        fair_comparison(run)


def test_every_form_names_the_reason(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": {"a": [[1], [2]]}})
    leagues = fair_comparison(run, draws=100)
    reason = leagues[0].entries[0].reason
    for form in ("md", "html", "csv", "json"):
        assert reason in render(leagues, form)
    for width in (60, 300):
        text = render(leagues, "text", width)
        assert reason.split()[0] in text and max(map(len, text.splitlines())) <= width
    with pytest.raises(UserError, match="unknown format"):
        render(leagues, "pdf")
