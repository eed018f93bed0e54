"""``specbench leaderboard``: a static site from entries.

Example: ``specbench leaderboard entries/ --out site/``
"""

from __future__ import annotations

import click


@click.command()
@click.argument("entries", type=click.Path(file_okay=False))
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False),
    help="Folder of the site; an earlier site in it is replaced.",
)
@click.option("--title", default="Drafter leaderboard", show_default=True, help="Heading of the page.")
@click.option("--with-entries", is_flag=True, help="Copy the entries beside the page, for download.")
@click.option("--draws", default=2000, show_default=True, help="Resamples behind the intervals.")
@click.option("--seed", default=0, show_default=True, help="Seed of the resamples.")
@click.option("--strict", is_flag=True, help="Exit with 1 where an entry was refused.")
def leaderboard(
    entries: str, out: str, title: str, with_entries: bool, draws: int, seed: int, strict: bool
) -> int:
    """Build a self-contained page from the entries in the folder ENTRIES (`specbench submit` makes them).

    Every entry is checked and every number recomputed from its rounds; what is refused is named with the reason and
    left out. The page works from disk and from any web server, and asks for nothing.
    """
    from specbench.results.leaderboard.site import build_site, entry_folders

    board = build_site(
        entry_folders(entries), out, title=title, with_entries=with_entries, draws=draws, seed=seed
    )
    for reason in board.refused.values():
        click.echo(reason, err=True)
    click.echo(f"{out}/index.html: {len(board.entries)} entries, {len(board.refused)} refused")
    return 1 if strict and board.refused else 0
