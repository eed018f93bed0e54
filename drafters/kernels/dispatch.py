"""Choosing an implementation, and saying so once when it is not the one that was asked for.

Example: ``fall_back("chain attention", "triton", "blocked", "head_dim 512 is over 256")`` warns the first
    time only.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING

from specbench.errors import SpecbenchWarning, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

_said: set[tuple[str, str, str]] = set()


def fall_back(op: str, wanted: str, used: str, reason: str) -> None:
    """Warn, once per reason, that ``op`` runs on ``used`` although ``wanted`` was asked for or preferred."""
    key = (op, wanted, reason)
    if key not in _said:
        _said.add(key)
        warnings.warn(
            f"{op}: the {wanted} backend does not run here ({reason}); using {used}. "
            f"Pass backend={used!r} to say that this is meant.",
            SpecbenchWarning,
            stacklevel=4,
        )


def check_backend(name: str, known: tuple[str, ...]) -> None:
    """Refuse a backend name that is not in ``known``.

    Raises:
        UserError: the name is unknown.
    """
    if name != "auto" and name not in known:
        raise unknown_name("attention backend", name, ("auto", *known))


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_missing(x: Tensor) -> str | None:
    """Return why no Triton kernel can run on ``x`` (None: it can)."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if interpreted():
        return None
    if x.device.type != "cuda":
        return f"the tensors are on {x.device.type}, not on a CUDA device"
    return None


def choose(
    op: str,
    backend: str,
    q: Tensor,
    k: Tensor,
    *,
    num_own: int = 0,
    q_sink: Tensor | None,
    stats: bool = False,
    too_big: str | None = None,
) -> str:
    """Return the backend that runs a call; warns where that is another one than asked for.

    Args:
        op: the operation, for the warning.
        backend: a known name or ``auto``.
        q: queries, last dimension D.
        k: keys.
        num_own: own keys a row.
        q_sink: queries against sinks outside the window, where given.
        stats: whether the call also asks for mass and entropy.
        too_big: why the Triton kernels of this operation cannot take the shape, where the operation knows it.
    """
    if backend in ("reference", "blocked") or (backend == "auto" and q.device.type == "cpu"):
        return "blocked" if backend == "auto" else backend
    wanted = "triton" if backend == "auto" else backend
    reason: str | None = None
    if wanted == "triton":
        reason = triton_missing(q)
        if reason is None:
            from specbench.drafters.kernels.prefix import launch

            reason = launch.unsupported(q, k, num_own) or too_big
    elif stats:
        reason = "it returns no attention mass"
    elif q_sink is not None:
        reason = "it has one query per row, and sinks at re-packed positions need two"
    if reason is None:
        return wanted
    fall_back(op, wanted, "blocked", reason)
    return "blocked"
