"""The same attention through PyTorch's own functions: SDPA with a mask, and FlexAttention. For comparison.

Own keys are appended to the prefix keys, N + R x J of them, so that one mask says who sees what. SDPA holds
that mask in memory, (R x T) x (N + R x J) booleans; FlexAttention holds one bit of it per 128 x 128 block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from specbench.drafters.kernels.prefix.options import Options

Predicate = Callable[[Tensor, Tensor], Tensor]


def predicate(
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    num_queries: int,
    num_keys: int,
    num_own: int,
    options: Options,
) -> Predicate:
    """Return f(query index in R x T, key index in N + R x J) -> whether it is seen; both broadcast."""
    num_seqs = cu_seqlens.numel() - 1
    seq = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    real = (seq >= 0) & (seq < num_seqs)
    seq = seq.clamp(0, max(num_seqs - 1, 0))
    start = cu_seqlens[seq]
    sinks = torch.zeros(len(rows), 2, dtype=rows.dtype, device=rows.device) if sink is None else sink[seq]
    sink_lo, sink_hi = sinks[:, 0].contiguous(), sinks[:, 1].contiguous()
    window = 1 << 40 if options.window is None else options.window
    own = max(num_own, 1)

    def seen(query: Tensor, key: Tensor) -> Tensor:
        i = query // num_queries
        row = rows[i]
        pos = row + options.offset + query % num_queries
        kept = (key > pos - window) | ((key >= sink_lo[i]) & (key < sink_hi[i]))
        prefix = (key < num_keys) & (key >= start[i]) & (key <= row) & kept
        own_pos = row + 1 + (key - num_keys) % own
        mine = (key >= num_keys) & ((key - num_keys) // own == i) & (own_pos > pos - window)
        if options.causal:
            mine = mine & (own_pos <= pos)
        return real[i] & (prefix | mine)

    return seen


def _arrange(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[1, Hq, R x T, D], [1, Hkv, N + R x J, D] twice."""
    if own_k is not None and own_v is not None:
        k, v = torch.cat([k, own_k.flatten(0, 1)]), torch.cat([v, own_v.flatten(0, 1)])
    return q.flatten(0, 1).transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def sdpa_mask(
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    num_queries: int,
    num_keys: int,
    num_own: int,
    options: Options,
) -> Tensor:
    """Return who sees what, [R x T, N + R x J] booleans."""
    seen = predicate(rows, cu_seqlens, sink, num_queries, num_keys, num_own, options)
    index = torch.arange(rows.numel() * num_queries, device=rows.device)[:, None]
    return seen(index, torch.arange(num_keys + rows.numel() * num_own, device=rows.device))


def attend_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    options: Options,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the output [R, T, Hq, D] by SDPA with a materialised mask; ``mask``: of ``sdpa_mask``, to reuse one."""
    num_own = 0 if own_k is None else own_k.shape[1]
    queries, keys, values = _arrange(q, k, v, own_k, own_v)
    if mask is None:
        mask = sdpa_mask(rows, cu_seqlens, sink, q.shape[1], k.shape[0], num_own, options)
    # A query that sees nothing would be NaN; it looks at every key instead, and its output is dropped.
    alive = mask.any(1, keepdim=True)
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask | ~alive, scale=options.scale, enable_gqa=True
    )
    return torch.where(alive, out, 0.0)[0].transpose(0, 1).reshape(q.shape)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex.flex_attention, dynamic=False)


def flex_mask(
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    num_queries: int,
    num_keys: int,
    num_own: int,
    options: Options,
) -> flex.BlockMask:
    """Return FlexAttention's block mask of R x ``num_queries`` queries over N + R x J keys."""
    seen = predicate(rows, cu_seqlens, sink, num_queries, num_keys, num_own, options)
    return flex.create_block_mask(
        lambda batch, head, query, key: seen(query, key),
        None,
        None,
        rows.numel() * num_queries,
        num_keys + rows.numel() * num_own,
        device=rows.device.type,
        # Compiled, it never holds the mask of single queries and keys.
        _compile=rows.is_cuda,
    )


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    options: Options,
    mask: flex.BlockMask | None = None,
) -> Tensor:
    """Return the output [R, T, Hq, D] by FlexAttention, compiled on CUDA; ``mask``: of ``flex_mask``, to reuse one."""
    num_own = 0 if own_k is None else own_k.shape[1]
    queries, keys, values = _arrange(q, k, v, own_k, own_v)
    if mask is None:
        mask = flex_mask(rows, cu_seqlens, sink, q.shape[1], k.shape[0], num_own, options)
    run = _compiled_flex() if q.is_cuda else flex.flex_attention
    out: Tensor = run(queries, keys, values, block_mask=mask, scale=options.scale, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(q.shape)
