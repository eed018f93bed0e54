"""Edits of a dialogue before any template, and the seeds of what is random in them.

Example: ``put_system(draft, "Be brief.")`` makes "Be brief." the system message, with the task's own text
after it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace

from specbench.perturbations.condition import Draft, Piece, Setting, Turn


def random_for(*parts: object) -> random.Random:
    """Return a generator seeded by the words of ``parts`` alone: the same on every machine and in any
    order.
    """
    text = "\x1f".join(str(part) for part in parts)
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


def own_turn(draft: Draft, setting: Setting, turn: int) -> int:
    """Return where the prompt's own user turn ``turn`` stands among the draft's messages."""
    users = [i for i, message in enumerate(draft.turns) if message.role == "user"]
    return users[len(users) - (setting.turn + 1) + turn]


def system_text(draft: Draft) -> str | None:
    """Return the leading system message's text, None where there is none."""
    return draft.turns[0].content if draft.turns and draft.turns[0].role == "system" else None


def without_system(draft: Draft) -> Draft:
    """Return the draft without its leading system message."""
    return draft if system_text(draft) is None else replace(draft, turns=draft.turns[1:])


def put_system(draft: Draft, text: str) -> Draft:
    """Return the draft with ``text`` as system message; a system text of the task's own follows it."""
    own = system_text(draft)
    joined = text if own is None else f"{text}\n\n{own}"
    message = Turn(role="system", pieces=(Piece(text=joined, kind="system"),))
    return replace(draft, turns=(message, *without_system(draft).turns))


def edit_user_text(
    draft: Draft, setting: Setting, edit: Callable[[str, random.Random], str], name: str
) -> Draft:
    """Apply ``edit`` to the text of the prompt's own user turns, context left alone.

    Args:
        draft: the dialogue.
        setting: names the prompt and the seed.
        edit: takes a text and the generator of that text.
        name: of the edit; part of the seed.
    """
    turns = list(draft.turns)
    for turn in range(setting.turn + 1):
        at = own_turn(draft, setting, turn)
        pieces = tuple(
            replace(piece, text=edit(piece.text, random_for(setting.seed, setting.prompt.id, turn, i, name)))
            if piece.kind == "user"
            else piece
            for i, piece in enumerate(turns[at].pieces)
        )
        turns[at] = replace(turns[at], pieces=tuple(piece for piece in pieces if piece.text))
    return replace(draft, turns=tuple(turns))


def add_to_user_turns(draft: Draft, setting: Setting, after: str) -> Draft:
    """Append ``after`` to each of the prompt's own user turns."""
    turns = list(draft.turns)
    for turn in range(setting.turn + 1):
        at = own_turn(draft, setting, turn)
        turns[at] = replace(turns[at], pieces=(*turns[at].pieces, Piece(text=after, kind="user")))
    return replace(draft, turns=tuple(turns))
