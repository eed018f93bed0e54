"""Draft-decode attention in plain PyTorch: the specification that every other backend is tested against.

With 10 tokens cached, T = 2 and a window of 4, the queries sit at positions 8 and 9 and see positions 5..8 and 6..9,
and the sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
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
) -> Tensor:
    """Return the output [B, T, Hq, D]; see ``specbench.drafters.kernels.decode.decode_attention``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = torch.arange(k.shape[1], device=q.device)
    pos = (lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device))[..., None]  # [B, T, 1]
    near = keys <= pos
    far = torch.zeros_like(near)
    if window is not None:
        near = near & (keys > pos - window)
        if sink is not None:
            far = (keys <= pos) & ~near & (keys >= sink[:, :1, None]) & (keys < sink[:, 1:, None])
    # Past a sequence's length the cache may hold anything, NaN included.
    filled = (keys < lengths[:, None])[..., None, None]
    k, v = (x.to(wide).masked_fill(~filled, 0.0).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bnhd->bhtn", q.to(wide), k)
    if q_sink is not None:
        scores = torch.where(far[:, None], torch.einsum("bthd,bnhd->bhtn", q_sink.to(wide), k), scores)
    seen = (near | far)[:, None]
    scores = (scores * scale).masked_fill(~seen, -torch.inf)
    scores = torch.where(seen.any(-1, keepdim=True), scores, 0.0)
    probs = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)
    out = torch.einsum("bhtn,bnhd->bthd", probs, v)
    if gate is not None:
        out = out * torch.sigmoid(gate.to(wide))
    return out.to(q.dtype)
