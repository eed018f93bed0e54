"""``specbench show``: a prompt under a condition, as the target receives it.

Example: ``specbench show template/llama3 --suite mini --prompt mini/math-1``
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from specbench.cli.options import numbers
from specbench.errors import UserError, unknown_name
from specbench.types import CLEAN, Prompt, RenderedPrompt

if TYPE_CHECKING:
    from rich.text import Text

    from specbench.perturbations.condition import Condition
    from specbench.perturbations.rendering import ChatTokenizer

STYLES = {
    "bos": "black on yellow",
    "system": "magenta",
    "markup": "dim",
    "user": "bold cyan",
    "assistant": "green",
    "context": "blue",
    "generation": "yellow",
}
"""Span kind -> rich style."""

ANSWER = "(the target's answer)"
"""Stands for the answers to earlier turns, which only a run knows."""

_KEPT = 6
"""Tokens shown around each difference."""


@click.command()
@click.argument("condition")
@click.option("--suite", default="mini", show_default=True, help="Where the prompt is taken from.")
@click.option("--prompt", "prompt_id", help="The prompt's id; default: the suite's first.")
@click.option("--turn", type=int, default=1, show_default=True, help="Which of its turns, from 1.")
@click.option(
    "--target", default="smollm2-135m", show_default=True, help="Whose tokenizer and chat template."
)
@click.option("--template", type=click.Path(dir_okay=False), help="A Jinja chat template instead of its own.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--data-dir", type=click.Path(file_okay=False), help="Folder with published prompt files.")
@click.option("--lengths", callback=numbers, default="512,2048", help="Prompt lengths for the suite longctx.")
@click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code.")
def show(condition: str, suite: str, prompt_id: str | None, turn: int, seed: int, **options: Any) -> None:
    """Show a prompt under CONDITION: spans, token and BOS counts, and what differs from the clean rendering.

    CONDITION is a name of `specbench list perturbations`, or several of them joined by +. Nothing is run: the
    answers to earlier turns are stood for by a placeholder.
    """
    from rich.console import Console

    from specbench.config import RunConfig
    from specbench.runners.pipeline import load_chat
    from specbench.runners.plan import load_prompts
    from specbench.runners.targets import load_tokenizer

    chosen = one_condition(condition)
    config = RunConfig(suite=(suite,), seed=seed, **options)
    tokenizer, positions = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    chat = load_chat(tokenizer, config)
    chat.max_positions = positions
    prompt = pick_prompt(load_prompts(config, chat), prompt_id)
    if not 1 <= turn <= len(prompt.turns):
        raise UserError(f"--turn {turn}: prompt {prompt.id} has turns 1 to {len(prompt.turns)}")
    if reason := chosen.available(chat):
        raise UserError(f"{chosen.info.id} makes no sense for {config.target}: {reason}")
    answers = [ANSWER] * (turn - 1)
    rendered = chosen.render(prompt, turn - 1, answers, chat, seed)
    clean = one_condition(CLEAN).render(prompt, turn - 1, answers, chat, seed)
    print_rendering(Console(highlight=False, soft_wrap=True), rendered, clean, chat)


def list_rows() -> list[tuple[str, str, int, str, str]]:
    """Return (id, family, severity, description, reason) of every condition, family by family."""
    from specbench.perturbations.resolve import all_conditions

    infos = [condition.info for condition in all_conditions()]
    return [(info.id, info.family, info.severity, info.description, info.reason) for info in infos]


def one_condition(name: str) -> Condition:
    """Return the one condition that ``name`` stands for.

    Raises:
        UserError: it is unknown, or names several.
    """
    from specbench.perturbations.resolve import resolve_conditions

    found = resolve_conditions([name])
    others = [condition for condition in found if condition.info.id != CLEAN]
    if len(others) > 1:
        ids = ", ".join(condition.info.id for condition in others[:3])
        raise UserError(f"{name!r} names {len(others)} conditions ({ids}, ...); give one of them")
    return others[0] if others else found[0]


def pick_prompt(prompts: Sequence[Prompt], prompt_id: str | None) -> Prompt:
    """Return the prompt with that id (its suite's name may be left out), or the first.

    Raises:
        UserError: there is none.
    """
    if prompt_id is None:
        return prompts[0]
    for prompt in prompts:
        if prompt_id in (prompt.id, prompt.id.partition("/")[2]):
            return prompt
    raise unknown_name("prompt", prompt_id, [prompt.id for prompt in prompts])


def print_rendering(
    console: Any, rendered: RenderedPrompt, clean: RenderedPrompt, chat: ChatTokenizer
) -> None:
    """Print a rendering: the text by spans, counts, notes, and the difference from ``clean``."""
    info = rendered.condition
    console.print(
        f"[bold]{info.id}[/bold]  severity {info.severity}  prompt {rendered.prompt_id}", soft_wrap=True
    )
    console.print(f"{info.description} {info.reason}".strip(), style="dim")
    console.print()
    console.print(by_spans(rendered, chat) if console.is_terminal else span_lines(rendered, chat))
    console.print()
    sizes = Counter[str]()
    for span in rendered.spans:
        sizes[span.kind] += span.end - span.start
    shares = ", ".join(f"{kind} {size}" for kind, size in sizes.items())
    console.print(f"{len(rendered.token_ids)} tokens ({shares}), clean {len(clean.token_ids)}")
    console.print(f"BOS count {rendered.bos_count}, clean {clean.bos_count}")
    console.print(f"ids {rendered.ids_hash}, template {rendered.template_hash or 'none'}")
    for note in rendered.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    if info.id != CLEAN:
        console.print()
        console.print(difference(clean, rendered, chat))


def by_spans(rendered: RenderedPrompt, chat: ChatTokenizer) -> Text:
    """Return the rendered text, each span in its kind's style, after a legend."""
    from rich.text import Text

    kinds = dict.fromkeys(span.kind for span in rendered.spans)
    text = Text(" ").join(Text(kind, style=STYLES[kind]) for kind in kinds)
    text.append("\n\n")
    for span in rendered.spans:
        piece = chat.decode(rendered.token_ids[span.start : span.end])
        if span.kind in ("bos", "markup", "generation"):
            piece = piece.replace("\n", "\u21b5\n")
        text.append(piece, style=STYLES[span.kind])
    return text


def span_lines(rendered: RenderedPrompt, chat: ChatTokenizer) -> Text:
    """Return a line per span (positions, kind, text), for output without colours."""
    from rich.text import Text

    lines = (
        f"{span.start:>6} {span.end:>6}  {span.kind:<10}  {chat.decode(rendered.token_ids[span.start : span.end])!r}"
        for span in rendered.spans
    )
    return Text("\n".join([f"{'start':>6} {'end':>6}  {'kind':<10}  text", *lines]))


def difference(clean: RenderedPrompt, rendered: RenderedPrompt, chat: ChatTokenizer) -> Text:
    """Return what was taken out of the clean token ids and what was put in, with a few tokens around."""
    from rich.text import Text

    before, after = clean.token_ids, rendered.token_ids
    text = Text("difference from the clean rendering, in tokens:\n")
    if before == after:
        return text.append("none\n")
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for group in matcher.get_grouped_opcodes(_KEPT):
        text.append(
            f"@@ clean {group[0][1]}-{group[-1][2]}, here {group[0][3]}-{group[-1][4]} @@\n", style="dim"
        )
        for what, a0, a1, b0, b1 in group:
            if what == "equal":
                text.append(f"  {chat.decode(before[a0:a1])!r}\n")
            if a1 > a0 and what != "equal":
                text.append(f"- {chat.decode(before[a0:a1])!r}  ({a1 - a0})\n", style="red")
            if b1 > b0 and what != "equal":
                text.append(f"+ {chat.decode(after[b0:b1])!r}  ({b1 - b0})\n", style="green")
    return text
