"""``specbench report``: the tables of a run.

Example: ``specbench report runs/first --by category --format md``
"""

from __future__ import annotations

from typing import Any

import click

from specbench.errors import UserError, unknown_name

FORMATS = ("text", "md", "csv", "html", "json")


def _columns(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (value or "").split(",") if name.strip())


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(file_okay=False))
@click.option(
    "--by", callback=_columns, help="Further columns to tell apart, such as category, turn or seed."
)
@click.option(
    "--pool", callback=_columns, help="Columns to pool instead of telling apart, such as condition."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="csv and json hold every column (`specbench schema` names them).",
)
@click.option(
    "--robustness",
    is_flag=True,
    help="The robustness score of every drafter, with all its parts, instead of the tables.",
)
@click.option(
    "--attribution",
    is_flag=True,
    help="What every drop is made of, the drafter's loss or the target's other answer, instead of the tables; needs `specbench run --answer-path both`.",
)
@click.option(
    "--plots", type=click.Path(file_okay=False), help="Also draw figures into this folder (one run)."
)
@click.option("--figure-format", type=click.Choice(("svg", "png", "pdf")), default="svg", show_default=True)
@click.option(
    "--draws",
    default=10_000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Resamples behind the intervals; 0 leaves them out.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the resamples.")
def report(
    runs: tuple[str, ...],
    by: tuple[str, ...],
    pool: tuple[str, ...],
    form: str,
    robustness: bool,
    attribution: bool,
    plots: str | None,
    figure_format: str,
    draws: int,
    seed: int,
) -> None:
    """Print the tables of RUNS again, from the raw rounds: one a suite and one over all.

    \b
    Examples:
      specbench report runs/first
      specbench report runs/first --by category --format md
      specbench report runs/first --pool suite,condition --format csv
      specbench report runs/first --robustness --plots figures/
      specbench report runs/first --attribution --format csv
    """
    from specbench.results.aggregate import acceptance_table, connect, register
    from specbench.results.plots import plot_run
    from specbench.results.text import html_page

    if robustness and attribution:
        raise UserError("--robustness and --attribution are two tables; ask for one at a time")
    if plots is not None and len(runs) > 1:
        raise UserError("--plots draws one run; give one")
    connection = connect()
    register(connection, runs)
    if robustness or attribution:
        text = _special("robustness" if robustness else "attribution", connection, form, draws or 1000, seed)
    else:
        table = acceptance_table(by=_group(by, pool), connection=connection, draws=draws, seed=seed)
        text = _tables(table, form)
    click.echo(html_page("specbench report", text) if form == "html" else text, nl=False)
    if plots is not None:
        for path in plot_run(runs[0], plots, form=figure_format, draws=draws or 1000, seed=seed):
            click.echo(str(path), err=True)


def _group(by: tuple[str, ...], pool: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that name a row."""
    from specbench.results.aggregate import GROUP

    for name in pool:
        if name not in GROUP:
            raise unknown_name("column to pool", name, GROUP)
    return tuple(dict.fromkeys(c for c in (*GROUP, *by) if c not in pool))


def _tables(table: Any, form: str) -> str:
    from specbench.results.tables import legend, render, rich_tables

    if form != "text":
        return render(table, form)
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        for block in rich_tables(table, width=console.width):
            console.print(block, soft_wrap=True)
        console.print(legend(table), style="dim")
    return captured.get()


_NOTHING = {
    "robustness": "there is no robustness to score: the run holds no condition beside template/regular",
    "attribution": "no condition of this run has both a free and a forced answer; run it with --answer-path both",
}


def _special(kind: str, connection: Any, form: str, draws: int, seed: int) -> str:
    """Return the robustness or the attribution table: the module of that name has a function of that name."""
    import importlib
    import shutil

    module = importlib.import_module(f"specbench.results.{kind}")
    found = getattr(module, kind)(connection=connection, draws=draws, seed=seed)
    if not found:
        raise UserError(_NOTHING[kind])
    text: str = module.render(found, form, shutil.get_terminal_size().columns)
    return text
