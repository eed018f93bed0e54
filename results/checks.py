"""What no honest table can hold: impossible counts, weights that are not weights, repeated rows.

Example:
    round_problems(table)  ->  ["num_accepted is above num_drafted in 1 row (first: prompt 'toy/1', round 3)"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_Arrays = Mapping[str, Any]

_RULES: tuple[tuple[str, Callable[[_Arrays], Any]], ...] = (
    ("k is below 1", lambda r: r["k"] < 1),
    ("num_accepted is negative", lambda r: r["num_accepted"] < 0),
    ("num_accepted is above num_drafted", lambda r: r["num_accepted"] > r["num_drafted"]),
    ("num_drafted is above k", lambda r: r["num_drafted"] > r["k"]),
    (
        "num_emitted is neither num_accepted nor num_accepted + 1",
        lambda r: (r["num_emitted"] != r["num_accepted"]) & (r["num_emitted"] != r["num_accepted"] + 1),
    ),
    ("weight is not above 0 and at most 1", lambda r: ~((r["weight"] > 0) & (r["weight"] <= 1 + 1e-9))),
    ("round is negative", lambda r: r["round"] < 0),
    ("start is negative", lambda r: r["start"] < 0),
    ("turn is negative", lambda r: r["turn"] < 0),
    (
        "temperature is negative or not finite",
        lambda r: ~((r["temperature"] >= 0) & np.isfinite(r["temperature"])),
    ),
    ("engine_accepted is below num_accepted", lambda r: r["engine_accepted"] < r["num_accepted"]),
    ("draft_ms is negative or not finite", lambda r: (r["draft_ms"] < 0) | np.isinf(r["draft_ms"])),
    ("verify_ms is negative or not finite", lambda r: (r["verify_ms"] < 0) | np.isinf(r["verify_ms"])),
)

_NUMBERS = (
    "k", "num_accepted", "num_drafted", "num_emitted", "weight", "round", "start", "turn", "temperature",
    "engine_accepted", "draft_ms", "verify_ms",
)  # fmt: skip


def round_problems(table: Any) -> Iterator[str]:
    """Yield one sentence for every rule that rows of ``rounds`` break.

    Args:
        table: pyarrow table or record batch of the ``rounds`` schema.
    """
    if table.num_rows == 0:
        return
    with np.errstate(invalid="ignore"):
        arrays = {name: np.asarray(table.column(name)) for name in _NUMBERS}
        for sentence, broken in _RULES:
            bad = np.flatnonzero(broken(arrays))
            if len(bad):
                where = int(bad[0])
                prompt, index = table.column("prompt_id")[where].as_py(), table.column("round")[where].as_py()
                rows = "1 row" if len(bad) == 1 else f"{len(bad)} rows"
                yield f"{sentence} in {rows} (first: prompt {prompt!r}, round {index})"
