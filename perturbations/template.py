"""Template conditions: what the chat template and BOS look like around an untouched dialogue.

Example: under ``template/no_template`` the prompt "Hi" is BOS (where the tokenizer has one) and the tokens of
"Hi".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specbench.perturbations import markup
from specbench.perturbations.condition import Draft, SegmentEdit, Setting, Stage
from specbench.perturbations.foreign import foreign_conditions
from specbench.perturbations.rendering import FIXED_DATE, ChatTokenizer, TurnMarkup
from specbench.perturbations.stages import LAYOUT_CLAIMS, RAW_CLAIMS, Staged
from specbench.perturbations.turns import put_system
from specbench.types import CLEAN, ConditionInfo

FAMILY = "template"

Requirement = Callable[[ChatTokenizer], str | None]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "description": "Look up the weather forecast of a town.",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string", "description": "Name of the town."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                },
                "required": ["town"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add_reminder",
            "description": "Store a reminder in the user's calendar.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "time": {"type": "string"}},
                "required": ["text", "time"],
            },
        },
    },
]
"""The tools that ``template/tools`` offers; no prompt needs them."""


# ---- what a condition needs


def _needs_bos(chat: ChatTokenizer) -> str | None:
    return "the tokenizer has no BOS token" if chat.bos_id is None else None


def _needs_clean_bos(chat: ChatTokenizer) -> str | None:
    return None if chat.clean_bos else "the clean rendering begins with no BOS token"


def _needs_template(chat: ChatTokenizer) -> str | None:
    if chat.template is None:
        return "the tokenizer has no chat template, so the clean condition is raw text"
    return None


def _needs_markup(has: Callable[[TurnMarkup], object], reason: str) -> Requirement:
    """The template must have what ``has`` looks for in its learned markup."""

    def check(chat: ChatTokenizer) -> str | None:
        if chat.template is None:
            return _needs_template(chat)
        return None if has(chat.markup(chat.template)) else reason

    return check


def _needs_words(words: tuple[str, ...], reason: str) -> Requirement:
    """The template's text must mention one of ``words``."""

    def check(chat: ChatTokenizer) -> str | None:
        if chat.template is None:
            return _needs_template(chat)
        return None if any(word in chat.template.source for word in words) else reason

    return check


def _headers(found: TurnMarkup) -> tuple[str, ...]:
    return (*found.heads.values(), found.generation)


# ---- the stages


def _raw_auto(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, template=None, bos="auto")


def _drop_bos(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, bos="drop")


def _double_bos(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, bos="double")


def _no_generation(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, generation=False)


def _plain(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, plain=True, bos="target", edits=(*draft.edits, markup.without_bos_text))


def _date(draft: Draft, setting: Setting) -> Draft:
    text = f"Today's date: {FIXED_DATE}"
    chat = setting.chat
    default = chat.markup(chat.template).default_system if chat.template is not None else None
    has_own = bool(draft.turns) and draft.turns[0].role == "system"
    return put_system(draft, text if has_own or not default else f"{text}\n\n{default}")


def _variables(**variables: Any) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        return replace(draft, variables={**draft.variables, **variables})

    return stage


# ---- the conditions


def _make(
    name: str,
    severity: int,
    description: str,
    reason: str,
    *,
    messages: tuple[Stage, ...] = (),
    template: tuple[Stage, ...] = (),
    edits: tuple[SegmentEdit, ...] = (),
    ids: tuple[Stage, ...] = (),
    claims: frozenset[str] = frozenset(),
    requires: tuple[Requirement, ...] = (),
) -> Staged:
    return Staged(
        info=ConditionInfo(
            id=f"{FAMILY}/{name}", family=FAMILY, severity=severity, description=description, reason=reason
        ),
        messages=messages,
        template=(*template, *(markup.as_stage(edit) for edit in edits)),
        ids=ids,
        claims=claims,
        requires=requires,
    )


REGULAR = Staged(
    info=ConditionInfo(
        id=CLEAN,
        family=FAMILY,
        severity=0,
        description="The target's own chat template with BOS as it writes it: the clean condition.",
        reason="What the drafter was trained for.",
    )
)

NO_BOS = _make(
    "no_bos",
    2,
    "The chat template without its leading BOS token.",
    "A server strips BOS from a templated prompt, or a template leaves it to a tokenizer that adds none.",
    ids=(_drop_bos,),
    claims=frozenset({"BOS"}),
    requires=(_needs_bos, _needs_clean_bos),
)

NO_TEMPLATE = _make(
    "no_template",
    2,
    "The user's raw text after BOS, no chat markup; turns and answers joined with blank lines.",
    "A completion endpoint is fed with the bare prompt and the tokenizer adds its BOS.",
    template=(_raw_auto,),
    claims=RAW_CLAIMS,
    requires=(_needs_template,),
)

NO_BOS_NO_TEMPLATE = _make(
    "no_bos_no_template",
    3,
    "The user's raw text alone: no chat markup, no BOS.",
    "Raw text is tokenised with special tokens switched off.",
    template=(_raw_auto,),
    ids=(_drop_bos,),
    claims=RAW_CLAIMS | {"BOS"},
    requires=(_needs_template, _needs_bos),
)


def _structure() -> tuple[Staged, ...]:
    """Markup with something missing, doubled or misspelt."""
    newline = _needs_markup(
        lambda found: any(head.endswith("\n") for head in _headers(found)),
        "the template ends no role header with a newline",
    )
    return (
        _make(
            "double_bos",
            2,
            "The chat template with one BOS token too many in front.",
            "Text rendered by the template is tokenised again by a tokenizer that adds BOS.",
            ids=(_double_bos,),
            claims=frozenset({"BOS"}),
            requires=(_needs_bos, _needs_clean_bos),
        ),
        _make(
            "no_generation",
            2,
            "No header that opens the assistant's answer.",
            "add_generation_prompt was forgotten.",
            template=(_no_generation,),
            claims=frozenset({"generation header"}),
            requires=(
                _needs_markup(lambda found: found.generation, "the template writes no generation header"),
            ),
        ),
        _make(
            "no_eot",
            2,
            "End-of-turn markup left out after every message.",
            "Hand-written prompts and templates trimmed for training data.",
            edits=(markup.drop_ends,),
            claims=frozenset({"turn ends"}),
            requires=(
                _needs_markup(
                    lambda found: any(tail.strip() for tail in found.tails.values()),
                    "the template writes no end-of-turn markup that can be told apart",
                ),
            ),
        ),
        _make(
            "extra_newline",
            1,
            "One newline more after every role header.",
            "White space control in a Jinja template slips.",
            edits=(markup.double_newline,),
            claims=frozenset({"header newlines"}),
            requires=(newline,),
        ),
        _make(
            "missing_newline",
            2,
            "No newline between a role header and the text after it.",
            "Prompts put together by hand from the model card.",
            edits=(markup.drop_newline,),
            claims=frozenset({"header newlines"}),
            requires=(newline,),
        ),
        _make(
            "newline_after_text",
            1,
            "A newline between the user's text and the markup after it.",
            "Input read from a file or a text box keeps its last newline.",
            edits=(markup.newline_after_text,),
            claims=frozenset({"text ends"}),
            requires=(_needs_template,),
        ),
        _make(
            "trailing_space",
            1,
            "A space at the end of the prompt, after the generation header.",
            "A prompt string that ends in 'Assistant: '.",
            edits=(markup.trailing_space,),
            claims=frozenset({"prompt end"}),
        ),
        _make(
            "roles_renamed",
            2,
            "Role names changed: user to human, assistant or model to bot, system to context.",
            "Data sets in the ShareGPT layout rendered without mapping the roles.",
            edits=(markup.rename_roles,),
            claims=frozenset({"role names"}),
            requires=(
                _needs_markup(
                    lambda found: any(markup.renamed(head) != head for head in _headers(found)),
                    "the template writes no role names",
                ),
            ),
        ),
        _make(
            "plain_markup",
            3,
            "The template's special tokens written as ordinary text; BOS stays a token.",
            "A server that does not parse special tokens in text, as a guard against injection.",
            template=(_plain,),
            claims=frozenset({"markup tokens", "BOS"}),
            requires=(
                _needs_template,
                lambda chat: None if chat.template_specials() else "the template writes no special tokens",
            ),
        ),
    )


def _settings() -> tuple[Staged, ...]:
    """What a template offers as a switch: system prompt, date, tools, thinking."""
    thinks = _needs_words(("enable_thinking", "thinking"), "the template has no thinking switch")
    return (
        _make(
            "no_default_system",
            1,
            "Without the system prompt that the template writes when none is given.",
            "Another version of the template, or another server's copy of it.",
            edits=(markup.drop_default_system,),
            claims=frozenset({"system prompt", "default system"}),
            requires=(
                _needs_markup(
                    lambda found: found.default_system is not None,
                    "the template writes no default system prompt that can be told apart",
                ),
            ),
        ),
        _make(
            "date",
            1,
            "A line with a fixed date opens the system prompt.",
            "Assistants are told the date by most products.",
            messages=(_date,),
            claims=frozenset({"system prompt"}),
        ),
        _make(
            "tools",
            2,
            "Two tools are offered that the prompt does not need.",
            "Agent frameworks send their tool list with every request.",
            template=(_variables(tools=TOOLS),),
            claims=frozenset({"tools"}),
            requires=(_needs_words(("tools",), "the template takes no tool list"),),
        ),
        _make(
            "think_on",
            1,
            "Thinking switched on.",
            "The switch's default differs between model versions and servers.",
            template=(_variables(enable_thinking=True, thinking=True),),
            claims=frozenset({"thinking"}),
            requires=(thinks,),
        ),
        _make(
            "think_off",
            1,
            "Thinking switched off.",
            "Served without thinking, for cost, while the drafter was trained with it or the reverse.",
            template=(_variables(enable_thinking=False, thinking=False),),
            claims=frozenset({"thinking"}),
            requires=(thinks,),
        ),
        _make(
            "think_empty",
            2,
            "The answer opens with an empty think block.",
            "The usual way to keep a thinking model from thinking where the server has no switch.",
            edits=(markup.empty_thoughts,),
            claims=frozenset({"thinking", "prompt end", "generation header"}),
            requires=(_needs_words(("<think>",), "the template knows no think block"),),
        ),
    )


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions, the clean one first."""
    paper = (REGULAR, NO_BOS, NO_TEMPLATE, NO_BOS_NO_TEMPLATE)
    return (*paper, *_structure(), *_settings(), *foreign_conditions(LAYOUT_CLAIMS))
