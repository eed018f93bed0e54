"""The table of ``specbench run --throughput``.

Example: ``console.print(throughput_table(read_levels(out)))``
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from specbench.runners.throughput import Level

THROUGHPUT_LEGEND = (
    "tok/s user = tokens per second that one user sees behind the first token; total = of all users, prompts included; "
    "median of the repeats [least, most]. x = over the same engine without speculation. TTFT = median time to the first "
    "token. c_verify, c_draft = cost of a round without its drafts and of one draft token, in steps without speculation. "
    "predicted = (accepted_per_round + 1) / (c_verify + k c_draft)."
)


def throughput_table(levels: Sequence[Level]) -> Table:
    """Return the levels as a table, a block per number of users."""
    from specbench.runners.throughput import with_speed_ups

    table = Table(title="throughput", title_justify="left")
    table.add_column("users", justify="right")
    table.add_column("drafter")
    names = (
        "k",
        "tok/s user",
        "x",
        "tok/s total",
        "x",
        "predicted x",
        "acc/r",
        "c_verify",
        "c_draft",
        "TTFT ms",
    )
    for name in names:
        table.add_column(name, justify="right")
    before = None
    for level, faster in with_speed_ups(levels):
        if before not in (None, level.users):
            table.add_section()
        before = level.users
        lead = (str(level.users), level.drafter or "no speculation", str(level.k) if level.k else "")
        if level.error is not None:
            table.add_row(*lead, "failed")
            continue
        table.add_row(
            *lead,
            _spread(level.per_user),
            _number(None if faster is None else faster.per_user),
            _spread(level.total),
            _number(None if faster is None else faster.total),
            _number(None if faster is None else faster.predicted),
            _number(level.accepted_per_round),
            _number(None if faster is None else faster.c_verify),
            _number(None if faster is None else faster.c_draft, 3),
            f"{median(level.first_token_ms):.0f}",
        )
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
