"""``specbench schema``: every column of the result tables.

Example: ``specbench schema``
"""

from __future__ import annotations

import click


@click.command()
@click.option(
    "--migrate",
    "run",
    type=click.Path(file_okay=False),
    help="Bring the tables of this run, written by an older specbench, up to date.",
)
def schema(run: str | None) -> None:
    """Print every column of the result tables with its type and meaning."""
    if run is not None:
        from specbench.results.migrate import migrate

        click.echo(f"{migrate(run)} files of {run} rewritten")
        return
    from specbench.results.schema import schema_text

    click.echo(schema_text(), nl=False)
