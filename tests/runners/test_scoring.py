"""A run is scored from what it stored; a suite that cannot be scored costs itself alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbench.config import RunConfig
from specbench.runners.scoring import score_run
from specbench.types import Prompt

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'specbench[lm-eval]'")

FACTS = {
    "prompt": 'def one():\n    """Return 1."""\n',
    "test": "def check(f):\n    assert f() == 1\n",
    "entry_point": "one",
}
PROMPTS = [
    Prompt(id="gsm8k/0", suite="gsm8k", category="math", turns=("?",), meta={"solution": "#### 18"}),
    Prompt(
        id="humaneval/0",
        suite="humaneval",
        category="code",
        turns=("?",),
        meta={"scoring": json.dumps(FACTS)},
    ),
    Prompt(id="mini/a", suite="mini", category="chat", turns=("?",)),
    Prompt(id="mini/b", suite="mini", category="chat", turns=("?", "And?")),
]
TEXTS = {"gsm8k/0": "It is 18.", "humaneval/0": "```python\ndef one():\n    return 1\n```"}


class Letters:
    """One token a character."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def stored(path: Path) -> Any:
    rows = [
        {
            "run_id": "r",
            "suite": prompt.suite,
            "condition": condition,
            "family": condition.split("/")[0],
            "answer_path": answer_path,
            "prompt_id": prompt.id,
            "turn": 0,
            "answer_ids": [ord(c) for c in TEXTS.get(prompt.id, "Hello") if condition != "text/caps"],
            "error": None,
        }
        for prompt in PROMPTS
        for condition, answer_path in (
            ("template/regular", "free"),
            ("text/caps", "free"),
            ("text/caps", "forced"),
            ("noise/gauss", "free"),
        )
    ]
    failed = {**rows[0], "condition": "text/typos", "error": "too long", "answer_ids": []}
    return SimpleNamespace(path=path, answers=lambda: [*rows, failed])


@pytest.mark.parametrize("allowed", [False, True])
def test_code_runs_only_when_allowed_and_the_rest_is_scored(tmp_path: Path, allowed: bool) -> None:
    config = RunConfig(suite=("gsm8k", "humaneval", "mini"), score=True, run_generated_code=allowed)
    notes: list[str] = []
    refused = score_run(stored(tmp_path), PROMPTS, Letters(), config, notes.append)
    assert notes == ["mini has no scorer: its answers have no accuracy"]
    scores = pq.read_table(tmp_path / "scores.parquet").to_pylist()
    found = {(s["suite"], s["condition"]): s["value"] for s in scores if s["primary"]}
    wanted = {("gsm8k", "template/regular"): 1.0, ("gsm8k", "text/caps"): 0.0}
    if allowed:
        assert refused == []
        wanted |= {("humaneval", "template/regular"): 1.0, ("humaneval", "text/caps"): 0.0}
    else:
        assert len(refused) == 1
        assert refused[0].startswith("humaneval: this suite is scored by running what the model wrote")
        assert refused[0].endswith("allow it with --run-generated-code")
    # forced answers are the clean ones again, and noise acts inside the drafter: neither is scored
    assert found == wanted
    kept = pq.read_table(tmp_path / "accuracy.parquet").to_pylist()
    caps = [r for r in kept if r["condition"] == "text/caps" and r["suite"] == "gsm8k" and r["primary"]]
    assert [r["accuracy_retention"] for r in caps] == [0.0]
