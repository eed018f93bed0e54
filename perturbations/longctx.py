"""Long-context conditions: the same question in a prompt padded to an exact length in target tokens.

The length is that of the whole rendered prompt of the first turn, whatever template the condition is
composed with; later turns keep the padding of the first. Paddings of one prompt are beginnings of one text,
so that a longer condition holds what the shorter one held.

Example: under ``longctx/unrelated_end_2k`` a prompt is 2,048 tokens long and the question is its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from specbench.perturbations.condition import Draft, Piece, Setting, Stage, Turn
from specbench.perturbations.prose import Prose, data, fit
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.stages import Staged, measure
from specbench.perturbations.turns import own_turn
from specbench.types import ConditionInfo

FAMILY = "longctx"
LENGTHS = {
    "512": 512,
    "1k": 1024,
    "2k": 2048,
    "4k": 4096,
    "8k": 8192,
    "16k": 16384,
    "32k": 32768,
    "64k": 65536,
    "128k": 131072,
}
"""Names -> prompt lengths in target tokens."""

Place = Literal["start", "middle", "end"]
Padding = Literal["unrelated", "related", "turns"]

_DESCRIPTIONS = {
    "unrelated": "stories that have nothing to do with the question",
    "related": "notes that use the question's own words but do not answer it",
    "turns": "a finished dialogue",
}
_NUM_WORDS = 12


def put_around(turn: Turn, padding: str, place: Place) -> Turn:
    """Return a user turn with ``padding`` as context; ``place`` is where the question is."""
    if not padding:
        return turn
    if place == "start":
        return replace(turn, pieces=(*turn.pieces, Piece(text=f"\n\n{padding}", kind="context")))
    if place == "end":
        return replace(turn, pieces=(Piece(text=f"{padding}\n\n", kind="context"), *turn.pieces))
    # A paragraph's end moves less than the middle does while the length is being fitted.
    middle = len(padding) // 2
    cut = max(padding.rfind("\n\n", 0, middle), 0) or max(padding.rfind(" ", 0, middle), 0)
    before, after = padding[:cut].rstrip(), padding[cut:].lstrip()
    pieces = (Piece(text=f"{before}\n\n", kind="context"), *turn.pieces)
    return replace(turn, pieces=(*pieces, Piece(text=f"\n\n{after}", kind="context")))


def as_dialogue(padding: str) -> tuple[Turn, ...]:
    """Return a finished dialogue that tells ``padding`` paragraph by paragraph."""
    questions = data()["dialogue"]["questions"]
    turns: list[Turn] = []
    for i, paragraph in enumerate(part for part in padding.split("\n\n") if part):
        question = questions[i % len(questions)] if i else "Please read me the notes."
        turns.append(Turn(role="user", pieces=(Piece(text=question, kind="context"),)))
        turns.append(Turn(role="assistant", pieces=(Piece(text=paragraph, kind="context"),)))
    return tuple(turns)


def longest_words(text: str, count: int = _NUM_WORDS) -> list[str]:
    """Return the ``count`` longest distinct words of ``text``, longest first, then in order of appearance."""
    words = dict.fromkeys(word for word in re.findall(r"[^\W\d_]+", text) if len(word) > 3)
    return sorted(words, key=len, reverse=True)[:count]


def _pad(padding: Padding, place: Place, length: int) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        at = own_turn(draft, setting, 0)
        first = replace(draft, turns=draft.turns[: at + 1])
        put = _putter(padding, place, at)
        key = (FAMILY, padding, place, length, setting.seed, setting.rest, first.turns, setting.prompt.id)
        text: str | None = setting.chat.remember(key, lambda: _fitted(first, setting, put, padding, length))
        if text is None:
            return draft.note(f"the prompt is {length:,} tokens or longer as it is: not padded")
        return put(draft, text)

    return stage


def _putter(padding: Padding, place: Place, at: int) -> Callable[[Draft, str], Draft]:
    def put(draft: Draft, text: str) -> Draft:
        before, own, after = draft.turns[:at], draft.turns[at], draft.turns[at + 1 :]
        if padding == "turns":
            return replace(draft, turns=(*before, *as_dialogue(text), own, *after))
        return replace(draft, turns=(*before, put_around(own, text, place), *after))

    return put


def _fitted(
    draft: Draft, setting: Setting, put: Callable[[Draft, str], Draft], padding: Padding, length: int
) -> str | None:
    """Return the padding that makes the rendered first turn ``length`` tokens long; None if it is that
    already.
    """
    opening = replace(setting, turn=0)

    def tokens(text: str) -> int:
        return measure(put(draft, text), opening)

    if tokens("") >= length:
        return None
    words = longest_words(draft.turns[-1].content) if padding == "related" else []
    prose = Prose(
        "related" if padding == "related" else "story", seed=(setting.seed, setting.prompt.id), words=words
    )
    return fit(prose, tokens, length, f"prompt {setting.prompt.id}")


def _make(padding: Padding, place: Place, name: str, length: int) -> Staged:
    def fits(chat: ChatTokenizer) -> str | None:
        return chat.too_long(length)

    where = f"the question at the {place}" if padding != "turns" else "before the question"
    return Staged(
        info=ConditionInfo(
            id=f"{FAMILY}/{padding}_{name}" if padding == "turns" else f"{FAMILY}/{padding}_{place}_{name}",
            family=FAMILY,
            severity=1 if length <= 1024 else 2 if length <= 4096 else 3,
            description=f"Padded to {length:,} target tokens with {_DESCRIPTIONS[padding]}, {where}.",
            reason="Documents, retrieved passages and long dialogues; drafters are trained on short ones.",
            parameters={"length": str(length), "padding": padding, "question": place},
        ),
        messages=(_pad(padding, place, length),),
        claims=frozenset({"context"}),
        requires=(fits,),
    )


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions, shortest first."""
    kinds: list[tuple[Padding, Place]] = [("unrelated", "start"), ("unrelated", "middle")]
    kinds += [("unrelated", "end")]
    kinds += [("related", "start"), ("related", "middle"), ("related", "end"), ("turns", "end")]
    return tuple(_make(*kind, name, length) for name, length in LENGTHS.items() for kind in kinds)
