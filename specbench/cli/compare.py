"""``specbench compare``: paired differences.

Example: ``specbench compare runs/first runs/second --pair drafter``
"""

from __future__ import annotations

import shutil

import click

FORMATS = ("text", "md", "csv", "html", "json")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(file_okay=False))
@click.option(
    "--pair",
    default="drafter",
    show_default=True,
    help="What differs within a pair: drafter, condition, runner or target.",
)
@click.option(
    "--baseline",
    help="Compare everything with this one. Default: template/regular for conditions, otherwise all pairs.",
)
@click.option(
    "--effect",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Per cent: a row without a finding says whether such a difference would have been found.",
)
@click.option(
    "--budget",
    help="Rank drafters at an equal budget instead: drafts (same k), verify (same positions verified) or time (measured). What shares no budget is not ranked, and the reason is given.",
)
@click.option("--condition", help="Only this condition; with --budget template/regular unless given.")
@click.option(
    "--suite", help="Only this suite; all takes the pooled rows alone, as --budget does unless given."
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--draws",
    default=10_000,
    show_default=True,
    type=click.IntRange(min=100),
    help="Resamples of the bootstrap.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the resamples.")
def compare(
    runs: tuple[str, ...],
    pair: str,
    baseline: str | None,
    effect: float,
    budget: str | None,
    condition: str | None,
    suite: str | None,
    form: str,
    draws: int,
    seed: int,
) -> None:
    """Compare what was scored on the same prompts, within one run or across RUNS.

    Each row is one pair in one suite under one condition: both rates, the difference with its 95 % interval (bootstrap
    over prompts, all turns of a prompt together), p corrected for the number of rows, and a verdict. A row that finds
    nothing says how large a difference these prompts would have shown.

    \b
    Examples:
      specbench compare runs/first --pair drafter
      specbench compare runs/first --pair condition --format md
      specbench compare runs/monday runs/tuesday
      specbench compare runs/first --budget time
    """
    width = shutil.get_terminal_size().columns
    if budget is not None:
        from specbench.results import fairness

        leagues = fairness.fair_comparison(
            runs,
            budget,
            condition=condition or "template/regular",
            suite=suite or "all",
            draws=draws,
            seed=seed,
        )
        _print(fairness.render(leagues, form, width), form)
        return
    from specbench.results import compare as comparison

    result = comparison.compare(
        runs,
        pair,
        baseline=baseline,
        suite=suite,
        condition=condition,
        draws=draws,
        seed=seed,
        effect=effect / 100,
    )
    _print(comparison.render(result, form), form)
    if form == "text":
        click.echo("\n" + click.wrap_text(comparison.LEGEND, width))


def _print(text: str, form: str) -> None:
    from specbench.results.text import html_page

    click.echo(html_page("specbench compare", text) if form == "html" else text, nl=False)
