"""What a run shows while it works: a live bar and table on a terminal, plain lines elsewhere.

Example:
    with make_display() as display:
        run(config, display)
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from specbench.config import RunConfig
from specbench.runners.pipeline import Observer, drafter_specs
from specbench.runners.plan import Plan
from specbench.runners.runner import Outcome
from specbench.types import DrafterInfo, TargetInfo

_PASSES = {
    "replay": "one pass each, whatever the number of drafters",
    "decode": "made anew with every drafter and depth",
    "vllm": "made anew with every drafter and depth, an engine started for each",
}
_LINE_EVERY = 15.0
"""Seconds between two plain log lines."""


class Display(Observer):
    """Prints the plan, then keeps count; the two subclasses differ in how progress looks."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.answers = 0
        self.done = 0
        self.num_tokens = 0
        self.begun = time.monotonic()
        self.sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.depth = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing."""

    def planned(self, plan: Plan, config: RunConfig) -> None:
        """Print the plan."""
        self.depth = max(config.depth)
        grid = Table.grid(padding=(0, 2))
        for label, text in plan_lines(plan, config):
            grid.add_row(f"[bold]{label}[/bold]", text)
        self.console.print(grid)
        for sentence in plan.skipped:
            self.console.print(f"left out: {sentence}", style="yellow", markup=False)
        if plan.unchanged:
            self.console.print(
                f"left out: {plan.unchanged} prompts that their condition leaves as they are", style="yellow"
            )

        for sentence in plan.refused:
            self.console.print(f"refused: {sentence}", style="red", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print one line."""
        self.console.print(f"note: {text}", style="yellow", markup=False)

    def started(
        self, target: TargetInfo, drafters: Sequence[DrafterInfo], answers: int, finished: int
    ) -> None:
        """Print who takes part."""
        self.answers, self.done, self.begun = answers, finished, time.monotonic()
        for info in drafters:
            for text in info.notes:
                self.note(f"{info.name}: {text}")
        if finished:
            self.console.print(f"going on: {finished} of {answers} answers are there already")

    def tokens(self, count: int) -> None:
        """Count answer tokens."""
        self.num_tokens += count

    def finished(self, outcomes: Sequence[Outcome]) -> None:
        """Count answers and accepted tokens."""
        self.done += len(outcomes)
        for outcome in outcomes:
            condition = outcome.work.prompt.condition.id
            for (drafter, k), rounds in outcome.rounds.items():
                if k == self.depth:
                    sums = self.sums[drafter, condition]
                    sums[0] += sum(r.num_accepted * r.weight for r in rounds)
                    sums[1] += sum(r.weight for r in rounds)

    @property
    def rate(self) -> float:
        """Answer tokens per second so far."""
        return self.num_tokens / max(time.monotonic() - self.begun, 1e-9)


class TerminalDisplay(Display):
    """A bar with tokens/s and time left, above a table of accepted tokens per round so far."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.progress = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.live: Live | None = None
        self.task: Any = None

    def started(
        self, target: TargetInfo, drafters: Sequence[DrafterInfo], answers: int, finished: int
    ) -> None:
        """Start drawing."""
        super().started(target, drafters, answers, finished)
        self.task = self.progress.add_task("", total=answers, completed=finished, rate=0.0)
        self.live = Live(self._view(), console=self.console, refresh_per_second=4, transient=True)
        self.live.start()

    def close(self) -> None:
        """Stop drawing."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def tokens(self, count: int) -> None:
        """Refresh the rate."""
        super().tokens(count)
        if self.task is not None:
            self.progress.update(self.task, rate=self.rate)

    def finished(self, outcomes: Sequence[Outcome]) -> None:
        """Refresh bar and table."""
        super().finished(outcomes)
        self.progress.update(self.task, completed=self.done)
        if self.live is not None:
            self.live.update(self._view())

    def _view(self) -> Group:
        conditions = list(dict.fromkeys(condition for _drafter, condition in self.sums))
        shown = conditions[:4]
        table = Table(title=f"accepted_per_round so far, k = {self.depth}", title_justify="left")
        table.add_column("drafter")
        for condition in shown:
            table.add_column(condition, justify="right")
        for drafter in dict.fromkeys(drafter for drafter, _condition in self.sums):
            cells = [self.sums.get((drafter, condition), [0.0, 0.0]) for condition in shown]
            table.add_row(drafter, *(f"{a / n:.2f}" if n else "" for a, n in cells))
        return Group(table, self.progress) if self.sums else Group(self.progress)


class LogDisplay(Display):
    """Plain lines, for files and pipes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last = 0.0

    def tokens(self, count: int) -> None:
        """Print a line now and then."""
        super().tokens(count)
        self._line()

    def finished(self, outcomes: Sequence[Outcome]) -> None:
        """Print a line now and then, and always at the end."""
        super().finished(outcomes)
        self._line(always=self.done >= self.answers)

    def _line(self, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self._last < _LINE_EVERY:
            return
        self._last = now
        left = (now - self.begun) / self.done * (self.answers - self.done) if self.done else None
        rest = "" if left is None else f", about {left:.0f} s left"
        self.console.print(
            f"{self.done}/{self.answers} answers, {self.num_tokens} tokens, {self.rate:.0f} tokens/s{rest}",
            highlight=False,
        )


def plan_lines(plan: Plan, config: RunConfig) -> list[tuple[str, str]]:
    """Return the plan as label and text."""
    conditions = ", ".join(c.info.id for c in plan.conditions[:6])
    more = len(plan.conditions) - 6
    drafters = ", ".join(spec.text for spec in drafter_specs(config))
    lines = {
        "suites": f"{', '.join(config.suite)}: {len(plan.prompts)} prompts",
        "conditions": f"{len(plan.conditions)}: {conditions}{f' and {more} more' if more > 0 else ''}",
        "target": f"{config.target}: {plan.answers} answers ({_PASSES.get(config.runner, 'one pass each')})",
        "drafters": drafters,
        "tokens": f"{plan.prompt_tokens:,} prompt tokens in first turns, at most {plan.max_answer_tokens:,} answer tokens",
        "depth": f"{', '.join(map(str, config.depth))}, {config.resolved_sampler}, runner {config.runner}",
        "out": config.out,
    }
    return [(label, text) for label, text in (lines | dict(plan.details)).items() if text]


def make_display() -> Display:
    """A live display on a terminal, plain lines elsewhere."""
    console = Console(file=sys.stderr if not sys.stdout.isatty() and sys.stderr.isatty() else sys.stdout)
    return TerminalDisplay(console) if console.is_terminal else LogDisplay(console)
