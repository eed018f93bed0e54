"""``specbench export``: write a drafter in another tool's checkpoint layout.

Example: ``specbench export drafters/mine --format vllm --out exported``
"""

from __future__ import annotations

import click


@click.command()
@click.argument("drafter")
@click.option(
    "--format", "layout", required=True, help="vllm, specforge (SGLang reads it too) or speculators."
)
@click.option(
    "--target",
    default="smollm2-135m",
    show_default=True,
    help="The drafter's target: its head rows are written out where the drafter shares them.",
)
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Directory to write.")
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    help="Of the written weights: bfloat16, float16 or float32.",
)
def export(drafter: str, layout: str, target: str, out: str, dtype: str) -> None:
    """Write DRAFTER (a directory, a hub repository, or zoo:NAME) in another tool's checkpoint layout.

    What a layout cannot say (a gate, sink tokens) is refused rather than dropped.

    \b
    Examples:
      specbench export drafters/mine --format vllm --out exported
      specbench export zoo:eagle3.1 --format speculators --out exported
    """
    from pathlib import Path

    from specbench.cli.progress import quiet_libraries
    from specbench.drafters.checkpoints.save import export as write
    from specbench.drafters.resolve import zoo_path
    from specbench.runners.targets import Target

    where = str(zoo_path(drafter.removeprefix("zoo:"))) if drafter.startswith("zoo:") else drafter
    quiet_libraries()
    weights = Target.load(target, device="cpu", dtype=dtype).weights()
    write(where, layout, Path(out), weights)
    click.echo(f"{out}: {drafter} in the {layout} layout")
