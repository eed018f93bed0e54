"""Chain attention in plain PyTorch: the specification that every other backend is tested against.

A chain hangs on one packed row of step 1. At step j = J + 1 its query sees the step-1 keys of its own
sequence up to that row, and the J own keys its earlier steps added; all under one softmax. For row 7 of a
sequence that starts at 4, with J = 2 and a window of 4: the query's position is 9, it sees positions 6..9, so
packed rows 6 and 7 and both own keys (positions 8 and 9).

Masks and scores are materialised, R x (2N + J) of them: for tests and small inputs only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence each packed row belongs to; -1 or S for rows outside every sequence."""
    return torch.searchsorted(cu_seqlens, rows.contiguous(), right=True) - 1


def visible(
    rows: Tensor, cu_seqlens: Tensor, num_keys: int, num_own: int, window: int | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Say which keys each query sees.

    Args:
        rows: [R] packed row of each chain; a row outside every sequence is padding and sees nothing.
        cu_seqlens: [S+1] sequence boundaries.
        num_keys: N.
        num_own: J.
        window: keys at positions (p - window, p] are visible, where p is the query's position; None: all
            before p.
        sink: [S, 2] packed (start, end) per sequence, visible in spite of the window.

    Returns:
        near [R, N]: prefix keys inside the window; far [R, N]: sink keys outside the window (disjoint from
        near); own [R, J]: own keys inside the window.
    """
    num_seqs = cu_seqlens.numel() - 1
    keys = torch.arange(num_keys, device=rows.device)
    own = torch.arange(1, num_own + 1, device=rows.device)
    seq = sequence_of(rows, cu_seqlens)
    real = (seq >= 0) & (seq < num_seqs)
    before = (keys <= rows[:, None]) & (sequence_of(keys, cu_seqlens) == seq[:, None]) & real[:, None]
    if window is None:
        near = before
        own_seen = real[:, None].expand(-1, num_own)
    else:
        near = before & (keys > rows[:, None] + num_own - window)
        own_seen = (own > num_own - window) & real[:, None]
    far = torch.zeros_like(near)
    if sink is not None:
        start, end = sink[seq.clamp(0, num_seqs - 1)].unbind(-1)
        far = before & ~near & (keys >= start[:, None]) & (keys < end[:, None])
    return near, far, own_seen


def chain_probabilities(
    q: Tensor,
    k: Tensor,
    own_k: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the probabilities of prefix keys [R, Hq, N] and own keys [R, Hq, J]; zero on padding rows.

    Half precision is computed in float32.
    """
    q, k = _widen(q), _widen(k)
    num_keys, num_own = k.shape[0], 0 if own_k is None else own_k.shape[1]
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    near, far, own_seen = visible(rows, cu_seqlens, num_keys, num_own, window, sink)

    k = k.repeat_interleave(group, dim=1)
    prefix = torch.einsum("rhd,nhd->rhn", q, k)
    if q_sink is not None:
        prefix = torch.where(far[:, None], torch.einsum("rhd,nhd->rhn", _widen(q_sink), k), prefix)
    own = q.new_zeros(q.shape[0], q.shape[1], 0)
    if own_k is not None:
        own = torch.einsum("rhd,rjhd->rhj", q, _widen(own_k).repeat_interleave(group, dim=2))

    seen = torch.cat([near | far, own_seen], dim=1)[:, None]
    scores = torch.cat([prefix, own], dim=2) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    # A padding row has no visible key: a softmax over -inf only would be NaN, and so would its gradient.
    scores = torch.where(seen.any(-1, keepdim=True), scores, torch.zeros_like(scores))
    probs = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)
    return probs[..., :num_keys], probs[..., num_keys:]


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
    prefix, own = chain_probabilities(
        q, k, own_k, rows, cu_seqlens, window=window, sink=sink, q_sink=q_sink, scale=scale
    )
    group = q.shape[1] // k.shape[1]
    out = torch.einsum("rhn,nhd->rhd", prefix, _widen(v).repeat_interleave(group, dim=1))
    if own_v is not None:
        out = out + torch.einsum("rhj,rjhd->rhd", own, _widen(own_v).repeat_interleave(group, dim=2))
    return out.to(q.dtype)


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
    """Return (output, mass per region and own key, entropy in nats); see the package's function."""
    out = chain_attention(
        q, k, v, own_k, own_v, rows, cu_seqlens, window=window, sink=sink, q_sink=q_sink, scale=scale
    )
    prefix, own = chain_probabilities(
        q, k, own_k, rows, cu_seqlens, window=window, sink=sink, q_sink=q_sink, scale=scale
    )
    region = labels.expand(rows.numel(), -1)
    columns = num_regions
    if recent is not None:
        near, _, _ = visible(rows, cu_seqlens, k.shape[0], own.shape[-1], recent, None)
        region = torch.where(near, num_regions, region)
        columns += 1
    mass = prefix.new_zeros(*prefix.shape[:2], columns)
    mass.scatter_add_(2, region[:, None].expand_as(prefix), prefix)
    entropy = torch.special.entr(prefix).sum(-1) + torch.special.entr(own).sum(-1)
    return out, torch.cat([mass, own], dim=-1), entropy


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
