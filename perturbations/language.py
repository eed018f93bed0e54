"""Language conditions: the answer asked for in another language, or the prompt itself translated.

Example: ``language/answer_fr`` ends each user turn with "Answer in French."; ``language/ask_fr`` puts a
prompt of the ``mini`` suite into French and leaves every other prompt unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from specbench.perturbations.condition import Draft, Piece, Setting, Stage
from specbench.perturbations.stages import Staged
from specbench.perturbations.turns import add_to_user_turns, own_turn
from specbench.types import ConditionInfo

FAMILY = "language"

ANSWER_IN = {
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "pt": "Portuguese",
    "it": "Italian",
    "ru": "Russian",
    "zh": "Chinese",
    "ja": "Japanese",
    "ko": "Korean",
    "ar": "Arabic",
}
"""Code -> name of the languages answers are asked for in."""

TRANSLATED = ("de", "fr", "es", "pt", "ru", "zh", "ja")
"""Languages the bundled prompts are translated into."""


@cache
def translations() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return prompt id -> language -> turns; ``en`` is the wording that was translated."""
    file = resources.files("specbench.perturbations") / "data" / "translations.json"
    loaded: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def _answer_in(language: str) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        return add_to_user_turns(draft, setting, f"\n\nAnswer in {language}.")

    return stage


def _translate(code: str) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        table = translations().get(setting.prompt.id)
        if table is None or list(table["en"]) != list(setting.prompt.turns):
            return draft.note("there is no translation of this prompt")
        turns = list(draft.turns)
        for turn in range(setting.turn + 1):
            at = own_turn(draft, setting, turn)
            turns[at] = replace(turns[at], pieces=(Piece(text=table[code][turn], kind="user"),))
        return replace(draft, turns=tuple(turns))

    return stage


def _make(
    name: str, severity: int, description: str, reason: str, code: str, stage: Stage, asks: bool
) -> Staged:
    return Staged(
        info=ConditionInfo(
            id=f"{FAMILY}/{name}",
            family=FAMILY,
            severity=severity,
            description=description,
            reason=reason,
            parameters={"language": code},
        ),
        messages=(stage,),
        claims=frozenset({"words", "language"}) if asks else frozenset({"language"}),
        keeps_text=not asks,
    )


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions."""
    answers = tuple(
        _make(
            f"answer_{code}",
            2,
            f"Each user turn ends with the request to answer in {language}.",
            "Users ask English-trained assistants for answers in their own language.",
            code,
            _answer_in(language),
            False,
        )
        for code, language in ANSWER_IN.items()
    )
    asked = tuple(
        _make(
            f"ask_{code}",
            2,
            f"The built-in prompts translated into {ANSWER_IN[code]}; other suites unchanged.",
            "Users write in their own language; drafters are trained mostly on English.",
            code,
            _translate(code),
            True,
        )
        for code in TRANSLATED
    )
    return answers + asked
