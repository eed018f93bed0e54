"""``specbench train``: train a drafter (EAGLE-3 family, MTP head, DFlash), or all arms of a recipe.

Example: ``specbench train --answers answers.jsonl --drafter eagle3.1 --ttt 4 --out drafters/mine``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbench.cli.options import given_options, names, numbers
from specbench.errors import UserError

if TYPE_CHECKING:
    from specbench.runners.training_job import TrainingJob

_WITH_RECIPE = (
    "recipe", "arms", "target", "answers", "out", "cache", "cache_gb", "device", "dtype", "trust_remote_code",
    "checkpoint_minutes", "start",
)  # fmt: skip


# fmt: off
@click.command()
@click.option("--target", default="smollm2-135m", show_default=True, help="The model that drafters shall foresee: a directory, a hub name, or smollm2-135m.")
@click.option("--answers", type=click.Path(dir_okay=False), help="The target's own answers, from `specbench answers`.")
@click.option("--drafter", default="eagle3.1", show_default=True, help="Which: eagle3, eagle3-fcnorm, eagle3.1, eagle3-gated, eagle3.1-gated, eagle3-resnorm, mtp or dflash.")
@click.option("--recipe", type=click.Path(dir_okay=False), help="Train all arms of a recipe instead (drafters/zoo/recipe.yaml).")
@click.option("--arms", callback=names, help="Only these arms of the recipe, comma-separated.")
@click.option("--out", type=click.Path(file_okay=False), help="Directory for drafter, checkpoints, log and plot; the same command again goes on where it stopped.")
@click.option("--ttt", type=int, default=4, show_default=True, help="Train-time test: steps of every chain.")
@click.option("--epochs", type=float, default=4.0, show_default=True, help="Passes over the answers; --steps overrides it.")
@click.option("--steps", type=int, help="Optimiser steps.")
@click.option("--shallow", type=float, default=0.5, show_default=True, help="Share of the steps, at the start, at depth 1: cheap, and most of what there is to learn.")
@click.option("--keep", type=float, default=1.0, show_default=True, help="Share of the chains that go on after each step, drawn at random and weighted to make up for it; 0.6 halves the cost.")
@click.option("--lr", type=float, default=1e-3, show_default=True)
@click.option("--batch-rows", type=int, default=4096, show_default=True, help="Positions per pack, prompts included.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Packs per optimiser step, per process.")
@click.option("--draft-vocab", type=int, help="Draft vocabulary, chosen by frequency. Default: every token the answers use, at most 32,000.")
@click.option("--taps", callback=numbers, help="Target states the drafter reads, as hidden_states indices. Default: 2, n/2, n-3.")
@click.option("--intermediate-size", type=int, help="Of the drafter's MLP. Default: the target's.")
@click.option("--block-size", type=int, help="dflash: positions of a block, the newest token included. Default: 8.")
@click.option("--layers", type=int, help="dflash: layers. Default: 2.")
@click.option("--mask-token", type=int, help="dflash: token id that stands at the places to fill. Default: the lowest that no answer uses.")
@click.option("--own-head", is_flag=True, help="Train an output head of its own instead of sharing the target's rows.")
@click.option("--loss-on", type=click.Choice(("answer", "all")), default="answer", show_default=True, help="Tokens that count.")
@click.option("--init", type=click.Choice(("target", "random")), default="target", show_default=True, help="target: start from the target's last block and final norm.")
@click.option("--start", type=click.Path(file_okay=False), help="Go on from the weights of this drafter, with its draft vocabulary; with --recipe: a directory with one of every arm's name.")
@click.option("--precision", type=click.Choice(("bf16", "fp32")), default="bf16", show_default=True, help="Of forward and backward; the optimiser's weights are float32.")
@click.option("--held-out", type=int, default=64, show_default=True, help="Answers at the end of the file that are kept out and judged on.")
@click.option("--cache", type=click.Path(file_okay=False), help="Directory for the target's states, computed once (bf16). Default: computed anew for every pack.")
@click.option("--cache-gb", type=float, default=32.0, show_default=True, help="What the cache may take.")
@click.option("--checkpoint-minutes", type=float, default=10.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="Of the target: auto is float32 on a CPU, bfloat16 on a GPU.")
@click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code.")
@click.pass_context
# fmt: on
def train(ctx: click.Context, /, **options: Any) -> None:
    """Train a drafter on its target's own answers.

    Training runs the very chains that scoring runs, with forward KL behind every step. Held-out accuracy per step and
    accepted tokens per round are shown as it learns and kept in OUT/log.parquet. Several GPUs:
    `accelerate launch -m specbench train ...`.

    \b
    Examples:
      specbench train --answers answers.jsonl --drafter eagle3.1 --ttt 4 --out drafters/mine
      specbench train --recipe drafters/zoo/recipe.yaml --arms eagle3,eagle3.1
    """
    from specbench.cli.progress import quiet_libraries
    from specbench.cli.training_display import make_training_display
    from specbench.drafters.training.processes import from_accelerate
    from specbench.runners.training_job import run_job

    if options["recipe"]:
        unused = sorted(set(given_options(ctx, options)) - set(_WITH_RECIPE))
        if unused:
            raise UserError(f"--{unused[0].replace('_', '-')} has no effect with --recipe; write it into the recipe")
        job = _recipe_job(options)
    else:
        job = _single_job(options)
    quiet_libraries()
    with make_training_display() as display:
        results = run_job(job, display, command=_command(), make_processes=from_accelerate)
    for name, accepted in results.items():
        where = job.out if job.flat else job.out / name
        score = "" if accepted is None else f", accepted per round on held-out answers {accepted:.3f}"
        click.echo(f"{where}: {name}{score}; score it: specbench run --drafter {where}")


def _command() -> str:
    return " ".join(["specbench", *sys.argv[1:]])


def _recipe_job(options: dict[str, Any]) -> TrainingJob:
    from dataclasses import replace

    from specbench.drafters.training.recipe import read_recipe
    from specbench.errors import unknown_name
    from specbench.runners.training_job import TrainingJob

    recipe = read_recipe(Path(options["recipe"]))
    arms = recipe.arms
    for name in options["arms"] or ():
        if name not in {arm.name for arm in arms}:
            raise unknown_name("arm", name, [arm.name for arm in arms])
    if options["arms"]:
        arms = tuple(arm for arm in arms if arm.name in options["arms"])
    minutes = options["checkpoint_minutes"]
    return TrainingJob(
        target=recipe.target,
        answers=Path(options["answers"]) if options["answers"] else recipe.answers,
        arms=tuple(replace(a, setting=replace(a.setting, checkpoint_minutes=minutes)) for a in arms),
        out=Path(options["out"]) if options["out"] else recipe.out,
        draft_vocab=recipe.draft_vocab,
        held_out=recipe.held_out,
        sizes=recipe.sizes,
        data=recipe.data,
        start=Path(options["start"]) if options["start"] else recipe.start,
        **_place(options),
    )


def _place(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "cache": Path(options["cache"]) if options["cache"] else None,
        "cache_bytes": int(options["cache_gb"] * 2**30),
        "device": options["device"],
        "dtype": options["dtype"],
        "trust_remote_code": options["trust_remote_code"],
    }


def _single_job(options: dict[str, Any]) -> TrainingJob:
    from specbench.drafters.training.recipe import Arm, arm_switches
    from specbench.runners.training_job import TrainingJob

    for name in ("answers", "out"):
        if not options[name]:
            raise UserError(f"--{name} is missing; or name a --recipe")
    if options["arms"]:
        raise UserError("--arms chooses among a recipe's arms; use --drafter without one")
    sizes: dict[str, Any] = {"head": "own"} if options["own_head"] else {}
    if options["intermediate_size"] is not None:
        sizes["intermediate_size"] = options["intermediate_size"]
    arm = Arm(
        name=options["drafter"],
        drafter=options["drafter"],
        switches=dict(arm_switches(options["drafter"])) | _block_switches(options),
        setting=_setting(options),
        epochs=None if options["steps"] else options["epochs"],
    )
    return TrainingJob(
        target=options["target"],
        answers=Path(options["answers"]),
        arms=(arm,),
        out=Path(options["out"]),
        flat=True,
        draft_vocab=options["draft_vocab"],
        held_out=options["held_out"],
        taps=options["taps"],
        sizes=sizes,
        start=Path(options["start"]) if options["start"] else None,
        **_place(options),
    )


def _block_switches(options: dict[str, Any]) -> dict[str, Any]:
    """Return the switches that only block drafters have.

    Raises:
        UserError: one is given for another drafter, or a setting makes no sense for a block.
    """
    names = {"block_size": "block_size", "layers": "num_layers", "mask_token": "mask_token_id"}
    given = {field: options[name] for name, field in names.items() if options[name] is not None}
    if options["drafter"] != "dflash" and given:
        name = next(name for name, field in names.items() if field in given)
        raise UserError(f"--{name.replace('_', '-')} is for --drafter dflash; leave it out")
    return given


def _setting(options: dict[str, Any]) -> Any:
    from specbench.drafters.training.recipe import make_setting

    return make_setting(
        {
            "steps": options["steps"] or 1,
            "chain": {"depth": _depth(options), "keep": options["keep"]},
            "optim": {"lr": options["lr"]},
            "shallow": options["shallow"],
            "batch_rows": options["batch_rows"],
            "accumulation": options["accumulate"],
            "loss_rows": options["loss_on"],
            "init": options["init"],
            "precision": options["precision"],
            "seed": options["seed"],
            "checkpoint_minutes": options["checkpoint_minutes"],
        }
    )


def _depth(options: dict[str, Any]) -> int:
    """Return the steps of a chain, or the masks of a block."""
    if options["drafter"] == "dflash":
        return int(options["block_size"] or 8) - 1
    return int(options["ttt"])
