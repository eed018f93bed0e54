"""``specbench submit``: a leaderboard entry.

Example: ``specbench submit runs/first --out entries/my-drafter``
"""

from __future__ import annotations

import click


@click.command()
@click.argument("run", type=click.Path(file_okay=False))
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Folder to make; must be new.")
def submit(run: str, out: str) -> None:
    """Pack RUN as a leaderboard entry: its rounds, run.json and checksums, checked as the leaderboard will.

    Answer texts stay out. run.json goes along as it is: look whether its command or paths say more than you want
    others to read.
    """
    from specbench.results.entry import write_entry

    entry = write_entry(run, out)
    size = sum(p.stat().st_size for p in entry.path.rglob("*") if p.is_file()) / 1e6
    click.echo(f"{out}: entry {entry.digest} of {', '.join(entry.info.drafters)}, {size:.1f} MB, checked")
