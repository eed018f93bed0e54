"""Forward KL from the target to the drafter over the draft vocabulary, without keeping any logits.

The gradient of KL(p || softmax(z)) with respect to the logits z is softmax(z) - p, so logits are made in blocks of
rows, turned into that gradient at once, multiplied back through the head, and forgotten: memory is that of one block
whatever the number of rows.

Example:
    p = teacher_probs(final, head)                                  # [T, Vd]
    out = linear_kl(post, head, p, index, scale)                    # out.loss.backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20
"""Of one block of logits: small enough to stay in the cache of a CPU core, and a GPU gets its own bound."""
GPU_BLOCK_BYTES = 512 << 20


def block_rows(head: Tensor) -> int:
    """Rows of logits made at a time."""
    size = GPU_BLOCK_BYTES if head.is_cuda else BLOCK_BYTES
    return max(16, size // (head.shape[0] * head.element_size()))


@torch.no_grad()
def teacher_probs(final: Tensor, head: Tensor) -> Tensor:
    """Return softmax(final head^T), the target's law restricted to the draft vocabulary.

    Args:
        final: [T, H_target] target states after the final norm.
        head: [Vd, H_target] the target's head rows at the draft vocabulary's ids.

    Returns:
        [T, Vd] in the head's dtype.
    """
    size = block_rows(head)
    out = head.new_empty(final.shape[0], head.shape[0])
    for start in range(0, final.shape[0], size):
        piece = out[start : start + size]
        logits = final[start : start + size].to(head.dtype) @ head.T
        torch.softmax(logits, dim=-1, out=piece)
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """What ``linear_kl`` gives."""

    loss: Tensor
    """Scalar: sum of scale_r KL_r. Its value is 0 where only the gradient was asked for."""
    best: Tensor
    """[R] int64 the drafter's most probable draft id."""


class _LinearKL(torch.autograd.Function):
    """Makes the gradients in the forward pass: what backward needs is [R, H], not [R, Vd]."""

    @staticmethod
    def forward(
        ctx: Any, post: Tensor, head: Tensor, probs: Tensor, index: Tensor, scale: Tensor, with_loss: bool
    ) -> tuple[Tensor, Tensor]:
        num_rows, size = post.shape[0], block_rows(head)
        train_head = head.requires_grad
        grad_post = torch.empty_like(post)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if train_head else None
        best = torch.empty(num_rows, dtype=torch.int64, device=post.device)
        total = torch.zeros((), dtype=torch.float32, device=post.device)
        shape = (min(size, num_rows), head.shape[0])
        logits_buffer, q_buffer, p_buffer = (post.new_empty(shape) for _ in range(3))
        for start in range(0, num_rows, size):
            rows = slice(start, min(start + size, num_rows))
            count = rows.stop - start
            logits, q, p = logits_buffer[:count], q_buffer[:count], p_buffer[:count]
            torch.mm(post[rows], head.T, out=logits)
            torch.softmax(logits, dim=-1, out=q)
            torch.index_select(probs, 0, index[rows], out=p)
            # max and not argmax: the same answer, several times faster on a CPU
            top, best[rows] = logits.max(dim=-1)
            if with_loss:
                total += (scale[rows] * _kl(logits, p)).sum()
            q.sub_(p)
            grad_post[rows] = (q @ head) * scale[rows, None].to(post.dtype)
            if grad_head is not None:
                q.mul_(scale[rows, None].to(q.dtype))
                grad_head += (q.T @ post[rows]).float()
        ctx.save_for_backward(grad_post, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        grad_post, grad_head = ctx.saved_tensors
        to_head = None if grad_head is None else (grad_head * grad).to(ctx.head_dtype)
        return grad_post * grad.to(grad_post.dtype), to_head, None, None, None, None


def _kl(logits: Tensor, probs: Tensor) -> Tensor:
    """[n] KL(p || softmax(logits)) in float32."""
    p = probs.float()
    return (p * (p.clamp(min=1e-30).log() - logits.float().log_softmax(-1))).sum(-1)


def linear_kl(
    post: Tensor, head: Tensor, probs: Tensor, index: Tensor, scale: Tensor, *, with_loss: bool = True
) -> LossOutput:
    """Return the sum of scale_r KL(probs[index_r] || softmax(post_r head^T)).

    Args:
        post: [R, H] final-norm outputs of the drafter.
        head: [Vd, H] its head; receives a gradient where it is trained.
        probs: [T, Vd] target laws, from ``teacher_probs``.
        index: [R] int64 which law each row is compared with.
        scale: [R] float32 weight of each row; 0 leaves a row out.
        with_loss: False leaves the loss value 0 and makes the gradient only.
    """
    loss, best = _LinearKL.apply(post, head, probs, index, scale, with_loss)  # type: ignore[no-untyped-call]
    return LossOutput(loss=loss, best=best)
