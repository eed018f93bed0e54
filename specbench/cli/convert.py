"""``specbench convert``: rewrite a checkpoint in another layout that holds the same drafter.

Example: ``specbench convert drafters/mine --to nemo --out converted``
"""

from __future__ import annotations

import click


@click.command()
@click.argument("checkpoint")
@click.option(
    "--to",
    "layout",
    required=True,
    help="EAGLE-3: vllm, specforge, speculators, modelopt or nemo; DFlash: dflash or speculators; "
    "MTP heads of Qwen3-Next and Qwen3.5: target or speculators.",
)
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Directory to write.")
@click.option(
    "--verifier", help="The target's name, for speculators' files. Default: the one the file names."
)
def convert(checkpoint: str, layout: str, out: str, verifier: str | None) -> None:
    """Rewrite CHECKPOINT (a directory or a hub repository) in another layout, bit for bit; no target is loaded.

    What a layout cannot say is refused rather than dropped. Converting back gives the same tensors.

    \b
    Examples:
      specbench convert drafters/mine --to speculators --verifier HuggingFaceTB/SmolLM2-135M-Instruct --out converted
      specbench convert Qwen3-Next --to speculators --out head
    """
    from pathlib import Path

    from specbench.cli.progress import quiet_libraries
    from specbench.drafters.checkpoints.convert import convert as write

    quiet_libraries()
    kind = write(checkpoint, layout, Path(out), verifier)
    click.echo(f"{out}: {kind} from {checkpoint} in the {layout} layout")
