"""Batched answering against transformers' ``generate`` on the same prompts: ``python perf/answering.py``.

Prints tokens/s of both and their ratio. Both run greedy at the same batch size, in the same process, one after the
other; tokens are counted by ids up to and including the stop token, prefill time is included.
"""

from __future__ import annotations

import time

import click
import torch
import transformers

from specbench.config import RunConfig
from specbench.perturbations.rendering import ChatTokenizer
from specbench.runners.answers import Answerer
from specbench.runners.plan import make_plan
from specbench.runners.targets import Target
from specbench.types import CLEAN, Trace


@click.command()
@click.option("--suite", default="gsm8k")
@click.option("--target", "target_name", default="smollm2-135m")
@click.option("--prompts", default=96, help="How many.")
@click.option("--batch-size", default=48)
@click.option("--max-new-tokens", default=128)
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
@click.option(
    "--check", default=0, help="Compare this many answers with single-stream generate, token by token."
)
def main(
    suite: str,
    target_name: str,
    prompts: int,
    batch_size: int,
    max_new_tokens: int,
    device: str,
    dtype: str,
    check: int,
) -> None:
    """Time both."""
    transformers.utils.logging.disable_progress_bar()
    target = Target.load(target_name, device=device, dtype=dtype)
    config = RunConfig(suite=(suite,), perturb=(CLEAN,), limit=prompts, max_new_tokens=max_new_tokens)
    plan = make_plan(config, ChatTokenizer(target.tokenizer), target.info.max_positions)
    answerer = Answerer(target, taps=(), max_new_tokens=max_new_tokens, batch_size=batch_size)
    list(answerer.answer(plan.first_turns[:2]))  # first passes allocate and pick kernels

    begun = time.perf_counter()
    traces = list(answerer.answer(plan.first_turns))
    ours = sum(len(trace.answer_ids) for trace in traces)
    our_rate = ours / (time.perf_counter() - begun)
    print(f"specbench: {ours} tokens, {our_rate:.0f} tokens/s")

    begun = time.perf_counter()
    theirs = 0
    for start in range(0, len(plan.first_turns), batch_size):
        rows = [list(p.token_ids) for p in plan.first_turns[start : start + batch_size]]
        theirs += _generate(target, rows, max_new_tokens)
    their_rate = theirs / (time.perf_counter() - begun)
    print(f"generate:  {theirs} tokens, {their_rate:.0f} tokens/s")
    print(f"ratio: {our_rate / their_rate:.2f}")
    for trace in traces[:check]:
        _compare(target, trace, max_new_tokens)


@torch.no_grad()
def _compare(target: Target, trace: Trace, max_new_tokens: int) -> None:
    """Print where a batched answer leaves single-stream ``generate``, and the target's margin there."""
    ids = torch.tensor([trace.prompt.token_ids], device=target.device)
    out = target.model.generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=target.stop_ids[0]
    )
    alone = out[0, ids.shape[1] :].tolist()
    first = next((i for i, (a, b) in enumerate(zip(alone, trace.answer_ids, strict=False)) if a != b), None)
    if first is None:
        print(f"{trace.prompt.prompt_id}: {len(trace.answer_ids)} tokens equal")
    else:
        margin = float(trace.margins[first])
        print(
            f"{trace.prompt.prompt_id}: differs at token {first}, where the two best are {margin:.2g} apart"
        )


@torch.no_grad()
def _generate(target: Target, rows: list[list[int]], max_new_tokens: int) -> int:
    """Answer left-padded rows with transformers; return the tokens up to each stop token."""
    longest = max(map(len, rows))
    pad = target.stop_ids[0]
    ids = torch.tensor([[pad] * (longest - len(r)) + r for r in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=target.device)
    out = target.model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad
    )
    count = 0
    for row in out[:, longest:].tolist():
        ends = [i for i, token in enumerate(row) if token in target.stop_ids]
        count += ends[0] + 1 if ends else len(row)
    return count


if __name__ == "__main__":
    main()
