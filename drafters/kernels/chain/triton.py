"""Chain attention on the Triton prefix kernels: T = 1 query per row, at position row + J.

Example: ``chain_attention(q, k, v, own_k, own_v, rows, cu_seqlens)`` on CUDA tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.drafters.kernels.chain.blocked import chain_options
from specbench.drafters.kernels.prefix import launch


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
    gate: Tensor | None = None,
) -> Tensor:
    """Return the attention output [R, Hq, D]; see ``specbench.drafters.kernels.chain.chain_attention``."""
    return launch.attend(
        q[:, None],
        k,
        v,
        own_k,
        own_v,
        None if q_sink is None else q_sink[:, None],
        rows,
        cu_seqlens,
        sink,
        chain_options(q, own_k, window, scale),
        None if gate is None else gate[:, None],
    )[:, 0]


@torch.no_grad()
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
    options = chain_options(q, own_k, window, scale)
    q, k, v = q[:, None].contiguous(), k.contiguous(), v.contiguous()
    own_k = None if own_k is None else own_k.contiguous()
    own_v = None if own_v is None else own_v.contiguous()
    sink = None if sink is None or window is None else sink.contiguous()
    q_sink = None if q_sink is None or sink is None else q_sink[:, None].contiguous()
    plan = launch.Plan(rows.contiguous(), cu_seqlens.contiguous(), sink, q, k)
    out, lse = launch.forward(q, k, v, own_k, own_v, q_sink, None, plan, options)
    mass, entropy = launch.statistics(
        q, k, own_k, q_sink, lse, labels.contiguous(), num_regions, recent, plan, options
    )
    return out[:, 0], mass, entropy
