"""Chain attention by FlexAttention, for comparison.

Example: ``chain_attention(q, k, v, own_k, own_v, rows, cu_seqlens, window=1024)``.
"""

from __future__ import annotations

from torch import Tensor

from specbench.drafters.kernels.chain.blocked import chain_options
from specbench.drafters.kernels.prefix import dense


def chain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention output [R, Hq, D]; see ``specbench.drafters.kernels.chain.chain_attention``."""
    options = chain_options(q, own_k, window, scale)
    return dense.attend_flex(q[:, None], k, v, own_k, own_v, rows, cu_seqlens, sink, options)[:, 0]
