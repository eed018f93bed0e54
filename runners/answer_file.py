"""The target's own answers as a file: what drafters are trained on.

One JSON object a line: ``{"id": "gsm8k-7", "p": [prompt ids], "g": [answer ids], "finish": "stop"}``. Writing goes on
where an earlier run stopped; the ids it wrote are never changed. A second turn is a line of its own, ``gsm8k-7#2``.

Example:
    write_answers(answerer, chat, read_training_prompts(Path("prompts.jsonl")), Path("answers.jsonl"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.errors import UserError
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import resolve_conditions
from specbench.runners.answers import Answerer
from specbench.runners.stopping import read_answer
from specbench.types import CLEAN, Prompt, RenderedPrompt

_CHUNK = 384
"""Prompts between two writes: what a kill can lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line of an answer file."""

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish: Literal["stop", "length"]


def read_answers(path: Path, vocab_size: int | None = None) -> list[Answer]:
    """Read an answer file.

    Args:
        path: the file.
        vocab_size: the target's; ids beyond it mean another tokenizer.

    Raises:
        UserError: a line is malformed, an answer is empty, or ids do not fit the vocabulary.
    """
    if not path.is_file():
        raise UserError(f"no answer file {path}; make one with specbench answers")
    answers = []
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                prompt, answer = tuple(map(int, row["p"])), tuple(map(int, row["g"]))
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f'{path}, line {number}: expected {{"p": [prompt ids], "g": [answer ids]}} ({type(error).__name__})'
                ) from error
            if not answer or not prompt:
                raise UserError(f"{path}, line {number}: the {'answer' if prompt else 'prompt'} is empty")
            if vocab_size is not None and not 0 <= min(prompt + answer) <= max(prompt + answer) < vocab_size:
                raise UserError(
                    f"{path}, line {number}: token id {max(prompt + answer)} is outside the target's vocabulary of "
                    f"{vocab_size}; these answers come from another tokenizer"
                )
            finish: Literal["stop", "length"] = "stop" if row.get("finish") == "stop" else "length"
            answers.append(
                Answer(id=str(row.get("id", number)), prompt_ids=prompt, answer_ids=answer, finish=finish)
            )
    if not answers:
        raise UserError(f"{path} holds no answers")
    return answers


def render_turn(
    prompts: Sequence[Prompt], turn: int, said: Mapping[str, Sequence[int]], chat: ChatTokenizer, seed: int
) -> list[RenderedPrompt]:
    """Render one turn under the clean condition; training sees the template that users serve.

    Args:
        prompts: conversations that have such a turn.
        turn: from 0.
        said: line id -> the answer's ids, for the turns before.
        chat: the target's tokenizer and template.
        seed: for conditions that draw.
    """
    (clean,) = resolve_conditions([CLEAN])
    rendered = []
    for prompt in prompts:
        earlier = [read_answer(chat.tokenizer, said[line_id(prompt.id, before)]) for before in range(turn)]
        rendered.append(clean.render(prompt, turn, earlier, chat, seed))
    return rendered


def line_id(prompt_id: str, turn: int) -> str:
    """Return the id of a turn's line: that of the prompt, from the second turn on with ``#2`` behind it."""
    return prompt_id if turn == 0 else f"{prompt_id}#{turn + 1}"


def _finished(out: Path) -> dict[str, Sequence[int]]:
    """Answers already in the file by line id; a half-written last line is cut off."""
    if not out.exists():
        return {}
    whole, _, rest = out.read_bytes().rpartition(b"\n")
    if rest:
        out.write_bytes(whole + b"\n" if whole else b"")
    rows = [json.loads(line) for line in out.read_text().split("\n") if line]
    return {str(row["id"]): row["g"] for row in rows}


def write_answers(
    answerer: Answerer,
    chat: ChatTokenizer,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> int:
    """Append the target's answers to ``out``, one a turn; return how many were new.

    Args:
        answerer: target and setting.
        chat: its tokenizer and template.
        prompts: every turn is answered, behind the target's own answers to those before it.
        out: the file; ids already there are skipped.
        seed: for conditions that draw (the clean one does not).
        on_progress: called with (finished, all).
    """
    said = _finished(out)
    before = len(said)
    everything = sum(len(p.turns) for p in prompts)
    waiting = [p for p in prompts if any(line_id(p.id, turn) not in said for turn in range(len(p.turns)))]
    out.parent.mkdir(parents=True, exist_ok=True)
    for chunk in _chunks(waiting):
        for turn in range(max(len(p.turns) for p in chunk)):
            asked = [p for p in chunk if len(p.turns) > turn and line_id(p.id, turn) not in said]
            if not asked:
                continue
            lines = {}
            for trace in answerer.answer(render_turn(asked, turn, said, chat, seed)):
                name = line_id(trace.prompt.prompt_id, turn)
                row: dict[str, Any] = {
                    "id": name,
                    "p": list(trace.prompt.token_ids),
                    "g": list(trace.answer_ids),
                    "finish": trace.finish,
                }
                lines[name] = json.dumps(row, separators=(",", ":"))
                said[name] = row["g"]
            with out.open("a") as file:
                # in the prompts' order, not in the order of finishing: the file is the same on every run
                file.write("".join(lines[line_id(p.id, turn)] + "\n" for p in asked))
            on_progress(len(said), everything)
    return len(said) - before


def _chunks(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), _CHUNK):
        yield prompts[start : start + _CHUNK]
