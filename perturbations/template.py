"""Template conditions: what the chat template and BOS look like around an untouched dialogue.

Example: under ``template/no_template`` the prompt "Hi" is BOS (where the tokenizer has one) and the tokens
of "Hi".
"""

from __future__ import annotations

from dataclasses import replace

from specbench.perturbations.condition import Draft, Setting
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.stages import Staged
from specbench.types import CLEAN, ConditionInfo

FAMILY = "template"


def _raw_auto(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, template=None, bos="auto")


def _drop_bos(draft: Draft, setting: Setting) -> Draft:
    return replace(draft, bos="drop")


def _needs_bos(chat: ChatTokenizer) -> str | None:
    return "the tokenizer has no BOS token" if chat.bos_id is None else None


def _needs_template_bos(chat: ChatTokenizer) -> str | None:
    return None if chat.clean_bos else "the clean rendering begins with no BOS token"


def _needs_template(chat: ChatTokenizer) -> str | None:
    return (
        "the tokenizer has no chat template, so the clean condition is raw text"
        if chat.template is None
        else None
    )


def _info(name: str, severity: int, description: str, reason: str, **parameters: str) -> ConditionInfo:
    return ConditionInfo(
        id=f"{FAMILY}/{name}",
        family=FAMILY,
        severity=severity,
        description=description,
        reason=reason,
        parameters=parameters,
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

NO_BOS = Staged(
    info=_info(
        "no_bos",
        2,
        "The chat template without its leading BOS token.",
        "A server strips BOS from a templated prompt, or a template leaves it to a tokenizer that adds none.",
    ),
    ids=(_drop_bos,),
    claims=frozenset({"BOS"}),
    requires=(_needs_bos, _needs_template_bos),
)

NO_TEMPLATE = Staged(
    info=_info(
        "no_template",
        2,
        "The user's raw text after BOS, no chat markup; turns and answers joined with blank lines.",
        "A completion endpoint is fed with the bare prompt and the tokenizer adds its BOS.",
    ),
    template=(_raw_auto,),
    claims=frozenset({"layout", "BOS"}),
    requires=(_needs_template,),
)

NO_BOS_NO_TEMPLATE = Staged(
    info=_info(
        "no_bos_no_template",
        3,
        "The user's raw text alone: no chat markup, no BOS.",
        "Raw text is tokenised with special tokens switched off.",
    ),
    template=(_raw_auto,),
    ids=(_drop_bos,),
    claims=frozenset({"layout", "BOS"}),
    requires=(_needs_template, _needs_bos),
)


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions, the clean one first."""
    return (REGULAR, NO_BOS, NO_TEMPLATE, NO_BOS_NO_TEMPLATE)
