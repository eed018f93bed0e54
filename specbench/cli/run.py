"""``specbench run``: the main job.

Example: ``specbench run --suite mtbench,gsm8k --perturb templates --drafter ngram,eagle3=PATH --out runs/first``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specbench.config import ANSWER_PATHS, SAMPLERS, RunConfig
from specbench.errors import UserError

if TYPE_CHECKING:
    from specbench.cli.display import Display


def _names(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _numbers(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = []
    for text in value.split(","):
        try:
            scale = 1024 if text.strip().lower().endswith("k") else 1
            numbers.append(int(text.strip().lower().removesuffix("k")) * scale)
        except ValueError as error:
            raise UserError(f"--{param.name} takes whole numbers separated by commas, not {text!r}") from error
    return tuple(numbers)


@click.command()
@click.option("--suite", callback=_names, default="mini", show_default=True, help="Prompt sets, comma-separated: names from `specbench list suites` or your own .jsonl files.")
@click.option("--perturb", callback=_names, default="templates", show_default=True, help="Conditions: families, family/name, or products like 'templates*system'. The clean one is always there.")
@click.option("--severity", type=int, help="Leave out conditions of families above this severity (1 to 3).")
@click.option("--target", default="smollm2-135m", show_default=True, help="The model whose output is reproduced: a directory, a hub name, or smollm2-135m.")
@click.option("--drafter", default="default", help="Drafters, comma-separated: ngram, draft-lm=MODEL, eagle3=PATH, PATH, zoo:NAME; options behind @, as in PATH@window=1024,sink=bos. Default: the bundled ones.")
@click.option("--depth", callback=_numbers, default="8", show_default=True, help="Draft tokens per round (k); several, as in 1,2,4,8, cost one replay at the largest.")
@click.option("--limit", type=int, help="At most this many prompts per suite.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Answer tokens at most.")
@click.option("--runner", default="replay", show_default=True, help="replay: score on the target's traces. decode: a real draft-verify loop with timings.")
@click.option("--answer-path", type=click.Choice(ANSWER_PATHS), default="free", show_default=True, help="free: each condition has its own answer. forced: the clean answer under the condition's prompt.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Of the target; 0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: off.")
@click.option("--sampler", type=click.Choice(("auto", *SAMPLERS)), default="auto", show_default=True, help="How drafts are accepted: greedy; match: one-hot drafts against the target's sample; rejection: exact rejection sampling.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--full-chains", is_flag=True, help="Run every chain to its full depth: forced-chain accuracy per step.")
@click.option("--lengths", callback=_numbers, default="512,2048", show_default=True, help="Prompt lengths for longctx in target tokens; 4k means 4096.")
@click.option("--longctx-text", type=click.Path(dir_okay=False), help="Filler text for longctx instead of our own.")
@click.option("--template", type=click.Path(dir_okay=False), help="A Jinja chat template instead of the tokenizer's own.")
@click.option("--data-dir", type=click.Path(file_okay=False), help="Folder with published prompt files; else SPECBENCH_DATA, else the hub.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="auto: float32 on a CPU, bfloat16 on a GPU.")
@click.option("--batch-size", type=int, default=48, show_default=True, help="Answers at a time, memory permitting.")
@click.option("--out", default="runs/latest", show_default=True, type=click.Path(file_okay=False), help="Run directory; the same command again goes on where it stopped.")
@click.option("--traces", type=click.Path(file_okay=False), help="Score on this trace pack; no target is loaded.")
@click.option("--keep-traces", is_flag=True, help="Keep the traces under OUT/traces (large).")
@click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code.")
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="Repeat the run of this run.json; other options override it.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.pass_context
def run(ctx: click.Context, config_file: str | None, dry_run: bool, **options: Any) -> int:
    """Score drafters on prompts under conditions.

    The target answers every prompt under every condition once; every drafter is scored on those answers. What is
    printed at the end is stored in OUT/acceptance.parquet, every single round in OUT/rounds.

    \b
    Examples:
      specbench run
      specbench run --suite mtbench,gsm8k,humaneval --limit 8 --drafter ngram,eagle3=PATH --depth 1,2,4,8
      specbench run --suite longctx --lengths 1k,4k --perturb template/regular --drafter PATH,PATH@window=512
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
    if report.failures:
        click.echo(f"{len(report.failures)} of the answers or scores failed:", err=True)
        for where, reason in list(report.failures.items())[:10]:
            click.echo(f"  {where}: {reason}", err=True)
        click.echo("the same command tries them again", err=True)
        return 1
    return 0


def _configuration(ctx: click.Context, config_file: str | None, options: dict[str, Any]) -> RunConfig:
    if config_file is None:
        return RunConfig(**options)
    given = {
        name: value for name, value in options.items() if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    return RunConfig.from_json(RunConfig.from_file(Path(config_file)).to_json() | given)


def _execute(config: RunConfig, display: Display, dry_run: bool) -> Any:
    import transformers

    from specbench.runners.pipeline import run as run_pipeline

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return run_pipeline(config, display, dry_run=dry_run, command=["specbench", *sys.argv[1:]])


def _print_results(out: Path) -> None:
    from rich.console import Console

    from specbench.results.aggregate import write_acceptance
    from specbench.results.tables import LEGEND, rich_tables

    path = write_acceptance(out)
    import pyarrow.parquet as pq

    console = Console()
    for block in rich_tables(pq.read_table(path), width=console.width):
        console.print(block, soft_wrap=True)
        console.print()
    console.print(LEGEND, style="dim")
    console.print(f"\nrun: {out}  table: {path}  rounds: {out / 'rounds'}")
