"""Block attention on the blocked CPU path: B queries per row, the first right after the row.

Example: ``block_attention(q, k, v, block_k, block_v, rows, cu_seqlens)``.
"""

from __future__ import annotations

from torch import Tensor

from specbench.drafters.kernels.prefix import blocked
from specbench.drafters.kernels.prefix.options import Options


def block_options(q: Tensor, causal: bool, window: int | None, scale: float | None) -> Options:
    """Return the options of a block: query t sits at position row + 1 + t."""
    return Options(
        offset=1, window=window, scale=q.shape[-1] ** -0.5 if scale is None else scale, causal=causal
    )


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
) -> Tensor:
    """Return the attention output [R, B, Hq, D]; see ``specbench.drafters.kernels.block.block_attention``."""
    options = block_options(q, causal, window, scale)
    return blocked.attend(q, k, v, block_k, block_v, q_sink, rows, cu_seqlens, sink, options)
