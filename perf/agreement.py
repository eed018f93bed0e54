"""Replay against decode, round by round, on real prompts: ``python perf/agreement.py --drafter ngram,zoo:*``.

Prints rounds compared, rounds equal and every difference with its verdict. Exit code 1 where one is not a tie.
"""

from __future__ import annotations

import sys
import time

import click
import transformers

from specbench.cli.options import names, numbers
from specbench.config import RunConfig
from specbench.drafters.resolve import load_drafter
from specbench.perturbations.rendering import ChatTokenizer
from specbench.runners.agreement import Agreement
from specbench.runners.decode import DecodeRunner
from specbench.runners.pipeline import drafter_specs, run_settings
from specbench.runners.plan import make_plan
from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import Work
from specbench.runners.targets import Target


@click.command()
@click.option("--suite", callback=names, default="mini")
@click.option("--target", default="smollm2-135m")
@click.option("--drafter", default="default")
@click.option("--perturb", callback=names, default="template/regular")
@click.option("--depth", callback=numbers, default="8")
@click.option("--limit", type=int, default=14)
@click.option("--max-new-tokens", type=int, default=64)
@click.option("--temperature", type=float, default=0.0)
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
def main(**options: object) -> None:
    """Compare the two runners on first turns."""
    transformers.utils.logging.disable_progress_bar()
    config = RunConfig(**options)  # type: ignore[arg-type]
    target = Target.load(config.target, device=config.device, dtype=config.dtype)
    plan = make_plan(config, ChatTokenizer(target.tokenizer), target.info.max_positions)
    weights = target.weights()
    drafters = {spec.text: load_drafter(spec, weights) for spec in drafter_specs(config)}
    settings = run_settings(config)
    work = [Work(prompt=p, drafters=tuple(drafters)) for p in plan.first_turns]
    found = {}
    for runner in (ReplayRunner(target, settings), DecodeRunner(target, settings)):
        begun = time.perf_counter()
        found[runner.name] = {o.work.prompt.key: o for o in runner.run(work, drafters, lambda _n: None)}
        print(f"{runner.name}: {len(work)} answers in {time.perf_counter() - begun:.1f} s")
    bad = 0
    for name in drafters:
        for k in settings.depths:
            agreement = Agreement()
            differences = [
                agreement.add(outcome, found["decode"][key], name, k)
                for key, outcome in found["replay"].items()
            ]
            print(
                f"{name} k={k}: {agreement.equal} of {agreement.rounds} rounds equal, {agreement.answers} answers"
            )
            for difference in filter(None, differences):
                bad += not difference.explained
                print(f"  {difference.prompt_id} token {difference.position}: {difference.verdict}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
