"""A family of one condition: the user shouts.

Example: ``specbench show --suite haiku --perturb shout/loud``
"""

from __future__ import annotations

from dataclasses import replace

from specbench.perturbations.condition import Draft, Setting
from specbench.perturbations.stages import Staged
from specbench.types import ConditionInfo


def _capitals(draft: Draft, setting: Setting) -> Draft:
    turns = [
        replace(turn, pieces=tuple(replace(piece, text=piece.text.upper()) for piece in turn.pieces))
        if turn.role == "user"
        else turn
        for turn in draft.turns
    ]
    return replace(draft, turns=tuple(turns))


def conditions() -> list[Staged]:
    """Return the family's conditions."""
    info = ConditionInfo(
        id="shout/loud", family="shout", severity=2, description="The user writes in capitals."
    )
    return [Staged(info=info, messages=(_capitals,), claims=frozenset({"text"}), keeps_text=False)]
