"""Draft-decode attention in Triton: each sequence's keys are split over programs, their parts merged.

A program takes the T x G queries of one key-value head (64 of them at most, in float32 16) and one part of the keys
they see. A sequence of 128k tokens with a window of 1024 and 4 sinks is 1028 keys, whatever the cache holds. A second
kernel merges the parts and applies the gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.drafters.kernels import dispatch
from specbench.drafters.kernels.prefix.launch import LOG2_E, NO_WINDOW, precision, shapes
from specbench.drafters.kernels.prefix.triton import _dot, _fold, _load, _load_keys, _store

MIN_KEYS = 256
"""Keys below which a part is not worth a program of its own."""


@triton.jit(do_not_specialize=("max_length", "num_splits", "window"))
def decode_split_kernel(
    q,  # [B, T, Hq, D]
    k,  # [B, L, Hkv, D]
    v,  # [B, L, Hkv, D]
    q_sink,  # [B, T, Hq, D], q itself where the positions are absolute
    lengths,  # [B]
    sink,  # [B, 2]
    partial,  # [B, Hkv, splits, ROWS, D], written
    partial_lse,  # [B, Hkv, splits, ROWS], written
    max_length,
    num_splits,
    window,
    c,
    HAS_SINK: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and normaliser of one part of the keys of one sequence and head."""
    split = tl.program_id(0)
    b = tl.program_id(1) // HKV
    head = tl.program_id(1) % HKV
    length = tl.load(lengths + b).to(tl.int32)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < T * G
    pos = length - T + m // G
    index = (b * T + m // G).to(tl.int64) * (HKV * G) + head * G + m % G
    cache = tl.cast(b, tl.int64) * max_length * (HKV * D)

    # The keys some query sees, in one count: first the sinks behind the window, then the window.
    near_lo = tl.maximum(0, length - T - window + 1)
    far_lo = 0
    num_far = 0
    if HAS_SINK:
        far_lo = tl.maximum(tl.load(sink + 2 * b).to(tl.int32), 0)
        far_hi = tl.minimum(tl.load(sink + 2 * b + 1).to(tl.int32), length - window)
        num_far = tl.maximum(far_hi - far_lo, 0)
    count = num_far + length - near_lo
    share = tl.cdiv(tl.cdiv(count, num_splits), BLOCK_N) * BLOCK_N
    u0 = tl.minimum(split * share, count)
    u1 = tl.minimum(u0 + share, count)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINK:
        far_q = _load(q_sink, index, live, D, BLOCK_D, True)
        hi = far_lo + tl.minimum(u1, num_far)
        for n0 in range(far_lo + u0, hi, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            keys = _load_keys(k + cache, n0, hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
            values = _load_keys(v + cache, n0, hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
            seen = (n < hi)[None, :] & (n[None, :] <= pos[:, None] - window)
            scores = _dot(far_q, tl.trans(keys), None, PRECISION)
            acc, top, total = _fold(acc, top, total, scores, seen, values, c, True, PRECISION)
    queries = _load(q, index, live, D, BLOCK_D, True)
    hi = near_lo + tl.maximum(u1 - num_far, 0)
    for n0 in range(near_lo + tl.maximum(u0 - num_far, 0), hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        keys = _load_keys(k + cache, n0, hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
        values = _load_keys(v + cache, n0, hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
        seen = (n < hi)[None, :] & (n[None, :] <= pos[:, None]) & (n[None, :] > pos[:, None] - window)
        scores = _dot(queries, tl.trans(keys), None, PRECISION)
        acc, top, total = _fold(acc, top, total, scores, seen, values, c, True, PRECISION)

    part = (tl.program_id(1) * num_splits + split).to(tl.int64) * ROWS + m
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(partial_lse + part, tl.where(empty, float("-inf"), top + tl.log2(total)))
    _store(partial, part, live, acc / total[:, None], D, BLOCK_D)


@triton.jit(do_not_specialize=("num_splits",))
def decode_merge_kernel(
    partial,  # [B, Hkv, splits, ROWS, D]
    partial_lse,  # [B, Hkv, splits, ROWS]
    gate,  # [B, T, Hq, D]
    out,  # [B, T, Hq, D], written
    num_splits,
    HAS_GATE: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the parts of one query: out = sum of 2^(lse_s - lse) out_s, lse = log2 of the sum of 2^lse_s."""
    m = tl.program_id(0)
    b = tl.program_id(1) // HKV
    head = tl.program_id(1) % HKV
    splits = tl.arange(0, BLOCK_S)
    part = (tl.program_id(1) * num_splits + splits).to(tl.int64) * ROWS + m
    lse = tl.load(partial_lse + part, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    parts = _load(partial, part, splits < num_splits, D, BLOCK_D, True)
    merged = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, BLOCK_D)
    index = ((b * T + m // G).to(tl.int64) * (HKV * G) + head * G + m % G) * D + d
    if HAS_GATE:
        merged = merged * tl.sigmoid(tl.load(gate + index, mask=d < D, other=0.0).to(tl.float32))
    tl.store(out + index, merged.to(out.dtype.element_ty), mask=d < D)


def split_count(num_programs: int, num_keys: int, num_processors: int) -> int:
    """Return into how many parts a sequence's keys go.

    Args:
        num_programs: sequences times key-value heads.
        num_keys: keys a query may see.
        num_processors: of the device; four programs each keep its memory busy.
    """
    wanted = -(-4 * num_processors // max(num_programs, 1))
    return max(1, min(wanted, num_keys // MIN_KEYS, 128))


def rows(num_queries: int) -> int:
    """Return how many rows the parts of T x G queries take: a power of two."""
    return max(16, int(triton.next_power_of_2(num_queries)))


def tile(dim: int, num_queries: int, dtype: torch.dtype) -> dict[str, int]:
    """Return block sizes and launch options of ``decode_split_kernel`` for T x G queries."""
    block_m = rows(num_queries)
    if dispatch.interpreted():
        return {"BLOCK_M": min(block_m, 32), "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    if dtype == torch.float32:
        # three TF32 products keep both halves of every operand in registers: more rows would spill
        return {"BLOCK_M": 16, "BLOCK_N": 32 if dim <= 128 else 16, "num_warps": 4, "num_stages": 2}
    narrow = dim <= 128
    return {
        "BLOCK_M": min(block_m, 64),
        "BLOCK_N": 64 if narrow else 32,
        "num_warps": 4,
        "num_stages": 3 if narrow else 2,
    }


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
    num_splits: int | None = None,
) -> Tensor:
    """Return the output [B, T, Hq, D]; see ``specbench.drafters.kernels.decode.decode_attention``.

    ``num_splits`` overrides how many parts the keys are split into.
    """
    q, k, v, lengths = q.contiguous(), k.contiguous(), v.contiguous(), lengths.contiguous()
    sink = None if sink is None or window is None else sink.contiguous()
    q_sink = q if q_sink is None or sink is None else q_sink.contiguous()
    batch, num_queries, num_heads, dim = q.shape
    shape = shapes(q, k)
    scale = dim**-0.5 if scale is None else scale
    assert scale > 0, scale
    if num_splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        reach = k.shape[1] if window is None else min(k.shape[1], window + num_queries)
        num_splits = split_count(batch * shape["HKV"], reach, processors)
    num_rows = rows(num_queries * shape["G"])
    size = tile(dim, num_queries * shape["G"], q.dtype)
    out = torch.empty_like(q)
    partial = q.new_empty(batch, shape["HKV"], num_splits, num_rows, dim, dtype=torch.float32)
    partial_lse = q.new_empty(partial.shape[:-1], dtype=torch.float32)
    if q.numel() == 0:
        return out
    decode_split_kernel[(num_splits, batch * shape["HKV"], num_rows // size["BLOCK_M"])](
        q,
        k,
        v,
        q_sink,
        lengths,
        lengths if sink is None else sink,
        partial,
        partial_lse,
        k.shape[1],
        num_splits,
        NO_WINDOW if window is None else min(window, NO_WINDOW),
        scale * LOG2_E,
        HAS_SINK=sink is not None,
        T=num_queries,
        ROWS=num_rows,
        PRECISION=precision(q.dtype),
        **shape,
        **size,
    )
    decode_merge_kernel[(num_queries * shape["G"], batch * shape["HKV"])](
        partial,
        partial_lse,
        q if gate is None else gate.contiguous(),
        out,
        num_splits,
        HAS_GATE=gate is not None,
        T=num_queries,
        ROWS=num_rows,
        BLOCK_S=triton.next_power_of_2(num_splits),
        num_warps=4,
        **shape,
    )
    return out
