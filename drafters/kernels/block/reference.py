"""Block attention in plain PyTorch: the specification that every other backend is tested against.

A block of B queries hangs on one packed row: query t sits at position row + 1 + t, sees the keys of its own
sequence up to the row, and the block's B keys in both directions. With row 3, B = 4 and a window of 6, query
2 is at position 6 and sees positions 1..6 and, ahead of it, position 7.

Masks and scores are materialised, R x B x (N + B) of them: for tests and small inputs only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.drafters.kernels.chain.reference import sequence_of


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
    wide = torch.promote_types(q.dtype, torch.float32)
    group, size = q.shape[2] // k.shape[1], q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = torch.arange(k.shape[0], device=q.device)[None, None]
    row = rows[:, None, None]
    pos = row + 1 + torch.arange(size, device=q.device)[None, :, None]
    block_pos = row + 1 + torch.arange(size, device=q.device)[None, None]
    seq = sequence_of(rows, cu_seqlens)[:, None, None]
    real = (seq >= 0) & (seq < cu_seqlens.numel() - 1)

    before = real & (keys <= row) & (sequence_of(keys, cu_seqlens) == seq)
    near = before.expand(-1, size, -1) if window is None else before & (keys > pos - window)
    far = torch.zeros_like(near)
    if sink is not None:
        start, end = sink[seq.clamp(0, len(sink) - 1)].unbind(-1)
        far = before & ~near & (keys >= start) & (keys < end)
    block = real.expand(-1, size, size)
    if window is not None:
        block = block & (block_pos > pos - window)
    if causal:
        block = block & (block_pos <= pos)

    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    block_k, block_v = (x.to(wide).repeat_interleave(group, dim=2) for x in (block_k, block_v))
    prefix = torch.einsum("rthd,nhd->rhtn", q.to(wide), k)
    if q_sink is not None:
        prefix = torch.where(far[:, None], torch.einsum("rthd,nhd->rhtn", q_sink.to(wide), k), prefix)
    own = torch.einsum("rthd,rjhd->rhtj", q.to(wide), block_k)
    seen = torch.cat([near | far, block], dim=-1)[:, None]
    scores = (torch.cat([prefix, own], dim=-1) * scale).masked_fill(~seen, -torch.inf)
    # A padding row sees nothing: a softmax over -inf only would be NaN, and so would its gradient.
    scores = torch.where(seen.any(-1, keepdim=True), scores, 0.0)
    probs = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)
    out = torch.einsum("rhtn,nhd->rthd", probs[..., : k.shape[0]], v)
    out = out + torch.einsum("rhtj,rjhd->rthd", probs[..., k.shape[0] :], block_v)
    return out.to(q.dtype)
