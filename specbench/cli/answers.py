"""``specbench answers``: the target's own answers to prompts, which drafters are trained on.

Example: ``specbench answers --prompts prompts.jsonl --target smollm2-135m --out answers.jsonl``
"""

from __future__ import annotations

from pathlib import Path

import click


# fmt: off
@click.command()
@click.option("--prompts", required=True, type=click.Path(dir_okay=False), help="Your prompts: .jsonl with turns, messages or prompt in every line; first turns are answered.")
@click.option("--target", default="smollm2-135m", show_default=True, help="Who answers: a directory, a hub name, or smollm2-135m.")
@click.option("--out", default="answers.jsonl", show_default=True, type=click.Path(dir_okay=False), help="The file; the same command again goes on where it stopped.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Answer tokens at most.")
@click.option("--limit", type=int, help="At most this many prompts.")
@click.option("--shuffle", type=int, metavar="SEED", help="Answer in a seeded random order, so that any beginning of the file is a fair sample.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampled answers.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="auto: float32 on a CPU, bfloat16 on a GPU.")
@click.option("--batch-size", type=int, default=96, show_default=True, help="Answers at a time, memory permitting.")
@click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code.")
# fmt: on
def answers(
    prompts: str,
    target: str,
    out: str,
    max_new_tokens: int,
    limit: int | None,
    shuffle: int | None,
    temperature: float,
    seed: int,
    device: str,
    dtype: str,
    batch_size: int,
    trust_remote_code: bool,
) -> None:
    """Write the target's own answers to prompts.

    A drafter learns to foresee what its target says, so it is trained on what the target said: one JSON object a line
    with prompt ids (clean template) and answer ids. `specbench train` reads the file.

    \b
    Examples:
      specbench answers --prompts prompts.jsonl --out answers.jsonl
      specbench answers --prompts prompts.jsonl --target PATH --max-new-tokens 512 --device cuda
    """
    from specbench.benchmarks.own_file import OwnFile
    from specbench.cli.progress import quiet_libraries, token_progress
    from specbench.errors import UserError
    from specbench.perturbations.rendering import ChatTokenizer
    from specbench.runners.answer_file import write_answers
    from specbench.runners.answers import Answerer
    from specbench.runners.targets import Target
    from specbench.types import Sampling, SuiteRequest

    if max_new_tokens < 2:
        raise UserError("--max-new-tokens must be at least 2: a drafter learns to foresee the second token")
    found = OwnFile(Path(prompts)).load(SuiteRequest(limit=limit))
    if shuffle is not None:
        import random

        random.Random(shuffle).shuffle(found)
    quiet_libraries()
    loaded = Target.load(target, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with token_progress("answers") as progress:
        answerer = Answerer(
            loaded,
            taps=(),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, seed=seed),
            batch_size=batch_size,
            on_tokens=progress.tokens,
        )
        new = write_answers(
            answerer, ChatTokenizer(loaded.tokenizer), found, Path(out), seed=seed, on_progress=progress.done
        )
    click.echo(f"{out}: {new} new answers, {sum(len(p.turns) for p in found)} in all; next: specbench train --answers {out}")
