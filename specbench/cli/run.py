"""``specbench run``: the main job.

Example: ``specbench run --suite mtbench,gsm8k --perturb templates --drafter ngram,eagle3=PATH --out runs/first``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbench.cli.options import (
    config_options,
    engine_options,
    given_options,
    make_config,
    numbers,
    prompt_options,
    target_options,
)
from specbench.config import SAMPLERS, RunConfig

if TYPE_CHECKING:
    from specbench.cli.display import Display
    from specbench.results.robustness import Robustness


@click.command()
@prompt_options
@target_options
@click.option(
    "--drafter",
    default="default",
    help="Drafters, comma-separated: ngram, draft-lm=MODEL, eagle3=PATH, PATH, zoo:NAME; options behind @, as in PATH@window=1024,sink=bos. Default: the bundled ones.",
)
@click.option(
    "--depth",
    callback=numbers,
    default="8",
    show_default=True,
    help="Draft tokens per round (k); several, as in 1,2,4,8, cost one replay at the largest.",
)
@click.option(
    "--runner",
    default="replay",
    show_default=True,
    help="replay: score on the target's traces. decode: a real draft-verify loop with timings. vllm: the engine itself. vllm-server: a running server (--url).",
)
@engine_options
@click.option(
    "--throughput",
    callback=lambda ctx, param, value: numbers(ctx, param, value) or (),
    metavar="USERS,...",
    help="With --runner vllm: tokens/s for these numbers of users, as in 1,4,16, beside the engine without speculation.",
)
@click.option(
    "--sampler",
    type=click.Choice(("auto", *SAMPLERS)),
    default="auto",
    show_default=True,
    help="How drafts are accepted: greedy; match: one-hot drafts against the target's sample; rejection: exact rejection sampling.",
)
@click.option(
    "--full-chains", is_flag=True, help="Run every chain to its full depth: forced-chain accuracy per step."
)
@click.option(
    "--score",
    is_flag=True,
    help="Score the answers where the suite has a scorer (gsm8k, math500, humaneval, mbpp, tasks of lm-eval): accuracy beside acceptance.",
)
@click.option(
    "--run-generated-code",
    is_flag=True,
    help="Let --score execute code that the target wrote, in a process of its own with limits of time, memory and network.",
)
@click.option(
    "--out",
    default="runs/latest",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Run directory; the same command again goes on where it stopped.",
)
@click.option(
    "--traces",
    type=click.Path(file_okay=False),
    help="Score on this trace pack (`specbench trace`); no target is loaded. Everything it holds counts unless --suite, --perturb, --severity or --limit choose; what concerns the target is settled by the pack.",
)
@click.option(
    "--keep-traces",
    is_flag=True,
    help="Keep the traces as a pack in OUT/traces (large; the plan says how large): with the drafters' taps, or EAGLE-3's where they need none.",
)
@config_options
@click.pass_context
def run(ctx: click.Context, /, config_file: str | None, dry_run: bool, **options: Any) -> int:
    """Score drafters on prompts under conditions.

    The target answers every prompt under every condition once; every drafter is scored on those answers. What is
    printed at the end is stored in OUT/acceptance.parquet, every single round in OUT/rounds.

    \b
    Examples:
      specbench run
      specbench run --suite mtbench,gsm8k,humaneval --limit 8 --drafter ngram,eagle3=PATH --depth 1,2,4,8
      specbench run --suite longctx --lengths 1k,4k --perturb template/regular --drafter PATH,PATH@window=512
      specbench run --traces packs/first --drafter eagle3=PATH
      specbench run --config runs/first/run.json --out runs/again
    """
    config = _configuration(ctx, config_file, options)
    from specbench.cli.display import make_display

    display = make_display()
    with display:
        report = _execute(config, display, dry_run)
    if report is None:
        return 0
    _print_results(report.out)
    for sentence in report.refused:
        click.echo(f"specbench: {sentence}", err=True)
    if report.failures:
        click.echo(f"{len(report.failures)} of the answers or scores failed:", err=True)
        for where, reason in list(report.failures.items())[:10]:
            click.echo(f"  {where}: {reason}", err=True)
        click.echo("the same command tries them again", err=True)
        return 1
    return 2 if report.refused else 0


def _configuration(ctx: click.Context, config_file: str | None, options: dict[str, Any]) -> RunConfig:
    given = given_options(ctx, options)
    config = make_config(ctx, config_file, options)
    pack = config.traces
    if pack is None:
        return config
    from specbench.runners.packed import settle
    from specbench.runners.trace_pack import TracePack

    if config_file is None:
        # a default is no wish to leave out what the pack holds
        config = replace(
            config,
            suite=config.suite if "suite" in given else (),
            perturb=config.perturb if "perturb" in given else (),
        )
    return settle(config, TracePack(pack), given)


def _execute(config: RunConfig, display: Display, dry_run: bool) -> Any:
    import transformers

    from specbench.runners.pipeline import run as run_pipeline

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return run_pipeline(config, display, dry_run=dry_run, command=["specbench", *sys.argv[1:]])


def _print_throughput(out: Path, console: Any) -> None:
    from specbench.runners.throughput import read_levels

    levels = read_levels(out)
    if levels:
        from specbench.cli.throughput import THROUGHPUT_LEGEND, throughput_table

        console.print()
        console.print(throughput_table(levels), soft_wrap=True)
        console.print(THROUGHPUT_LEGEND, style="dim", markup=False)


_MANY_CONDITIONS = 12
"""More of them are not shown one by one when a run ends."""


def _deepest(scores: Sequence[Robustness]) -> list[Robustness]:
    """Keep every drafter's scores at its largest depth."""
    depth: dict[str, int] = {}
    for score in scores:
        name = score.keys["drafter"]
        depth[name] = max(depth.get(name, 0), score.keys["k"])
    return [s for s in scores if s.keys["k"] == depth[s.keys["drafter"]]]


def _print_results(out: Path) -> None:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from rich.console import Console

    from specbench.results.aggregate import connect, register, write_acceptance
    from specbench.results.attribution import attribution
    from specbench.results.attribution import render as render_parts
    from specbench.results.plots import plot_run
    from specbench.results.robustness import render, robustness
    from specbench.results.store import RunStore
    from specbench.results.tables import legend, rich_tables
    from specbench.results.verdict import verdicts
    from specbench.types import CLEAN

    with RunStore(out, readonly=True) as store:
        if not store.files("rounds"):
            click.echo("no rounds to show: every answer failed or ended with its first token", err=True)
            return
    connection = connect()
    register(connection, out)
    path = write_acceptance(out, connection=connection)
    table = pq.read_table(path)
    console = Console()
    # dozens of conditions would make tables of a thousand lines: families and the deepest k say what happened
    num_conditions = len(table.column("condition").unique())
    many = num_conditions > _MANY_CONDITIONS
    shown = table.filter(pc.equal(table.column("condition"), CLEAN)) if many else table
    for block in rich_tables(shown, width=console.width):
        console.print(block, soft_wrap=True)
        console.print()
    console.print(legend(table), style="dim")
    scores = robustness(connection=connection)
    if scores:
        console.print()
        click.echo(render(_deepest(scores) if many else scores, "text", console.width))
    if many:
        click.echo(
            f"{num_conditions} conditions: shown are the clean one and the families. Every row: specbench report {out}"
        )
        where = table.select(["condition", "answer_path"]).to_pylist()
        free, forced = ({r["condition"] for r in where if r["answer_path"] == p} for p in ("free", "forced"))
        # to know that there is something to split, nothing has to be resampled
        if free & forced:
            click.echo(f"What each drop is made of: specbench report {out} --attribution")
    elif parts := attribution(connection=connection):
        click.echo(render_parts(parts, "text", console.width))
    console.print()
    for sentence in verdicts(out, table=table, scores=scores):
        console.print(f"- {sentence}", markup=False, highlight=False)
    _print_throughput(out, console)
    figures = plot_run(out, out / "figures", form="png", connection=connection, table=table)
    console.print(f"\nrun {out}: {path.name}, rounds/, {len(figures)} figures in figures/", highlight=False)
