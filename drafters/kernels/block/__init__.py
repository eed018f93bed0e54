"""Block attention: a block of queries on each row over a causal prefix and, both ways, over the block itself.

Example: ``out = block_attention(q, k, v, block_k, block_v, rows, cu_seqlens)`` with q [R, B, Hq, D].
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("triton", "flex", "sdpa", "reference", "blocked")


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend from a block of queries per row to the row's prefix and to the block, under one softmax.

    Query t sits at position p = row + 1 + t. It sees the prefix keys of its own sequence up to and including
    the row, cut to positions above p - window, the sink keys, and the block's keys at positions row + 1 ..
    row + B above p - window. A block for the very start of a sequence has no row to hang on and is padding.

    Args:
        q: [R, B, Hq, D] queries, rotary applied.
        k: [N, Hkv, D] prefix keys of all packed rows; query head h reads head h // (Hq // Hkv).
        v: [N, Hkv, D] prefix values.
        block_k: [R, B, Hkv, D] the blocks' keys.
        block_v: [R, B, Hkv, D] the blocks' values.
        rows: [R] int64, sorted: the last packed row each block sees. A row outside every sequence is padding:
            its output and its gradients are zero.
        cu_seqlens: [S+1] int64 boundaries of the packed sequences, 0 first.
        causal: hide block keys after the query's own position.
        window: positions up to its own that a query sees; None: all.
        sink: [S, 2] int64 packed rows (start, end) of each sequence that stay visible in spite of the window.
        q_sink: [R, B, Hq, D] used instead of q against sink keys outside the window (re-packed positions).
        scale: of the scores; D ** -0.5 where None.
        backend: ``auto`` (Triton on CUDA, blocked PyTorch on CPU), ``triton``, ``flex``, ``sdpa``,
            ``reference`` or ``blocked``. A backend that cannot take the input falls back to ``blocked`` with
            one warning.

    Returns:
        [R, B, Hq, D], differentiable in every float argument.

    Raises:
        UserError: unknown backend.
    """
    from specbench.drafters.kernels import dispatch

    num_rows, size, num_heads, dim = q.shape
    assert k.shape == v.shape and k.shape[2] == dim, (q.shape, k.shape, v.shape)
    assert num_heads % k.shape[1] == 0, (num_heads, k.shape[1])
    assert block_k.shape == block_v.shape == (num_rows, size, k.shape[1], dim), (q.shape, block_k.shape)
    assert rows.shape == (num_rows,), (rows.shape, num_rows)
    assert window is None or window >= 1, window
    dispatch.check_backend(backend, BACKENDS)
    name = dispatch.choose("block attention", backend, q, k, num_own=size, q_sink=q_sink)
    module = importlib.import_module(f"specbench.drafters.kernels.block.{name}")
    out: Tensor = module.block_attention(
        q,
        k,
        v,
        block_k,
        block_v,
        rows,
        cu_seqlens,
        causal=causal,
        window=window,
        sink=sink,
        q_sink=q_sink,
        scale=scale,
    )
    return out
