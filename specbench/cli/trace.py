"""``specbench trace``: keep a target's answers and states, to score drafters elsewhere.

Example: ``specbench trace --suite mtbench,gsm8k --perturb templates --out packs/first --taps 2,15,27``
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from specbench.cli.options import (
    config_options,
    engine_options,
    make_config,
    numbers,
    prompt_options,
    target_options,
)
from specbench.errors import UserError


@click.command()
@prompt_options
@target_options
@click.option(
    "--taps",
    callback=numbers,
    help="Target states to keep, as hidden_states indices (0: embeddings, i: entering block i). "
    "Default: EAGLE-3's for the target's n blocks: 2, n/2, n-3.",
)
@click.option(
    "--runner",
    type=click.Choice(("replay", "vllm")),
    default="replay",
    show_default=True,
    help="Who runs the target: replay, transformers on one machine's devices; vllm, the engine, tensor parallel with "
    "--engine tensor_parallel=N.",
)
@engine_options
@click.option(
    "--out",
    default="packs/latest",
    show_default=True,
    type=click.Path(file_okay=False),
    help="The pack's directory; the same command again goes on where it stopped.",
)
@config_options
@click.pass_context
def trace(
    ctx: click.Context,
    /,
    config_file: str | None,
    dry_run: bool,
    taps: tuple[int, ...] | None,
    out: str,
    **options: Any,
) -> int:
    """Keep a target's answers and states as a trace pack.

    The target answers every prompt under every condition once. Token ids, the chosen states at every position, what
    is needed of the target's distribution, and its embeddings and head go into OUT: Parquet, safetensors and JSON,
    with checksums. Drafters are then scored on the pack by `specbench run --traces OUT`, on a machine that need not
    have the target. The plan says how large the pack gets.

    \b
    Examples:
      specbench trace --suite mini --perturb templates --out packs/mini
      specbench trace --target PATH --suite mtbench --taps 2,16,29 --dry-run
      specbench trace --runner vllm --engine tensor_parallel=4 --target PATH --suite mtbench
      specbench run --traces packs/mini --drafter ngram,eagle3=PATH
    """  # noqa: D301
    config = replace(make_config(ctx, config_file, options), keep_traces=False, out=out)
    if config.traces is not None:
        raise UserError(
            f"{config_file} is of a run on a trace pack; take the pack's own: {config.traces}/pack.json"
        )
    from specbench.cli.display import make_display

    display = make_display()
    with display:
        report = _execute(config, display, taps, dry_run)
    if report is None:
        return 0
    _print_pack(report)
    return 1 if report.failures else 0


def _execute(config: Any, display: Any, taps: tuple[int, ...] | None, dry_run: bool) -> Any:
    import transformers

    from specbench.runners.packed import trace as make_pack

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    command = ["specbench", *sys.argv[1:]]
    return make_pack(config, display, taps=taps, dry_run=dry_run, command=command)


def _print_pack(report: Any) -> None:
    from specbench.runners.packed import format_bytes
    from specbench.runners.trace_pack import TracePack

    pack = TracePack(report.out)
    taps = ", ".join(map(str, pack.taps)) or "none"
    click.echo(
        f"{report.out}: {len(pack)} traces, taps {taps}, {format_bytes(pack.num_bytes)}, checksum {pack.checksum}"
    )
    click.echo(f"score a drafter on it: specbench run --traces {report.out} --drafter PATH")
    if report.failures:
        click.echo(f"{len(report.failures)} answers failed:", err=True)
        for where, reason in list(report.failures.items())[:10]:
            click.echo(f"  {where}: {reason}", err=True)
        click.echo("the same command tries them again", err=True)
