"""Draft-decode attention, plain PyTorch, one sequence at a time: reads only the keys some query of it sees.

Example: ``decode_attention(q, k, v, lengths, window=1024)``.
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
    num_queries, num_heads, dim = q.shape[1:]
    num_kv = k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    sinks = [[0, 0]] * q.shape[0] if sink is None else sink.tolist()
    out = torch.zeros(q.shape, dtype=wide, device=q.device)

    def heads_first(x: Tensor) -> Tensor:
        """[T, Hq, D] -> [Hkv, T * G, D]."""
        return x.to(wide).view(num_queries, num_kv, -1, dim).transpose(0, 1).reshape(num_kv, -1, dim)

    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pos = torch.arange(length - num_queries, length, device=q.device).repeat_interleave(
            num_heads // num_kv
        )
        near_lo, far_lo, far_hi = 0, 0, 0
        if window is not None:
            near_lo = max(0, length - num_queries + 1 - window)
            far_lo, far_hi = sinks[b][0], max(sinks[b][0], min(sinks[b][1], length - window))
        keys, values = (
            torch.cat([x[b, near_lo:length], x[b, far_lo:far_hi]]).to(wide).transpose(0, 1) for x in (k, v)
        )
        index = torch.arange(near_lo, length, device=q.device)
        seen = index <= pos[:, None]
        scores = heads_first(q[b]) @ keys.transpose(1, 2)
        if window is not None:
            behind = torch.arange(far_lo, far_hi, device=q.device) <= pos[:, None] - window
            seen = torch.cat([seen & (index > pos[:, None] - window), behind], dim=1)
            if q_sink is not None and far_hi > far_lo:
                scores[..., len(index) :] = heads_first(q_sink[b]) @ keys[:, len(index) :].transpose(1, 2)
        scores = (scores * scale).masked_fill_(~seen, -torch.inf)
        probs = torch.softmax(scores, dim=-1).masked_fill_(~seen.any(1, keepdim=True), 0.0)
        result = (probs @ values).view(num_kv, num_queries, -1, dim)
        out[b] = result.transpose(0, 1).flatten(1, 2)
    if gate is not None:
        out *= torch.sigmoid(gate.to(wide))
    return out.to(q.dtype)
