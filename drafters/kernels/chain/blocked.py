"""Chain attention on the blocked CPU path: T = 1 query per row, at position row + J.

Example: ``chain_attention(q, k, v, own_k, own_v, rows, cu_seqlens, window=1024)``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.drafters.kernels.prefix import blocked
from specbench.drafters.kernels.prefix.options import Options


def chain_options(q: Tensor, own_k: Tensor | None, window: int | None, scale: float | None) -> Options:
    """Return the options of a chain step: the query's position is its row plus the number of own keys."""
    return Options(
        offset=0 if own_k is None else own_k.shape[1],
        window=window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )


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
    q_sink: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention output [R, Hq, D]; see ``specbench.drafters.kernels.chain.chain_attention``."""
    far = None if q_sink is None else q_sink[:, None]
    options = chain_options(q, own_k, window, scale)
    return blocked.attend(q[:, None], k, v, own_k, own_v, far, rows, cu_seqlens, sink, options)[:, 0]


def chain_attention_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    labels: Tensor,
    num_regions: int,
    *,
    recent: int | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output, mass, entropy); see ``specbench.drafters.kernels.chain.chain_attention_stats``."""
    far = None if q_sink is None else q_sink[:, None]
    options = chain_options(q, own_k, window, scale)
    args = (q[:, None], k, v, own_k, own_v, far, rows, cu_seqlens, sink, options, labels, num_regions, recent)
    out, mass, entropy, _ = blocked.statistics(*args)
    return out[:, 0], mass[:, 0], entropy[:, 0]


def chain_attention_shares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    labels: Tensor,
    num_regions: int,
    recents: Sequence[int],
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (output, mass, entropy, near); see ``specbench.drafters.kernels.chain.chain_attention_shares``."""
    far = None if q_sink is None else q_sink[:, None]
    options = chain_options(q, own_k, window, None)
    args = (
        q[:, None],
        k,
        v,
        own_k,
        own_v,
        far,
        rows,
        cu_seqlens,
        sink,
        options,
        labels,
        num_regions,
        None,
        recents,
    )
    out, mass, entropy, near = blocked.statistics(*args)
    return out[:, 0], mass[:, 0], entropy[:, 0], near[:, 0]
