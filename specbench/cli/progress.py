"""Progress of long jobs that are no runs: a bar on a terminal, plain lines elsewhere.

Example:
    with token_progress("answers") as progress:
        progress.tokens(96); progress.done(384, 3738)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

_EVERY = 15.0
"""Seconds between two lines, where the output is no terminal."""


def quiet_libraries() -> None:
    """Turn off the loading bars and notes of transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


class TokenProgress:
    """Counts items and tokens."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.count = 0
        self.finished = 0
        self.all = 0
        self.began = time.monotonic()
        self.shown = 0.0

    def tokens(self, count: int) -> None:
        """Add tokens."""
        self.count += count
        self._show()

    def done(self, finished: int, everything: int) -> None:
        """Set how many items are finished."""
        self.finished, self.all = finished, everything
        self._show(now=finished == everything)

    def _show(self, now: bool = False) -> None:
        moment = time.monotonic()
        terminal = sys.stderr.isatty()
        if not now and moment - self.shown < (0.5 if terminal else _EVERY):
            return
        self.shown = moment
        rate = self.count / max(moment - self.began, 1e-9)
        text = f"{self.what}: {self.finished}/{self.all or '?'}, {self.count} tokens, {rate:.0f} tokens/s"
        click.echo(f"\r\x1b[K{text}" if terminal else text, err=True, nl=not terminal)

    def close(self) -> None:
        """End the line."""
        if sys.stderr.isatty() and self.shown:
            click.echo(err=True)


@contextmanager
def token_progress(what: str) -> Iterator[TokenProgress]:
    """Show progress while the block runs."""
    progress = TokenProgress(what)
    try:
        yield progress
    finally:
        progress.close()
