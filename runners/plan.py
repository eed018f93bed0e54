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

from specbench.benchmarks.lm_eval_tasks import PREFIX
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
    refused: tuple[str, ...] = ()
    """One sentence for each lm-eval task that cannot be run; the others are."""

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


def load_prompts(config: RunConfig, chat: ChatTokenizer, refused: list[str] | None = None) -> list[Prompt]:
    """Load all suites of a run.

    Args:
        config: names them.
        chat: the target's tokenizer.
        refused: gets a sentence for each lm-eval task that cannot be had while another suite can; None: they raise.

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
        num_fewshot=config.num_fewshot,
    )
    prompts: list[Prompt] = []
    for name in config.suite:
        try:
            prompts += load_suite(name).load(request)
        except UserError as error:
            # tasks depend on the hub, other people's code and other packages: one that fails leaves the others be
            if refused is None or not name.startswith(PREFIX) or len(config.suite) == 1:
                raise
            refused.append(str(error))
    if not prompts and refused:
        raise UserError("; ".join(refused))
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
    """Render one turn, the prompt's own answer limit and note kept."""
    rendered = condition.render(prompt, turn, answers, chat, seed)
    note = prompt.meta.get("note")
    return replace(
        rendered,
        max_new_tokens=prompt.max_new_tokens,
        stop_strings=prompt.stop_strings,
        notes=(*rendered.notes, note) if note else rendered.notes,
    )


def make_plan(config: RunConfig, chat: ChatTokenizer, target_limit: int) -> Plan:
    """Load, render and check everything a run needs before a model runs.

    Args:
        config: the run's options.
        chat: the target's tokenizer.
        target_limit: positions of the target.

    Raises:
        UserError: see :func:`load_prompts`; or a prompt that the target has no room for.
    """
    refused: list[str] = []
    prompts = load_prompts(config, chat, refused)
    conditions, skipped = usable_conditions(resolve_conditions(config.perturb, config.severity), chat)
    rendered = [
        render_turn(condition, prompt, 0, (), chat, config.seed)
        for condition in conditions
        for prompt in prompts
    ]
    kept = [r for r in rendered if not is_unchanged(r)]
    prompts, kept = _without_long_tasks(prompts, kept, target_limit, refused)
    _check_lengths(kept, target_limit)
    turns = {prompt.id: len(prompt.turns) for prompt in prompts}
    answers = _total(turns, kept, config)
    limits = {p.id: len(p.turns) * (p.max_new_tokens or config.max_new_tokens) for p in prompts}
    return Plan(
        prompts=tuple(prompts),
        conditions=tuple(conditions),
        first_turns=tuple(kept),
        skipped=tuple(skipped),
        unchanged=len(rendered) - len(kept),
        answers=answers,
        prompt_tokens=sum(len(r.token_ids) for r in kept),
        max_answer_tokens=_total(limits, kept, config),
        refused=tuple(refused),
    )


def _total(each: Mapping[str, int], kept: Sequence[RenderedPrompt], config: RunConfig) -> int:
    """Add up ``each`` prompt's number over all conditions and answer paths."""
    free = sum(each[r.prompt_id] for r in kept)
    forced = sum(each[r.prompt_id] for r in kept if r.condition.id != CLEAN)
    return {"free": free, "forced": forced + sum(each.values()), "both": free + forced}[config.answer_path]


def _without_long_tasks(
    prompts: list[Prompt], rendered: list[RenderedPrompt], limit: int, refused: list[str]
) -> tuple[list[Prompt], list[RenderedPrompt]]:
    """Leave out lm-eval tasks whose prompts, few-shot examples included, fill the target's positions.

    Raises:
        UserError: no other suite is left.
    """
    long: dict[str, int] = {}
    for r in rendered:
        if r.suite.startswith(PREFIX) and len(r.token_ids) >= limit:
            long[r.suite] = max(long.get(r.suite, 0), len(r.token_ids))
    for suite, length in long.items():
        shots = next(p.meta.get("num_fewshot", "0") for p in prompts if p.suite == suite)
        refused.append(
            f"{suite}: with {shots} few-shot examples its longest prompt has {length} tokens, but the target has "
            f"{limit} positions; give a smaller --num-fewshot"
        )
    left = [p for p in prompts if p.suite not in long]
    if not left:
        raise UserError("; ".join(refused))
    return left, [r for r in rendered if r.suite not in long]


def _check_lengths(rendered: Iterable[RenderedPrompt], limit: int) -> None:
    for prompt in rendered:
        if len(prompt.token_ids) >= limit:
            raise UserError(
                f"prompt {prompt.prompt_id} under {prompt.condition.id} has {len(prompt.token_ids)} tokens, but the "
                f"target has {limit} positions; use shorter lengths, or leave that prompt or condition out"
            )
