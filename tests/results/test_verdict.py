"""The sentences behind a run: what they name, and that a difference is claimed only where intervals part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from specbench.results.store import RunStore
from specbench.results.verdict import verdicts


def test_intervals_that_part_are_a_difference(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    strong = [[4, 4, 3]] * 30 + [[3, 4, 4]] * 30
    weak = [[1, 1, 0]] * 30 + [[0, 1, 1]] * 30
    counts = {
        "template/regular": {"strong": strong, "weak": weak},
        "template/no_bos": {"strong": [[2, 2, 2]] * 60, "weak": weak},
    }
    found = verdicts(synthetic.whole_run(tmp_path, RunStore, counts), draws=200)
    assert found[0].startswith("strong accepts 3.67 draft tokens per round at k = 4 [")
    assert ", more than weak (0.67 [" in found[0]
    assert any(s.startswith("strong keeps 55% of its clean acceptance under template/no_bos") for s in found)
    assert "weak loses nothing under any condition of this run." in found


def test_those_that_lose_nothing_share_a_sentence(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    even = [[2, 2]] * 10
    counts = {"template/regular": dict.fromkeys("abc", even), "template/no_bos": dict.fromkeys("abc", even)}
    found = verdicts(synthetic.whole_run(tmp_path, RunStore, counts), draws=200)
    assert "a, b and c lose nothing under any condition of this run." in found


def test_intervals_that_overlap_are_none(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    one = [[4, 0], [0, 4], [3, 1], [0, 0]] * 8
    other = [[3, 0], [0, 4], [3, 1], [0, 0]] * 8
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": {"one": one, "other": other}})
    assert "not clearly more than other" in verdicts(run, draws=200)[0]


def test_a_chain_that_gives_out(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    """Every round accepts the first token, one in five the second: c_2 is a fifth of c_1."""
    counts = {"template/regular": {"short": [[1, 1, 1, 1, 2]] * 40}}
    found = verdicts(synthetic.whole_run(tmp_path, RunStore, counts), draws=200)
    assert any(s.startswith("short gives out at step 2: only 20%") for s in found)
