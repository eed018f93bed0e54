"""Block attention by SDPA with a materialised mask, for comparison.

Example: ``block_attention(q, k, v, block_k, block_v, rows, cu_seqlens)``.
"""

from __future__ import annotations

from torch import Tensor

from specbench.drafters.kernels.block.blocked import block_options
from specbench.drafters.kernels.prefix import dense


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
    q_sink: None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention output [R, B, Hq, D]; see ``specbench.drafters.kernels.block.block_attention``."""
    options = block_options(q, causal, window, scale)
    return dense.attend_sdpa(q, k, v, block_k, block_v, rows, cu_seqlens, sink, options)
