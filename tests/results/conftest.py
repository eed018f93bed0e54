"""Rows for the tests of results/: made from scripted accepted counts, no model anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

KEYS: dict[str, Any] = {
    "run_id": "r1",
    "suite": "toy",
    "category": "chat",
    "prompt_id": "toy/0",
    "turn": 0,
    "condition": "template/regular",
    "family": "template",
    "severity": 0,
    "answer_path": "free",
    "target": "tiny",
    "seed": 0,
    "temperature": 0.0,
    "ids_hash": "00",
    "template_hash": "ff",
}
DRAFTER: dict[str, Any] = {
    "drafter": "ngram",
    "drafter_kind": "ngram",
    "runner": "replay",
    "sampler": "greedy",
}


def rounds(accepted: Sequence[int], k: int = 4, **changes: Any) -> dict[str, Any]:
    """A block of rounds with these accepted counts."""
    starts = [sum(a + 1 for a in accepted[:i]) for i in range(len(accepted))]
    block = {
        **KEYS,
        **DRAFTER,
        "k": k,
        "round": list(range(len(accepted))),
        "start": starts,
        "num_drafted": [k] * len(accepted),
        "num_accepted": list(accepted),
        "num_emitted": [a + 1 for a in accepted],
        "cut": [False] * len(accepted),
        "weight": 1.0,
    }
    return {**block, **changes}


def answer(length: int = 8, **changes: Any) -> dict[str, Any]:
    row = {
        **KEYS,
        "bos_count": 1,
        "prompt_tokens": 12,
        "answer_tokens": length,
        "answer_ids": list(range(length)),
        "finish": "stop",
        "mean_entropy": 1.5,
        "distinct_bigrams": 1.0,
        "degenerate": False,
        "notes": [],
    }
    return {**row, **changes}


def item(**changes: Any) -> dict[str, Any]:
    names = ("run_id", "prompt_id", "turn", "condition", "answer_path")
    row = {**{n: KEYS[n] for n in names}, "drafter": "ngram", "runner": "replay", "sampler": "greedy"}
    return {**row, "num_rows": 1, "num_nonfinite": 0, **changes}


def work(accepted: Sequence[int], k: int = 4, **changes: Any) -> dict[str, list[Mapping[str, Any]]]:
    """One whole flush: an answer, its rounds, its item."""
    in_answer = {key: value for key, value in changes.items() if key in KEYS}
    in_item = {key: value for key, value in changes.items() if key in item()}
    return {
        "rounds": [rounds(accepted, k, **changes)],
        "answers": [answer(**in_answer)],
        "items": [item(num_rows=len(accepted), **in_item)],
    }


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    """The builders above; test folders are no packages, so they cannot be imported."""
    return SimpleNamespace(rounds=rounds, answer=answer, item=item, work=work)
