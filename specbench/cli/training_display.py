"""What ``specbench train`` shows while it works: a bar with the newest numbers on a terminal, plain lines elsewhere.

Example:
    with make_training_display() as display:
        run_job(job, display, command="specbench train ...")
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specbench.drafters.training.history import LogRow, describe_row
from specbench.runners.training_job import TrainingObserver

_LINE_EVERY = 15.0
"""Seconds between two plain lines about training; held-out results are always printed."""


class PlainTraining(TrainingObserver):
    """Plain lines."""

    def __init__(self) -> None:
        self.shown = 0.0

    def __enter__(self) -> PlainTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is drawn."""

    def print(self, text: str) -> None:
        """Print one line."""
        click.echo(text)

    def note(self, text: str) -> None:
        """Print a sentence."""
        self.print(f"note: {text}")

    def states(self, done: int, everything: int) -> None:
        """Print how many answers have their states, now and then."""
        if done == everything or self._due():
            self.print(f"target states: {done} of {everything} answers")

    def arm(self, name: str, steps: int, done: int) -> None:
        """Print that an arm starts."""
        where = f", going on at step {done}" if done else ""
        self.print(f"{name}: {steps} steps{where}")

    def row(self, name: str, row: LogRow) -> None:
        """Print a row of the log: held-out ones always, others now and then."""
        if row.split == "held_out" or self._due():
            self.print(f"{name}  {describe_row(row)}")

    def _due(self) -> bool:
        if time.monotonic() - self.shown < _LINE_EVERY:
            return False
        self.shown = time.monotonic()
        return True


class LiveTraining(PlainTraining):
    """A bar that carries the newest training row; held-out results scroll past above it."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=Console(),
        )
        self.task: TaskID | None = None

    def __enter__(self) -> LiveTraining:
        self.progress.start()
        return self

    def close(self) -> None:
        """Stop drawing."""
        self.progress.stop()

    def print(self, text: str) -> None:
        """Print above the bar."""
        self.progress.console.print(text, markup=False, highlight=False)

    def states(self, done: int, everything: int) -> None:
        """Draw how many answers have their states."""
        self._task("target states", everything)
        self._update(done, "")

    def arm(self, name: str, steps: int, done: int) -> None:
        """Start an arm's bar."""
        self._task(name, steps)
        self._update(done, "")

    def row(self, name: str, row: LogRow) -> None:
        """Print held-out rows, draw the others."""
        if row.split == "held_out":
            self.print(f"{name}  {describe_row(row)}")
        else:
            self._update(row.step, describe_row(row).split("  ", 1)[1])

    def _task(self, name: str, total: int) -> None:
        if self.task is not None and self.progress.tasks[-1].description == name:
            return
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(name, total=total, now="")

    def _update(self, done: int, text: str) -> None:
        assert self.task is not None
        self.progress.update(self.task, completed=done, now=text)


def make_training_display() -> PlainTraining:
    """Return the display that suits where the output goes."""
    return LiveTraining() if sys.stdout.isatty() else PlainTraining()
