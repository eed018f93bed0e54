"""``specbench diagnose``: why a drafter loses the prompt.

Example: ``specbench diagnose --target smollm2-135m --drafter zoo:eagle3,zoo:eagle3.1 --suite mtbench --out diag``
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from specbench.cli.options import names, numbers
from specbench.config import RunConfig
from specbench.errors import UserError
from specbench.types import CLEAN


def _fractions(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(text) for text in value.split(",") if text.strip())
    except ValueError as error:
        raise UserError(f"--{param.name} takes numbers separated by commas, not {value!r}") from error


@click.command()
@click.option(
    "--drafter",
    required=True,
    help="Drafters of the EAGLE-3 family, comma-separated: eagle3=PATH, PATH, zoo:NAME; options behind @.",
)
@click.option(
    "--target",
    default="smollm2-135m",
    show_default=True,
    help="The model they draft for: a directory, a hub name, or smollm2-135m.",
)
@click.option(
    "--traces", type=click.Path(file_okay=False), help="Look at the answers of this trace pack instead."
)
@click.option(
    "--suite", callback=names, help="Prompt sets, comma-separated. Default: mini, or all of the pack."
)
@click.option("--limit", type=int, help="At most this many prompts per suite.")
@click.option(
    "--depth", type=int, default=8, show_default=True, help="Draft tokens per round, and steps of attention."
)
@click.option(
    "--deep", type=int, default=16, show_default=True, help="Steps of forced chains and conditional rates."
)
@click.option(
    "--alphas",
    callback=_fractions,
    default="0.1,0.5,1",
    show_default=True,
    help="Noise, in RMS of the state.",
)
@click.option("--seeds", type=int, default=3, show_default=True, help="Draws of each noise.")
@click.option(
    "--windows",
    callback=numbers,
    default="256,512,1024,2048",
    show_default=True,
    help="Attention windows to try.",
)
@click.option("--per-head", is_flag=True, help="Keep attention by head too (attention_heads.parquet).")
@click.option("--out", default="diag", show_default=True, type=click.Path(file_okay=False), help="Directory.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Answer tokens at most.")
@click.option(
    "--lengths", callback=numbers, default="512,2048", show_default=True, help="Prompt lengths for longctx."
)
@click.option(
    "--longctx-text", type=click.Path(dir_okay=False), help="Filler text for longctx instead of our own."
)
@click.option("--template", type=click.Path(dir_okay=False), help="A Jinja chat template instead of its own.")
@click.option("--data-dir", type=click.Path(file_okay=False), help="Folder with published prompt files.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="auto: float32 on a CPU, bfloat16 on a GPU.")
@click.option("--batch-size", type=int, default=48, show_default=True, help="Answers at a time.")
@click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code.")
def diagnose(
    out: str,
    depth: int,
    deep: int,
    alphas: tuple[float, ...],
    seeds: int,
    windows: tuple[int, ...],
    per_head: bool,
    suite: tuple[str, ...] | None,
    traces: str | None,
    **options: Any,
) -> int:
    """See why drafters lose the prompt: sizes, attention, depth, noise, pin and windows.

    The target answers clean prompts once (or a trace pack brings the answers); every drafter's chains are run on
    them and looked into. OUT gets Parquet tables, figures with their data, and report.html, one page that opens
    offline: verdict first, then the figures.

    \b
    Examples:
      specbench diagnose --drafter zoo:eagle3,zoo:eagle3.1
      specbench diagnose --drafter zoo:eagle3 --suite mtbench,longctx --lengths 1k,2k --out diag/long
      specbench diagnose --drafter PATH --traces packs/first
    """  # noqa: D301
    wanted = suite if suite is not None else () if traces else ("mini",)
    config = RunConfig(suite=wanted, perturb=(CLEAN,), depth=(depth,), traces=traces, out=out, **options)
    import transformers

    from specbench.results.diagnosis_report import write_report
    from specbench.runners.diagnose import Measures
    from specbench.runners.diagnose import diagnose as look

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    measures = Measures(
        depth=depth, deep=max(deep, depth), alphas=alphas, seeds=seeds, windows=windows, per_head=per_head
    )
    begun = time.monotonic()
    look(
        config,
        measures,
        Path(out),
        note=lambda text: click.echo(f"{time.monotonic() - begun:6.0f} s  {text}", err=True),
    )
    report = write_report(Path(out))
    for sentence in report.verdict:
        click.echo(f"- {sentence}")
    click.echo(f"\n{report.path}: {len(report.figures)} figures in {Path(out) / 'figures'}")
    return 0
