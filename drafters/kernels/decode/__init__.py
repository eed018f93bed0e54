"""Draft-decode attention: the newest queries of each sequence over its key-value cache, with a window and sinks.

Example: ``out = decode_attention(q, k, v, lengths, window=1024, sink=sink)`` with q [B, T, Hq, D], k [B, L, Hkv, D].
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("triton", "reference", "blocked")
MAX_QUERIES = 128
"""Queries of a sequence that share a key-value head (T x Hq / Hkv); they are one tile of the Triton kernel."""


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend from the last T tokens of each sequence to the keys cached for it. For inference: no gradient.

    Query t of sequence b sits at position p = lengths[b] - T + t and sees positions (p - window, p] and the sinks.

    Args:
        q: [B, T, Hq, D] queries of the newest tokens, rotary applied.
        k: [B, L, Hkv, D] key cache, the newest tokens' keys included; query head h reads head h // (Hq // Hkv).
        v: [B, L, Hkv, D] value cache.
        lengths: [B] int64 tokens in the cache of each sequence. A query at a negative position (lengths[b] < T) is
            padding: its output is zero.
        window: positions a query sees, its own included; None: all.
        sink: [B, 2] int64 positions (start, end) that stay visible in spite of the window.
        q_sink: [B, T, Hq, D] used instead of q against sink keys outside the window (re-packed positions).
        gate: [B, T, Hq, D]; the output is multiplied by its sigmoid before it is written.
        scale: of the scores; D ** -0.5 where None.
        backend: ``auto`` (Triton on CUDA, blocked PyTorch on CPU), ``triton``, ``reference`` or ``blocked``. A backend
            that cannot take the input falls back to ``blocked`` with one warning.

    Returns:
        [B, T, Hq, D].

    Raises:
        UserError: unknown backend.
    """
    from specbench.drafters.kernels import dispatch

    assert k.shape == v.shape and k.shape[0] == q.shape[0] == lengths.shape[0], (q.shape, k.shape, v.shape)
    assert q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3], (q.shape, k.shape)
    assert window is None or window >= 1, window
    dispatch.check_backend(backend, BACKENDS)
    group = q.shape[1] * q.shape[2] // k.shape[2]
    too_big = f"{group} queries a key-value head are over {MAX_QUERIES}" if group > MAX_QUERIES else None
    name = dispatch.choose("decode attention", backend, q, k, q_sink=q_sink, too_big=too_big)
    module = importlib.import_module(f"specbench.drafters.kernels.decode.{name}")
    out: Tensor = module.decode_attention(
        q, k, v, lengths, window=window, sink=sink, q_sink=q_sink, gate=gate, scale=scale
    )
    return out
