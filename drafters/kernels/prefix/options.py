"""What a call on packed rows fixes besides its tensors.

Example: ``Options(offset=2, window=1024, scale=0.125)`` for the third step of a chain with head dimension 64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Positions, window and scale, the same for every row."""

    offset: int
    """Position of a row's first query, relative to the row."""
    window: int | None
    """Positions a query sees, its own included; None: all."""
    scale: float
    causal: bool = False
    """Whether a query is kept from own keys at later positions."""
