"""What the forced answers cost beside the free ones: ``python perf/both_paths.py``.

Every prompt of a suite is answered under one condition, and the clean answer is forced behind the same prompt: once in
the same call, going on from the prompt's keys and values, and once by itself. Prints seconds and ratios to free answers
alone, in one process, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from specbench.config import RunConfig
from specbench.perturbations.rendering import ChatTokenizer
from specbench.runners.answers import Answerer, GivenAnswer
from specbench.runners.plan import make_plan
from specbench.runners.targets import Target
from specbench.types import CLEAN, Trace


@click.command()
@click.option("--suite", default="gsm8k")
@click.option("--condition", default="system/safety", help="The perturbed prompts.")
@click.option("--target", "target_name", default="smollm2-135m")
@click.option("--prompts", default=48, help="How many.")
@click.option("--max-new-tokens", default=64)
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
def main(
    suite: str,
    condition: str,
    target_name: str,
    prompts: int,
    max_new_tokens: int,
    device: str,
    dtype: str,
) -> None:
    """Time the three."""
    target = Target.load(target_name, device=device, dtype=dtype)
    config = RunConfig(
        suite=(suite,), perturb=(CLEAN, condition), limit=prompts, max_new_tokens=max_new_tokens
    )
    plan = make_plan(config, ChatTokenizer(target.tokenizer), target.info.max_positions)
    clean = [r for r in plan.first_turns if r.condition.id == CLEAN]
    asked = [r for r in plan.first_turns if r.condition.id != CLEAN]
    answerer = Answerer(target, taps=(2, 15, 27), max_new_tokens=max_new_tokens)
    answers = {t.prompt.prompt_id: GivenAnswer(t.answer_ids, t.finish) for t in answerer.answer(clean)}
    given = {r.key: answers[r.prompt_id] for r in asked}
    tokens = sum(len(r.token_ids) for r in asked)
    print(f"{len(asked)} prompts of {tokens / len(asked):.0f} tokens")

    def forced_apart() -> list[Trace]:
        return [*answerer.answer(asked), *(answerer.force(r, *given[r.key]) for r in asked)]

    free = _timed("free alone", lambda: list(answerer.answer(asked)), None)
    _timed("free and forced, one call", lambda: list(answerer.answer(asked, given)), free)
    _timed("free, then forced", forced_apart, free)


def _timed(name: str, work: Callable[[], list[Trace]], base: float | None) -> float:
    begun = time.perf_counter()
    count = len(work())
    seconds = time.perf_counter() - begun
    ratio = "" if base is None else f", {seconds / base:.2f} times free alone"
    print(f"{name}: {count} answers, {seconds:.1f} s{ratio}")
    return seconds


if __name__ == "__main__":
    main()
