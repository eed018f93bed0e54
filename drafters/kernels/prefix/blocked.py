"""Prefix and own keys in blocks of rows, plain PyTorch: the CPU path, linear in time and memory under a window.

A block is up to 128 neighbouring queries' rows of one sequence. Only the slice of keys that some row of the
block sees is multiplied, so with a window of 1024 a block of rows 4000..4127 (offset 0) reads keys 2977..4127
and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.kernels.prefix.options import Options

MAX_ROWS = 128
"""Rows of a block, times queries per row."""
MAX_SPAN = 256
"""Packed rows between a block's first and last row, so that sparse rows do not share one wide slice."""
MAX_SCORES = 1 << 23
"""Scores held at a time; key-value heads are taken in turns above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows ``i0 <= i < i1`` of one sequence, and the packed keys that some of them see."""

    i0: int
    i1: int
    first: int
    """Smallest packed row of the block."""
    last: int
    """Largest packed row of the block."""
    key_lo: int
    """First key inside some row's window; the slice ends at ``last``, inclusive."""
    sink_lo: int
    sink_hi: int
    """Sink keys outside some row's window."""

    @property
    def num_near(self) -> int:
        """Keys of the slice."""
        return max(0, self.last + 1 - self.key_lo)

    @property
    def num_far(self) -> int:
        """Sink keys outside the window."""
        return max(0, self.sink_hi - self.sink_lo)


def blocks(
    rows: Tensor, cu_seqlens: Tensor, sink: Tensor | None, num_queries: int, options: Options
) -> Iterator[Block]:
    """Cut the rows into blocks, whatever the window is, so that an idle window changes no bit."""
    row_list: list[int] = rows.tolist()
    assert all(a <= b for a, b in pairwise(row_list)), "rows must be sorted"
    window, offset = options.window, options.offset
    bounds: list[int] = cu_seqlens.tolist()
    sinks: list[list[int]] = [[0, 0]] * (len(bounds) - 1) if sink is None else sink.tolist()
    for start, end, (sink_lo, sink_hi) in zip(bounds[:-1], bounds[1:], sinks, strict=True):
        i, stop = bisect_left(row_list, start), bisect_left(row_list, end)
        while i < stop:
            first = row_list[i]
            i1 = min(i + max(1, MAX_ROWS // num_queries), bisect_left(row_list, first + MAX_SPAN, i, stop))
            last = row_list[i1 - 1]
            # The first key inside the first query's window, and the first key inside the last query's.
            near = start if window is None else max(start, first + offset - window + 1)
            outside = start if window is None else max(start, last + offset + num_queries - window)
            yield Block(
                i0=i,
                i1=i1,
                first=first,
                last=last,
                key_lo=near,
                sink_lo=max(sink_lo, start),
                sink_hi=min(sink_hi, outside, last + 1),
            )
            i = i1


def _group(x: Tensor, num_kv_heads: int) -> Tensor:
    """[R, T, Hq, D] -> [Hkv, R, T * G, D], contiguous."""
    num_rows, num_queries, num_heads, dim = x.shape
    x = x.reshape(num_rows, num_queries, num_kv_heads, num_heads // num_kv_heads, dim)
    return x.permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous()


def _ungroup(x: Tensor, shape: torch.Size) -> Tensor:
    """[Hkv, R, T * G, ...] -> [R, T, Hq, ...]; ``shape`` is that of the queries."""
    num_rows, num_queries, num_heads, _ = shape
    x = x.unflatten(2, (num_queries, num_heads // x.shape[0]))  # type: ignore[no-untyped-call]
    return x.permute(1, 2, 0, *range(3, x.ndim)).flatten(2, 3)


def _widen(x: Tensor) -> Tensor:
    """Half precision is computed in float32: CPU matrix products of half types round after every block."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Inputs:
    """The tensors in the layout the blocks want: heads first, compute dtype."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        q_sink: Tensor | None,
        rows: Tensor,
        options: Options,
    ) -> None:
        heads, num_queries = k.shape[1], q.shape[1]
        self.num_kv_heads = heads
        self.num_queries = num_queries
        self.group = num_queries * (q.shape[2] // heads)
        self.num_own = 0 if own_k is None else own_k.shape[1]
        self.window = options.window
        self.rows = rows
        # Position of each query relative to its row, [T * G, 1], or one number where T = 1.
        shift = options.offset + torch.arange(num_queries, device=q.device)
        self.shift = shift.repeat_interleave(self.group // num_queries)[:, None] if num_queries > 1 else shift
        self.last_shift = options.offset + num_queries - 1
        self.own_hidden = self._own_hidden(options)
        self.q = _group(_widen(q), heads) * options.scale  # [Hkv, R, T * G, D]
        self.q_sink = self.q if q_sink is None else _group(_widen(q_sink), heads) * options.scale
        self.k = _widen(k).transpose(0, 1).contiguous()  # [Hkv, N, D]
        self.v = _widen(v).transpose(0, 1).contiguous()
        self.own_k = None if own_k is None else _widen(own_k).permute(2, 0, 1, 3)  # [Hkv, R, J, D]
        self.own_v = None if own_v is None else _widen(own_v).permute(2, 0, 1, 3)

    def _own_hidden(self, options: Options) -> Tensor | None:
        """[T * G or 1, J]: own keys a query does not see; None where it sees all."""
        own = torch.arange(1, self.num_own + 1, device=self.shift.device)
        hidden = torch.zeros_like(own + self.shift, dtype=torch.bool)
        if options.window is not None:
            hidden |= own <= self.shift - options.window
        if options.causal:
            hidden |= own > self.shift
        return hidden if bool(hidden.any()) else None

    def head_slices(self, block: Block) -> Iterator[slice]:
        """Key-value heads in turns that keep the scores under ``MAX_SCORES``."""
        width = block.num_near + block.num_far + self.num_own
        step = max(1, MAX_SCORES // ((block.i1 - block.i0) * self.group * width))
        for h in range(0, self.num_kv_heads, step):
            yield slice(h, min(h + step, self.num_kv_heads))

    def probabilities(self, block: Block, heads: slice) -> Tensor:
        """Return the block's probabilities [H, B, T * G, near + far + J] over (slice, far sinks, own keys)."""
        near, far = block.num_near, block.num_far
        q = self.q[heads, block.i0 : block.i1]  # [H, B, T * G, D]
        num_heads, num_rows, group, dim = q.shape
        scores = q.new_empty(num_heads, num_rows, group, near + far + self.num_own)
        flat = scores.view(num_heads, num_rows * group, -1)
        if near:
            keys = self.k[heads, block.key_lo : block.last + 1]
            torch.bmm(q.reshape(num_heads, -1, dim), keys.transpose(1, 2), out=flat[..., :near])
        if far:
            keys = self.k[heads, block.sink_lo : block.sink_hi]
            q_sink = self.q_sink[heads, block.i0 : block.i1].reshape(num_heads, -1, dim)
            torch.bmm(q_sink, keys.transpose(1, 2), out=flat[..., near : near + far])
        if self.own_k is not None:
            own = self.own_k[heads, block.i0 : block.i1]
            scores[..., near + far :] = q @ own.transpose(2, 3)
        self._mask(scores, block)
        return torch.softmax(scores, dim=-1)

    def _mask(self, scores: Tensor, block: Block) -> None:
        """Hide, in place, what single queries do not see: both slanted edges, far sinks, own keys."""
        near, far = block.num_near, block.num_far
        rows = self.rows[block.i0 : block.i1, None, None]
        right = max(0, block.first + 1 - block.key_lo)
        if right < near:
            keys = torch.arange(block.key_lo + right, block.last + 1, device=rows.device)
            scores[..., right:near].masked_fill_(keys > rows, -torch.inf)
        if self.own_hidden is not None:
            scores[..., near + far :].masked_fill_(self.own_hidden, -torch.inf)
        if self.window is None:
            return
        left = min(near, block.last + self.last_shift - self.window + 1 - block.key_lo)
        if left > 0:
            keys = torch.arange(block.key_lo, block.key_lo + left, device=rows.device)
            scores[..., :left].masked_fill_(keys <= rows + (self.shift - self.window), -torch.inf)
        if far:
            keys = torch.arange(block.sink_lo, block.sink_hi, device=rows.device)
            hidden = (keys > rows + (self.shift - self.window)) | (keys > rows)
            scores[..., near : near + far].masked_fill_(hidden, -torch.inf)

    def output(self, probs: Tensor, block: Block, heads: slice) -> Tensor:
        """Return the block's output [H, B, T * G, D]."""
        near, far = block.num_near, block.num_far
        num_heads, num_rows, group, _ = probs.shape
        flat = probs.view(num_heads, num_rows * group, -1)
        out = torch.bmm(flat[..., :near], self.v[heads, block.key_lo : block.key_lo + near])
        if far:
            out.baddbmm_(flat[..., near : near + far], self.v[heads, block.sink_lo : block.sink_hi])
        out = out.view(num_heads, num_rows, group, -1)
        if self.own_v is not None:
            out += probs[..., near + far :] @ self.own_v[heads, block.i0 : block.i1]
        return out


class _Gradients:
    """Gradient buffers in the blocks' layout."""

    def __init__(self, x: _Inputs) -> None:
        self.q = torch.zeros_like(x.q)
        self.q_sink = self.q if x.q_sink is x.q else torch.zeros_like(x.q)
        self.k = torch.zeros_like(x.k)
        self.v = torch.zeros_like(x.v)
        self.own_k = None if x.own_k is None else torch.zeros_like(x.own_k)
        self.own_v = None if x.own_v is None else torch.zeros_like(x.own_v)

    def add(self, x: _Inputs, block: Block, heads: slice, grad: Tensor) -> None:
        """Add one block's share. ``grad`` is the output's gradient [H, B, T * G, D].

        With P the probabilities, dP = dO V^T and dS = P (dP - rowsum(P dP)): dQ = dS K, dK = dS^T Q, dV = P^T
        dO.
        """
        near, far = block.num_near, block.num_far
        rows = slice(block.i0, block.i1)
        near_keys = slice(block.key_lo, block.key_lo + near)
        far_keys = slice(block.sink_lo, block.sink_lo + far)
        probs = x.probabilities(block, heads)
        num_heads, num_rows, group, dim = grad.shape
        flat = probs.view(num_heads, num_rows * group, -1)
        flat_grad = grad.reshape(num_heads, -1, dim)

        d_scores = torch.empty_like(probs)
        d_flat = d_scores.view_as(flat)
        for columns, keys in ((slice(0, near), near_keys), (slice(near, near + far), far_keys)):
            torch.bmm(flat_grad, x.v[heads, keys].transpose(1, 2), out=d_flat[..., columns])
            self.v[heads, keys].baddbmm_(flat[..., columns].transpose(1, 2), flat_grad)
        if x.own_v is not None and self.own_v is not None:
            d_scores[..., near + far :] = grad @ x.own_v[heads, rows].transpose(2, 3)
            self.own_v[heads, rows] += probs[..., near + far :].transpose(2, 3) @ grad
        d_scores *= probs
        d_scores -= probs * d_scores.sum(-1, keepdim=True)

        for columns, keys, q, into in (
            (slice(0, near), near_keys, x.q, self.q),
            (slice(near, near + far), far_keys, x.q_sink, self.q_sink),
        ):
            part = d_flat[..., columns]
            self.k[heads, keys].baddbmm_(part.transpose(1, 2), q[heads, rows].reshape(num_heads, -1, dim))
            into[heads, rows] += torch.bmm(part, x.k[heads, keys]).view(grad.shape)
        if x.own_k is not None and self.own_k is not None:
            own = d_scores[..., near + far :]
            self.own_k[heads, rows] += own.transpose(2, 3) @ x.q[heads, rows]
            self.q[heads, rows] += own @ x.own_k[heads, rows]


class _Attend(torch.autograd.Function):
    """Forward in blocks; backward recomputes each block's probabilities, so memory stays linear in length."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        q_sink: Tensor | None,
        rows: Tensor,
        cu_seqlens: Tensor,
        sink: Tensor | None,
        options: Options,
    ) -> Tensor:
        x = _Inputs(q, k, v, own_k, own_v, q_sink, rows, options)
        out = torch.zeros_like(x.q)
        for block in blocks(rows, cu_seqlens, sink, x.num_queries, options):
            for heads in x.head_slices(block):
                out[heads, block.i0 : block.i1] = x.output(x.probabilities(block, heads), block, heads)
        ctx.save_for_backward(q, k, v, own_k, own_v, q_sink, rows, cu_seqlens, sink)
        ctx.options = options
        return _ungroup(out, q.shape).to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, q_sink, rows, cu_seqlens, sink = ctx.saved_tensors
        options: Options = ctx.options
        x = _Inputs(q, k, v, own_k, own_v, q_sink, rows, options)
        total = _Gradients(x)
        grad = _group(_widen(grad), x.num_kv_heads)
        for block in blocks(rows, cu_seqlens, sink, x.num_queries, options):
            for heads in x.head_slices(block):
                total.add(x, block, heads, grad[heads, block.i0 : block.i1])
        return (
            _ungroup(total.q * options.scale, q.shape).to(q.dtype),
            total.k.transpose(0, 1).to(k.dtype),
            total.v.transpose(0, 1).to(v.dtype),
            None if total.own_k is None else total.own_k.permute(1, 2, 0, 3).to(own_k.dtype),
            None if total.own_v is None else total.own_v.permute(1, 2, 0, 3).to(own_v.dtype),
            None if q_sink is None else _ungroup(total.q_sink * options.scale, q.shape).to(q.dtype),
            *(None,) * 4,
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    q_sink: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    options: Options,
) -> Tensor:
    """Return the output [R, T, Hq, D], differentiable in the float arguments.

    Args:
        q: [R, T, Hq, D].
        k: [N, Hkv, D].
        v: [N, Hkv, D].
        own_k: [R, J, Hkv, D], or None.
        own_v: [R, J, Hkv, D], or None.
        q_sink: [R, T, Hq, D] against sink keys behind the window, or None.
        rows: [R] int64, sorted.
        cu_seqlens: [S+1] int64.
        sink: [S, 2] int64, or None.
        options: offset, window, scale, causality of own keys.
    """
    out: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        q, k, v, own_k, own_v, q_sink, rows, cu_seqlens, sink, options
    )
    return out


@torch.no_grad()
def statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    q_sink: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    sink: Tensor | None,
    options: Options,
    labels: Tensor,
    num_regions: int,
    recent: int | None,
    recents: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output [R, T, Hq, D], mass [R, T, Hq, C + J], entropy [R, T, Hq] and near [R, T, Hq, len(recents)].

    Args as in ``attend`` and in ``specbench.drafters.kernels.chain``; ``recents`` is for T = 1.
    """
    assert not recents or q.shape[1] == 1
    x = _Inputs(q, k, v, own_k, own_v, q_sink, rows, options)
    columns = num_regions + (recent is not None)
    out = torch.zeros_like(x.q)
    mass = x.q.new_zeros(*x.q.shape[:3], columns + x.num_own)
    entropy = x.q.new_zeros(x.q.shape[:3])
    close = x.q.new_zeros(*x.q.shape[:3], len(recents))
    one_hot = torch.nn.functional.one_hot(labels, columns).to(x.q.dtype)
    for block in blocks(rows, cu_seqlens, sink, x.num_queries, options):
        span = slice(block.i0, block.i1)
        for heads in x.head_slices(block):
            probs = x.probabilities(block, heads)
            out[heads, span] = x.output(probs, block, heads)
            entropy[heads, span] = torch.special.entr(probs).sum(-1)
            mass[heads, span, :, :columns] = _mass(probs, block, one_hot)
            mass[heads, span, :, columns:] = probs[..., probs.shape[-1] - x.num_own :]
            if recent is not None:
                _move_recent(mass[heads, span], probs, block, labels, x, recent, num_regions)
            if recents:
                close[heads, span] = _close(probs, block, x, recents)
    found = (out.to(q.dtype), mass, entropy, close)
    output, mass, entropy, close = (_ungroup(part, q.shape) for part in found)
    return output, mass, entropy, close


def _mass(probs: Tensor, block: Block, one_hot: Tensor) -> Tensor:
    """[H, B, T * G, C] probability of each region's prefix keys."""
    near, far = block.num_near, block.num_far
    mass = probs[..., :near] @ one_hot[block.key_lo : block.key_lo + near]
    if far:
        mass += probs[..., near : near + far] @ one_hot[block.sink_lo : block.sink_lo + far]
    return mass


def _close(probs: Tensor, block: Block, x: _Inputs, recents: Sequence[int]) -> Tensor:
    """[H, B, G, len(recents)] probability of the prefix keys at the last w positions, for every w."""
    back = max(0, max(recents) - x.last_shift)
    # column i: the key i rows before the query's own
    columns = (x.rows[block.i0 : block.i1, None] - block.key_lo) - torch.arange(back, device=probs.device)
    seen = (columns >= 0) & (columns < block.num_near)
    index = columns.clamp(0, max(0, probs.shape[-1] - 1))[:, None].expand(*probs.shape[:3], back)
    mass = (probs.gather(-1, index) * seen[:, None]).cumsum(-1)
    mass = torch.nn.functional.pad(mass, (1, 0))
    return mass[..., [max(0, w - x.last_shift) for w in recents]]


def _move_recent(
    mass: Tensor, probs: Tensor, block: Block, labels: Tensor, x: _Inputs, recent: int, num_regions: int
) -> None:
    """Move, in place, the mass of prefix keys at the last ``recent`` positions to column ``num_regions``."""
    lo = max(block.key_lo, block.first + x.last_shift - x.num_queries + 2 - recent)
    hi = block.key_lo + block.num_near
    if lo >= hi:
        return
    keys = torch.arange(lo, hi, device=labels.device)
    late = keys > x.rows[block.i0 : block.i1, None, None] + (x.shift - recent)
    moved = probs[..., lo - block.key_lo : hi - block.key_lo] * late
    one_hot = torch.nn.functional.one_hot(labels[lo:hi], num_regions).to(moved.dtype)
    mass[..., :num_regions] = (mass[..., :num_regions] - moved @ one_hot).clamp(min=0)
    mass[..., num_regions] = moved.sum(-1)
