"""System-prompt conditions: what stands before an untouched dialogue.

A system text that belongs to the task itself is kept: it follows the condition's own.

Example: under ``system/long_1k`` the system message is 1,024 target tokens of an invented support desk's
rules.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.perturbations import markup
from specbench.perturbations.condition import Draft, Piece, Setting, Stage
from specbench.perturbations.prose import Kind, Prose, data, fit
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.stages import Staged
from specbench.perturbations.turns import put_system, system_text, without_system
from specbench.types import ConditionInfo

FAMILY = "system"
LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096}
"""Names of the long system prompts -> their length in target tokens."""


def exact_text(kind: Kind, length: int, chat: ChatTokenizer) -> str:
    """Return bundled prose of exactly ``length`` target tokens (cached)."""

    def make() -> str:
        return fit(Prose(kind), chat.count, length, f"{kind} text")

    text: str = chat.remember(("prose", kind, length), make)
    return text


def _fixed(name: str) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        return put_system(draft, data()["system"][name])

    return stage


def _long(kind: Kind, length: int) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        return put_system(draft, exact_text(kind, length, setting.chat))

    return stage


def _none(draft: Draft, setting: Setting) -> Draft:
    return without_system(draft)


def _into_user(draft: Draft, setting: Setting) -> Draft:
    """Open the first user message with the system text there would have been, or with one line where none
    is.
    """
    chat = setting.chat
    default = chat.markup(chat.template).default_system if chat.template is not None else None
    text = system_text(draft) or default or data()["system"]["one_line"]
    turns = list(without_system(draft).turns)
    at = next(i for i, turn in enumerate(turns) if turn.role == "user")
    turns[at] = replace(turns[at], pieces=(Piece(text=f"{text}\n\n", kind="system"), *turns[at].pieces))
    return replace(draft, turns=tuple(turns))


def _make(
    name: str,
    severity: int,
    description: str,
    reason: str,
    stage: Stage,
    *,
    bare: bool = False,
    tokens: int = 0,
) -> Staged:
    """Make one condition; ``bare`` leaves out the template's own system prompt, ``tokens`` must fit the
    target.
    """

    def fits(chat: ChatTokenizer) -> str | None:
        return chat.too_long(tokens)

    return Staged(
        info=ConditionInfo(
            id=f"{FAMILY}/{name}",
            family=FAMILY,
            severity=severity,
            description=description,
            reason=reason,
            parameters={"system_tokens": str(tokens)} if tokens else {},
        ),
        messages=(stage,),
        template=(markup.as_stage(markup.drop_default_system),) if bare else (),
        claims=frozenset({"system prompt"}),
        requires=(fits,) if tokens else (),
    )


def _short() -> tuple[Staged, ...]:
    return (
        _make(
            "none",
            1,
            "No system prompt at all, the template's default and the task's own left out.",
            "Most API calls send only a user message.",
            _none,
            bare=True,
        ),
        _make(
            "one_line",
            1,
            "A system prompt of one line.",
            "The line that tutorials copy.",
            _fixed("one_line"),
        ),
        _make(
            "persona",
            1,
            "A character with a voice of its own.",
            "Chat products give the assistant a personality.",
            _fixed("persona"),
        ),
        _make(
            "json_only",
            2,
            "Format rules: one JSON object and nothing else.",
            "Pipelines parse the answer.",
            _fixed("json_only"),
        ),
        _make(
            "safety",
            2,
            "A long safety text of general rules.",
            "Vendors and EAGLE's own evaluation prepend one.",
            _fixed("safety"),
        ),
        _make(
            "german",
            2,
            "A system prompt in German, the dialogue as it is.",
            "Operators write the system prompt in their own language.",
            _fixed("german"),
        ),
        _make(
            "chinese",
            2,
            "A system prompt in Chinese, the dialogue as it is.",
            "Operators write the system prompt in their own language.",
            _fixed("chinese"),
        ),
        _make(
            "in_user",
            2,
            "The system text (or one line) opens the first user message instead.",
            "Clients without a system field, and templates that reject the role.",
            _into_user,
            bare=True,
        ),
    )


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions."""
    policies = tuple(
        _make(
            f"long_{name}",
            2 if length <= 1024 else 3,
            f"A system prompt of {length:,} target tokens of policy.",
            "Agents and support desks carry their rule books with every request.",
            _long("policy", length),
            tokens=length,
        )
        for name, length in LENGTHS.items()
    )
    irrelevant = tuple(
        _make(
            f"irrelevant_{name}",
            3,
            f"A system prompt of {length:,} target tokens of stories that have nothing to do with the task.",
            "Retrieved or left-over text in the system field; tells length apart from content.",
            _long("story", length),
            tokens=length,
        )
        for name, length in LENGTHS.items()
    )
    return (*_short(), *policies, *irrelevant)
