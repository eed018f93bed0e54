"""Per-prompt sums of rounds: what every interval and comparison is computed from.

Example:
    make_cells(connection, by)
    groups = prompt_groups(connection, by)
    groups[0].sums      # [P, k+1]: for each prompt, the rounds that accepted at least 0, 1, ..., k tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.results.statistics import Floats

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The prompts of one group of rounds."""

    keys: Mapping[str, Any]
    prompts: Integers
    """[P] numbers that stand for (suite, prompt id) within the connection, ascending, suites contiguous."""
    suites: Integers
    """[P] number of each prompt's suite."""
    sums: Floats
    """[P, k+1] weighted rounds with at least i accepted tokens, i = 0..k."""
    names: Sequence[tuple[str, str]] = ()
    """(suite, prompt id) of each prompt; only where asked for."""

    @property
    def strata(self) -> tuple[int, ...]:
        """Number of prompts of each suite, in row order."""
        return strata_of(self.suites)


def strata_of(suites: Integers) -> tuple[int, ...]:
    """Return the run lengths of a sorted column of suite numbers."""
    return tuple(int(n) for n in np.unique(suites, return_counts=True)[1])


def accepted_per_round(sums: Floats) -> Floats:
    """From sums [..., k+1] to [..., 1]: sum of m_i."""
    accepted: Floats = sums[..., 1:] @ np.ones((sums.shape[-1] - 1, 1))
    return accepted / sums[..., :1]


def conditional_rates(sums: Floats) -> Floats:
    """From sums [..., k+1] to c_1..c_k, [..., k]."""
    return sums[..., 1:] / sums[..., :-1]


def prompt_groups(connection: Any, by: Sequence[str], *, named: bool = False) -> list[Group]:
    """Read the groups from the temporary table ``cells``.

    Args:
        connection: DuckDB connection on which :func:`specbench.results.aggregate.make_cells` ran with at
            least these columns.
        by: the columns that name a group; suites are pooled where ``suite`` is not among them.
        named: fill ``names``.
    """
    depth = int(connection.execute("SELECT max(k) FROM cells").fetchall()[0][0])
    steps = ", ".join(
        f"coalesce(sum(weight) FILTER (num_accepted >= {i}), 0) AS w_{i}" for i in range(depth + 1)
    )
    inner = ", ".join(dict.fromkeys([*by, "suite", "prompt_id"]))
    keys = ", ".join(by) or "1"
    table = connection.sql(
        f"""
        SELECT *, dense_rank() OVER (ORDER BY {keys}) AS group_number,
               dense_rank() OVER (ORDER BY suite, prompt_id) AS prompt_number,
               dense_rank() OVER (ORDER BY suite) AS suite_number
        FROM (SELECT {inner}, max(k) AS depth, {steps} FROM cells GROUP BY {inner})
        ORDER BY group_number, prompt_number
        """
    ).to_arrow_table()
    numbers = {
        name: table.column(name).to_numpy()
        for name in ("group_number", "prompt_number", "suite_number", "depth")
    }
    sums = np.stack([table.column(f"w_{i}").to_numpy() for i in range(depth + 1)], axis=1).astype(np.float64)
    borders = np.flatnonzero(np.diff(numbers["group_number"], prepend=-1))
    keyed = table.select(list(by)).take(borders).to_pylist() if by else [{}]
    suites, prompts = (table.column(c).to_pylist() for c in ("suite", "prompt_id")) if named else ([], [])
    groups = []
    for row, start, end in zip(keyed, borders, [*borders[1:], len(sums)], strict=True):
        own = int(numbers["depth"][start:end].max())
        groups.append(
            Group(
                keys=row,
                prompts=numbers["prompt_number"][start:end].astype(np.int64),
                suites=numbers["suite_number"][start:end].astype(np.int64),
                sums=sums[start:end, : own + 1],
                names=tuple(zip(suites[start:end], prompts[start:end], strict=True)),
            )
        )
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Two groups over the prompts they share."""

    left: Floats
    """[P, k+1]"""
    right: Floats
    """[P, k'+1]"""
    suites: Integers
    """[P]"""

    @property
    def strata(self) -> tuple[int, ...]:
        """Number of shared prompts of each suite, in row order."""
        return strata_of(self.suites)

    @property
    def joined(self) -> Floats:
        """[P, k+1 + k'+1]: one row a prompt, so that both sides are resampled together."""
        return np.concatenate([self.left, self.right], axis=1)

    def split(self, sums: Floats) -> tuple[Floats, Floats]:
        """Take ``joined`` (or its resampled sums) apart again."""
        width = self.left.shape[1]
        return sums[..., :width], sums[..., width:]


def paired(left: Group, right: Group, leave_out: Integers | None = None) -> Pairs:
    """Align two groups on the prompts they share.

    Args:
        left: one side.
        right: the other.
        leave_out: prompt numbers not to use although both have them.
    """
    shared, in_left, in_right = np.intersect1d(
        left.prompts, right.prompts, assume_unique=True, return_indices=True
    )
    if leave_out is not None:
        keep = ~np.isin(shared, leave_out)
        in_left, in_right = in_left[keep], in_right[keep]
    return Pairs(left=left.sums[in_left], right=right.sums[in_right], suites=left.suites[in_left])


def by_keys(groups: Iterable[Group], names: Sequence[str]) -> dict[tuple[Any, ...], Group]:
    """Index groups by their keys."""
    return {tuple(g.keys[n] for n in names): g for g in groups}
