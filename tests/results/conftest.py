"""Rows for the tests of results/: made from scripted accepted counts, no model anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def run_info(drafters: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """A ``run.json`` as the pipeline writes it; drafters map names to kinds."""
    record = {
        "run_id": "r1",
        "specbench_version": "0.1.0",
        "started": "2026-01-02T03:04:05+00:00",
        "command": "specbench run --out runs/toy",
        "config": {"suite": ["toy"], "device": "cpu", "dtype": "float32", "depth": [4]},
        "versions": {"python": "3.11", "torch": "2.11"},
        "machine": {"platform": "Linux", "cpus": 2},
        "target": {"name": "tiny", "fingerprint": "t" * 16, "hidden_size": 64},
        "prompts_hash": "p" * 16,
        "drafters": [
            {"name": n, "kind": k, "fingerprint": "d" * 16, "num_parameters": 1000, "settings": {}}
            for n, k in drafters.items()
        ],
    }
    return {**record, **changes}


def whole_run(
    path: Path,
    store: Any,
    accepted: Mapping[str, Mapping[str, Sequence[Sequence[int]]]],
    k: int = 4,
    changes: Mapping[str, Any] | None = None,
    version: str = "",
    **columns: Any,
) -> Path:
    """A run directory: accepted[condition][drafter][prompt] are accepted counts, equally long per prompt."""
    with store(path) as open_store:
        for condition, drafters in accepted.items():
            kept: list[Any] = [[], [], []]
            keys = {"condition": condition, "family": condition.split("/")[0], **columns}
            for drafter, prompts in drafters.items():
                for p, counts in enumerate(prompts):
                    names = {"prompt_id": f"toy/{p}", "ids_hash": f"{version}{p:016x}", **keys}
                    flush = work(counts, k, drafter=drafter, **names)
                    kept[0] += flush["rounds"]
                    kept[1] += flush["items"]
                    if drafter == next(iter(drafters)):
                        kept[2].append(answer(1 + sum(counts) + len(counts), **names))
            open_store.write(rounds=kept[0], items=kept[1], answers=kept[2])
    names = dict.fromkeys(d for drafters in accepted.values() for d in drafters)
    (path / "run.json").write_text(json.dumps(run_info(dict.fromkeys(names, "ngram"), **(changes or {}))))
    return path


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    """The builders above; test folders are no packages, so they cannot be imported."""
    return SimpleNamespace(
        rounds=rounds, answer=answer, item=item, work=work, run_info=run_info, whole_run=whole_run
    )
