"""Scoring a run: its stored answers as text, judged by their suites' scorers, written beside the rounds.

Example: ``score_run(store, plan.prompts, tokenizer, config)`` returns a sentence for each suite it could not score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specbench.benchmarks.sandbox import CodeEval
from specbench.benchmarks.scoring import Answer, Scored, Scorer, scorers
from specbench.config import RunConfig
from specbench.errors import UserError
from specbench.results.accuracy import write_scores
from specbench.results.store import RunStore
from specbench.runners.stopping import read_answer
from specbench.types import CLEAN, Prompt

_GROUP = ("run_id", "suite", "condition", "family", "answer_path")


def score_run(
    store: RunStore,
    prompts: Iterable[Prompt],
    tokenizer: Any,
    config: RunConfig,
    note: Callable[[str], None] = lambda _text: None,
) -> list[str]:
    """Score the answers to prompts of one turn and write ``scores.parquet`` and ``accuracy.parquet``.

    Args:
        store: of the run.
        prompts: its prompts.
        tokenizer: the target's.
        config: names the suites and says whether generated code may run.
        note: hears of suites that have no scorer.

    Returns:
        One sentence for each suite whose scorer could not be used.

    Raises:
        UserError: a scorer's package is missing, or the files cannot be written.
    """
    known = {p.id: p for p in prompts if len(p.turns) == 1}
    found = scorers(config.suite, list(known.values()))
    groups = _groups(store, known)
    for suite in dict.fromkeys(key[1] for key in groups):
        if suite not in found:
            note(f"{suite} has no scorer: its answers have no accuracy")
    refused: dict[str, str] = {}
    scores: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    for key, rows in groups.items():
        suite = key[1]
        if suite in refused or suite not in found:
            continue
        answers = [Answer(prompt=known[row["prompt_id"]], text=_text(tokenizer, row, known)) for row in rows]
        try:
            with CodeEval.permitted(config.run_generated_code):
                scored = found[suite].score(answers)
        except UserError as error:
            refused[suite] = f"{suite}: {error}"
            continue
        _enter(scored, found[suite], dict(zip(_GROUP, key, strict=True)), rows, answers, scores, totals)
    write_scores(store.path, scores, totals, config.seed)
    return list(refused.values())


def _groups(store: RunStore, known: Mapping[str, Prompt]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Stored answers by group, the clean condition first, prompts in order."""
    order = {prompt_id: i for i, prompt_id in enumerate(known)}
    rows = [r for r in store.answers() if r["error"] is None and r["prompt_id"] in known]
    rows.sort(
        key=lambda r: (r["condition"] != CLEAN, r["condition"], r["answer_path"], order[r["prompt_id"]])
    )
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        # a forced answer is the clean one again
        if row["answer_path"] == "free" and row["family"] != "noise":
            groups[tuple(row[k] for k in _GROUP)].append(row)
    return groups


def _text(tokenizer: Any, row: Mapping[str, Any], known: Mapping[str, Prompt]) -> str:
    return read_answer(tokenizer, row["answer_ids"], known[row["prompt_id"]].stop_strings)


def _enter(
    scored: Scored,
    scorer: Scorer,
    keys: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer],
    scores: list[dict[str, Any]],
    totals: list[dict[str, Any]],
) -> None:
    """Turn what a scorer found into rows."""
    by_prompt = {a.prompt.id: (a, row) for a, row in zip(answers, rows, strict=True)}
    primary = {(t.filter, t.metric) for t in scored.totals if t.primary}
    common = {**keys, "task": scorer.task, "version": scorer.version}
    for score in scored.scores:
        answer, row = by_prompt[score.prompt_id]
        meta = answer.prompt.meta
        scores.append(
            {
                **common,
                "filter": score.filter,
                "metric": score.metric,
                "primary": (score.filter, score.metric) in primary,
                "prompt_id": score.prompt_id,
                "turn": row["turn"],
                "num_fewshot": int(meta["num_fewshot"]) if "num_fewshot" in meta else None,
                "fewshot_seed": int(meta["fewshot_seed"]) if "fewshot_seed" in meta else None,
                "value": score.value,
                "text": answer.text,
            }
        )
    totals += [
        {
            **common,
            "filter": total.filter,
            "metric": total.metric,
            "primary": total.primary,
            "higher_is_better": total.higher_is_better,
            "total": total.value,
        }
        for total in scored.totals
    ]
