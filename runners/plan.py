"""The run plan: everything that can be known, checked and refused before a model runs.

Example:
    plan = make_plan(config, chat, target_limit=8192)
    len(plan.prompts), [c.info.id for c in plan.conditions], plan.first_turns[0].token_ids
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specbench.benchmarks.resolve import load_suite
from specbench.config import RunConfig
from specbench.errors import UserError
from specbench.perturbations.condition import Condition
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import resolve_conditions
from specbench.types import CLEAN, Prompt, RenderedPrompt, SuiteRequest

UNCHANGED = "unchanged:"
"""Prefix of the note on a prompt that a condition left as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do."""

    prompts: tuple[Prompt, ...]
    conditions: tuple[Condition, ...]
    first_turns: tuple[RenderedPrompt, ...]
    """Every prompt's first turn under every condition; conditions that change nothing are left out."""
    skipped: tuple[str, ...]
    """One sentence for each condition that makes no sense here."""
    unchanged: int
    """Rendered prompts left out because the condition left them as they were."""
    answers: int
    """Target answers over all turns and answer paths."""
    prompt_tokens: int
    """Of the first turns."""
    max_answer_tokens: int
    details: Mapping[str, str] = field(default_factory=dict)
    """Lines of the printed plan that replace the usual ones of that label, or follow them; "" drops a line."""

    @property
    def prompts_hash(self) -> str:
        """16 hex digits over all rendered first turns: equal hash, equal ids."""
        digest = hashlib.sha256()
        for rendered in self.first_turns:
            digest.update(repr((rendered.key, rendered.ids_hash)).encode())
        return digest.hexdigest()[:16]

    @property
    def later_turns_hash(self) -> str:
        """16 hex digits over the user texts behind the first turns, which are rendered once answers are there."""
        later = [(prompt.id, prompt.turns[1:]) for prompt in self.prompts if len(prompt.turns) > 1]
        return hashlib.sha256(repr(later).encode()).hexdigest()[:16]


def data_directory(config: RunConfig) -> Path | None:
    """--data-dir, else SPECBENCH_DATA.

    Raises:
        UserError: it is no directory.
    """
    name = config.data_dir or os.environ.get("SPECBENCH_DATA")
    if not name:
        return None
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UserError(
            f"the data directory {path} does not exist; set --data-dir or SPECBENCH_DATA to one that does"
        )
    return path


def load_prompts(config: RunConfig, chat: ChatTokenizer) -> list[Prompt]:
    """Load all suites of a run.

    Raises:
        UserError: an unknown suite, a missing or malformed file, or two prompts of one id.
    """
    if not config.suite:
        raise UserError("--suite names no prompts; `specbench list suites` shows what there is")
    (clean,) = resolve_conditions([CLEAN])
    request = SuiteRequest(
        data_dir=data_directory(config),
        limit=config.limit,
        seed=config.seed,
        lengths=config.lengths,
        text_file=Path(config.longctx_text).expanduser() if config.longctx_text else None,
        count_tokens=lambda prompt: len(clean.render(prompt, 0, (), chat, config.seed).token_ids),
    )
    prompts = [prompt for name in config.suite for prompt in load_suite(name).load(request)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(
                f"two prompts have the id {prompt.id!r}; give each suite once, and each prompt its own id"
            )
        seen.add(prompt.id)
    if not prompts:
        raise UserError(f"the suites {', '.join(config.suite)} hold no prompts")
    return prompts


def usable_conditions(
    conditions: Sequence[Condition], chat: ChatTokenizer
) -> tuple[list[Condition], list[str]]:
    """Split conditions into those this tokenizer can have, and a sentence for each it cannot."""
    usable, skipped = [], []
    for condition in conditions:
        reason = condition.available(chat)
        if reason is None:
            usable.append(condition)
        else:
            skipped.append(f"{condition.info.id}: {reason}")
    if not any(condition.info.id == CLEAN for condition in usable):
        raise UserError(
            f"nothing to compare with: {CLEAN} cannot be rendered ({'; '.join(skipped)}); give one with --template"
        )
    return usable, skipped


def is_unchanged(rendered: RenderedPrompt) -> bool:
    """Whether the condition left this prompt as the clean one has it."""
    return any(note.startswith(UNCHANGED) for note in rendered.notes)


def render_turn(
    condition: Condition, prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer, seed: int
) -> RenderedPrompt:
    """Render one turn, the prompt's own answer limit kept."""
    rendered = condition.render(prompt, turn, answers, chat, seed)
    return replace(rendered, max_new_tokens=prompt.max_new_tokens)


def make_plan(config: RunConfig, chat: ChatTokenizer, target_limit: int) -> Plan:
    """Load, render and check everything a run needs before a model runs.

    Args:
        config: the run's options.
        chat: the target's tokenizer.
        target_limit: positions of the target.

    Raises:
        UserError: see :func:`load_prompts`; or a prompt that the target has no room for.
    """
    prompts = load_prompts(config, chat)
    conditions, skipped = usable_conditions(resolve_conditions(config.perturb, config.severity), chat)
    rendered = [
        render_turn(condition, prompt, 0, (), chat, config.seed)
        for condition in conditions
        for prompt in prompts
    ]
    kept = [r for r in rendered if not is_unchanged(r)]
    _check_lengths(kept, target_limit)
    turns = {prompt.id: len(prompt.turns) for prompt in prompts}
    free = sum(turns[r.prompt_id] for r in kept)
    forced = sum(turns[r.prompt_id] for r in kept if r.condition.id != CLEAN)
    answers = {"free": free, "forced": forced + sum(turns.values()), "both": free + forced}[
        config.answer_path
    ]
    return Plan(
        prompts=tuple(prompts),
        conditions=tuple(conditions),
        first_turns=tuple(kept),
        skipped=tuple(skipped),
        unchanged=len(rendered) - len(kept),
        answers=answers,
        prompt_tokens=sum(len(r.token_ids) for r in kept),
        max_answer_tokens=answers * config.max_new_tokens,
    )


def _check_lengths(rendered: Iterable[RenderedPrompt], limit: int) -> None:
    for prompt in rendered:
        if len(prompt.token_ids) >= limit:
            raise UserError(
                f"prompt {prompt.prompt_id} under {prompt.condition.id} has {len(prompt.token_ids)} tokens, but the "
                f"target has {limit} positions; use shorter lengths, or leave that prompt or condition out"
            )
