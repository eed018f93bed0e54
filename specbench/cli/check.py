"""``specbench check``: whether a checkpoint is what its config.json says.

Example: ``specbench check runs/my-drafter --target smollm2-135m``
"""

from __future__ import annotations

import shutil
from typing import Any

import click

from specbench.cli.options import names, numbers
from specbench.config import RunConfig
from specbench.types import CLEAN


@click.command()
@click.argument("drafter")
@click.option(
    "--target",
    default="smollm2-135m",
    show_default=True,
    help="The model it drafts for: a directory, a hub name, or smollm2-135m.",
)
@click.option(
    "--suite", callback=names, default="mini", show_default=True, help="Where the prompts come from."
)
@click.option("--limit", type=int, default=12, show_default=True, help="Prompts of each suite.")
@click.option("--depth", type=int, default=4, show_default=True, help="Draft tokens per round (k).")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Answer tokens at most.")
@click.option(
    "--template",
    type=click.Path(dir_okay=False),
    help="A Jinja chat template instead of the tokenizer's own.",
)
@click.option("--data-dir", type=click.Path(file_okay=False), help="Folder with published prompt files.")
@click.option("--lengths", callback=numbers, default="512,2048", help="Prompt lengths for the suite longctx.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="auto: float32 on a CPU, bfloat16 on a GPU.")
@click.option("--batch-size", type=int, default=48, show_default=True, help="Answers at a time.")
@click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code.")
@click.option(
    "--format", "form", type=click.Choice(("text", "md", "json")), default="text", show_default=True
)
def check(drafter: str, form: str, depth: int, **options: Any) -> int:
    """Examine a checkpoint: is what its config.json declares what it was trained with?

    DRAFTER runs on a few answers of the target as declared, and under every setting that a common mistake would have
    made the right one: the other feedback, with and without input norms, taps one lower and higher, the vocabulary
    map as identity and shifted, other rotary settings, BOS doubled or left out. The exit code is 0 where nothing does
    better, 1 where something does or the drafter does not follow the target at all, 2 where it cannot be loaded.

    \b
    Examples:
      specbench check runs/my-drafter
      specbench check ORG/eagle3-drafter --target ORG/model --suite mtbench --limit 24
      specbench check zoo:eagle3.1@feedback=pre
    """  # noqa: D301
    config = RunConfig(drafter=drafter, depth=(depth,), perturb=(CLEAN,), **options)
    import transformers

    from specbench.results.checkup import LEGEND
    from specbench.results.text import json_text, render_sheets
    from specbench.runners.check import check as examine

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    checkup = examine(config, note=lambda text: click.echo(text, err=True))
    if form == "json":
        click.echo(json_text(checkup.to_json()), nl=False)
        return int(not checkup.healthy)
    if form == "text":
        click.echo(checkup.verdict + "\n")
    else:
        click.echo(f"**{checkup.verdict}**\n")
    click.echo(render_sheets([checkup.sheet()], LEGEND, form, shutil.get_terminal_size((120, 24)).columns))
    for remark in checkup.remarks:
        click.echo(f"- {remark.text}")
    return int(not checkup.healthy)
