"""What a drafter's replay costs beside the traces it runs on: ``python perf/replay_cost.py --drafter zoo:eagle3``.

Prints seconds for tracing and for scoring and their ratio, and the peak memory of the process.
"""

from __future__ import annotations

import resource
import time

import click
import transformers

from specbench.cli.options import names, numbers
from specbench.config import RunConfig
from specbench.drafters.resolve import load_drafter, parse_drafters
from specbench.perturbations.rendering import ChatTokenizer
from specbench.runners.answers import Answerer
from specbench.runners.plan import make_plan
from specbench.runners.replay import walk_rounds
from specbench.runners.targets import Target
from specbench.types import CLEAN, ScoreRequest

_GROUP = 32


@click.command()
@click.option("--suite", callback=names, default="gsm8k")
@click.option("--target", "target_name", default="smollm2-135m")
@click.option("--drafter", default="zoo:*")
@click.option("--prompts", default=96)
@click.option("--depth", default=8)
@click.option("--max-new-tokens", default=128)
@click.option("--batch-size", default=48)
@click.option("--lengths", callback=numbers, default="4k", help="For --suite longctx.")
def main(
    suite: tuple[str, ...],
    target_name: str,
    drafter: str,
    prompts: int,
    depth: int,
    max_new_tokens: int,
    batch_size: int,
    lengths: tuple[int, ...],
) -> None:
    """Time tracing and scoring."""
    transformers.utils.logging.disable_progress_bar()
    target = Target.load(target_name)
    config = RunConfig(
        suite=suite, perturb=(CLEAN,), limit=prompts, max_new_tokens=max_new_tokens, lengths=lengths
    )
    plan = make_plan(config, ChatTokenizer(target.tokenizer), target.info.max_positions)
    weights = target.weights()
    drafters = [load_drafter(spec, weights) for spec in parse_drafters(drafter)]
    taps = sorted({tap for one in drafters for tap in one.info.taps})
    answerer = Answerer(target, taps=taps, max_new_tokens=max_new_tokens, batch_size=batch_size)

    begun = time.perf_counter()
    traces = list(answerer.answer(plan.first_turns))
    tracing = time.perf_counter() - begun
    tokens = sum(len(t.answer_ids) for t in traces)
    print(f"traces: {len(traces)} answers, {tokens} tokens, {tracing:.1f} s, {tokens / tracing:.0f} tokens/s")
    for one in drafters:
        begun = time.perf_counter()
        rounds = accepted = 0
        for start in range(0, len(traces), _GROUP):
            group = traces[start : start + _GROUP]
            for trace, scores in zip(group, one.score(group, ScoreRequest(depth=depth)), strict=True):
                walked = walk_rounds(scores, len(trace.answer_ids), depth)
                rounds += len(walked)
                accepted += sum(r.num_accepted for r in walked)
        scoring = time.perf_counter() - begun
        print(
            f"{one.info.name}: {scoring:.2f} s, {scoring / tracing:.1%} of the traces; "
            f"accepted_per_round {accepted / max(rounds, 1):.2f} at k = {depth}"
        )
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
