"""Triton kernels for T queries per packed row over a causal prefix and J own keys, forward and backward.

A program takes BLOCK_M flattened queries (row, t, g) that share one key-value head, so that the G query heads of a
group read each key once. With G = 4, T = 1 and BLOCK_M = 128 that is 32 rows; a window of 1024 then costs 17 tiles of
64 keys. Which rows and keys a program gets is worked out on the device (``prefix_plan_*``): nothing waits for the GPU.

Scores are kept in units of log2: s = (q . k) * scale * log2(e), so that softmax is exp2(s - lse).
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = (
    "num_tiles",
    "num_seqs",
    "num_queries",
    "num_own",
    "num_regions",
    "num_columns",
    "window",
    "offset",
    "recent",
)
"""Arguments that change from call to call: no kernel is compiled anew because one of them divides by 16."""


@triton.jit(do_not_specialize=SIZES)
def prefix_plan_queries_kernel(
    rows,  # [R]
    bounds,  # [S+1] first row of each sequence
    cu_seqlens,  # [S+1]
    sink,  # [S, 2]
    plan,  # [8, num_tiles]
    num_tiles,
    num_seqs,
    HAS_SINK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Cut each sequence's flattened queries into tiles: row indices, rows, sink bounds of each."""
    tile = tl.program_id(0)
    seqs = tl.arange(0, BLOCK_S)
    real = seqs < num_seqs
    i0 = tl.load(bounds + seqs, mask=real, other=0).to(tl.int32)
    i1 = tl.load(bounds + seqs + 1, mask=real, other=0).to(tl.int32)
    tiles = ((i1 - i0) * GROUP + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    seq = tl.sum(((ends <= tile) & real).to(tl.int32), 0)
    used = seq < num_seqs
    mine = seqs == seq
    first = tl.sum(tl.where(mine, i0, 0), 0)
    stop = tl.sum(tl.where(mine, i1, 0), 0)
    offset = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * BLOCK_M
    last = tl.minimum(first + (offset + BLOCK_M - 1) // GROUP, stop - 1)
    tl.store(plan + tile, first, mask=used)
    tl.store(plan + num_tiles + tile, tl.where(used, (stop - first) * GROUP, 0))
    tl.store(plan + 2 * num_tiles + tile, tl.where(used, offset, 0))
    tl.store(plan + 3 * num_tiles + tile, tl.load(cu_seqlens + seq, mask=used, other=0).to(tl.int32))
    first_row = tl.load(rows + first + offset // GROUP, mask=used, other=0).to(tl.int32)
    tl.store(plan + 4 * num_tiles + tile, first_row)
    tl.store(plan + 5 * num_tiles + tile, tl.load(rows + last, mask=used, other=0).to(tl.int32))
    if HAS_SINK:
        tl.store(plan + 6 * num_tiles + tile, tl.load(sink + 2 * seq, mask=used, other=0).to(tl.int32))
        tl.store(plan + 7 * num_tiles + tile, tl.load(sink + 2 * seq + 1, mask=used, other=0).to(tl.int32))


@triton.jit
def _lower_bound(rows, lo, hi, value):
    """First index in [lo, hi) whose row is at least ``value``."""
    while lo < hi:
        mid = (lo + hi) // 2
        below = tl.load(rows + mid) < value
        lo = tl.where(below, mid + 1, lo)
        hi = tl.where(below, hi, mid)
    return lo


@triton.jit(do_not_specialize=SIZES)
def prefix_plan_keys_kernel(
    rows,  # [R]
    bounds,  # [S+1]
    cu_seqlens,  # [S+1]
    sink,  # [S, 2]
    plan,  # [8, num_tiles]
    num_tiles,
    num_seqs,
    window,
    offset,
    HAS_SINK: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Cut each sequence's keys into tiles, with the row indices whose queries see some key of a tile."""
    tile = tl.program_id(0)
    seqs = tl.arange(0, BLOCK_S)
    real = seqs < num_seqs
    n0 = tl.load(cu_seqlens + seqs, mask=real, other=0).to(tl.int32)
    n1 = tl.load(cu_seqlens + seqs + 1, mask=real, other=0).to(tl.int32)
    tiles = (n1 - n0 + BLOCK_N - 1) // BLOCK_N
    ends = tl.cumsum(tiles, 0)
    seq = tl.sum(((ends <= tile) & real).to(tl.int32), 0)
    used = seq < num_seqs
    mine = seqs == seq
    key_lo = tl.sum(tl.where(mine, n0, 0), 0) + (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * BLOCK_N
    key_hi = tl.minimum(key_lo + BLOCK_N, tl.sum(tl.where(mine, n1, 0), 0))
    key_lo = tl.where(used, key_lo, 0)
    key_hi = tl.where(used, key_hi, 0)
    i0 = tl.load(bounds + seq, mask=used, other=0).to(tl.int32)
    i1 = tl.load(bounds + seq + 1, mask=used, other=0).to(tl.int32)
    tl.store(plan + tile, key_lo)
    tl.store(plan + num_tiles + tile, key_hi)
    near_lo = _lower_bound(rows, i0, i1, key_lo)
    tl.store(plan + 2 * num_tiles + tile, near_lo)
    tl.store(plan + 3 * num_tiles + tile, _lower_bound(rows, near_lo, i1, key_hi - 1 + window - offset))
    if HAS_SINK:
        sink_lo = tl.maximum(tl.load(sink + 2 * seq, mask=used, other=0).to(tl.int32), key_lo)
        sink_hi = tl.minimum(tl.load(sink + 2 * seq + 1, mask=used, other=0).to(tl.int32), key_hi)
        # The last query of a row is the first to leave a key behind its window.
        behind = sink_lo + tl.maximum(window - offset - T + 1, 0)
        far_lo = _lower_bound(rows, i0, i1, behind)
        tl.store(plan + 4 * num_tiles + tile, tl.where(sink_lo < sink_hi, far_lo, i1))
        tl.store(plan + 5 * num_tiles + tile, i1)
        tl.store(plan + 6 * num_tiles + tile, sink_lo)
        tl.store(plan + 7 * num_tiles + tile, sink_hi)


@triton.jit
def _load(x, index, live, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``index`` of a [*, D] tensor as [len(index), BLOCK_D]; zero where not live."""
    d = tl.arange(0, BLOCK_D)
    address = x + index.to(tl.int64)[:, None] * D + d[None, :]
    if MASKED and D != BLOCK_D:
        return tl.load(address, mask=live[:, None] & (d < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(address, mask=live[:, None], other=0.0)
    elif D != BLOCK_D:
        return tl.load(address, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(address)


@triton.jit
def _load_keys(
    x, n0, limit, head, MASKED: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows n0 .. n0 + BLOCK_N - 1 of one head of a [*, Hkv, D] tensor; zero from row ``limit`` on.

    One 64-bit address for the tile and 32-bit steps inside it: half the registers of an address per element.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    first = tl.cast(n0, tl.int64) * HKV + head
    address = x + first * D + (n[:, None] * (HKV * D) + d[None, :])
    if MASKED and D != BLOCK_D:
        return tl.load(address, mask=(n < limit - n0)[:, None] & (d < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(address, mask=(n < limit - n0)[:, None], other=0.0)
    elif D != BLOCK_D:
        return tl.load(address, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(address)


@triton.jit
def _store(x, index, live, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    address = x + index.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(address, value.to(x.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """Matrix product onto ``acc``; ``upcast`` is for the interpreter, which cannot multiply bfloat16."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _seen(n, row, pos, window, FAR: tl.constexpr):
    """Which keys ``n`` queries see: inside the window, or (FAR) behind it. Shapes broadcast."""
    if FAR:
        return (n <= row) & (n <= pos - window)
    else:
        return (n <= row) & (n > pos - window)


@triton.jit
def _own_seen(key_i, j, i, row, pos, window, CAUSAL: tl.constexpr):
    """Which own keys (row index ``key_i``, number ``j``) queries of row index ``i`` see."""
    seen = (key_i == i) & (row + 1 + j > pos - window)
    if CAUSAL:
        seen = seen & (row + 1 + j <= pos)
    return seen


@triton.jit
def _fold(acc, top, total, scores, seen, v, c, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of online softmax: fold a tile of raw scores [M, N] and values [N, D] into the running sums."""
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * c)
    shift = new_top
    if MASKED:
        # A query that has seen nothing yet has top = -inf, and -inf - -inf is NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores * c - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    acc = _dot(p.to(v.dtype), v, acc, PRECISION)
    return acc, new_top, total


@triton.jit
def _skip(u0, gap_lo, gap_hi, MASKED: tl.constexpr):
    """The tile at place ``u0`` of a span without its gap; only masked spans have one."""
    if MASKED:
        return tl.where(u0 < gap_lo, u0, u0 + (gap_hi - gap_lo))
    else:
        return u0


@triton.jit
def _attend(
    acc, top, total, q, k, v, lo, hi, gap_lo, gap_hi, row, pos, head, window, c,
    FAR: tl.constexpr, MASKED: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the prefix keys lo .. hi - 1 without gap_lo .. gap_hi - 1; whole tiles lie below the gap."""
    for u0 in range(lo, hi - (gap_hi - gap_lo), BLOCK_N):
        n0 = _skip(u0, gap_lo, gap_hi, MASKED)
        n = n0 + tl.arange(0, BLOCK_N)
        keys = _load_keys(k, n0, hi, head, MASKED, HKV, D, BLOCK_N, BLOCK_D)
        scores = _dot(q, tl.trans(keys), None, PRECISION)
        values = _load_keys(v, n0, hi, head, MASKED, HKV, D, BLOCK_N, BLOCK_D)
        seen = (n < hi)[None, :]
        if MASKED:
            seen = seen & _seen(n[None, :], row[:, None], pos[:, None], window, FAR)
        acc, top, total = _fold(acc, top, total, scores, seen, values, c, MASKED, PRECISION)
    return acc, top, total


@triton.jit
def _middle(lo, hi, first_row, last_pos, start, window, BLOCK_N: tl.constexpr):
    """The part of [lo, hi) in whole tiles from lo on that every query of a tile sees."""
    all_lo = tl.maximum(start, last_pos - window + 1)
    mid_lo = lo + (tl.maximum(all_lo - lo, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    mid_lo = tl.minimum(mid_lo, tl.maximum(hi, lo))
    mid_hi = mid_lo + tl.maximum(first_row + 1 - mid_lo, 0) // BLOCK_N * BLOCK_N
    return mid_lo, mid_hi


@triton.jit(do_not_specialize=SIZES)
def prefix_fwd_kernel(
    q,  # [R, T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    own_k,  # [R, J, Hkv, D]
    own_v,  # [R, J, Hkv, D]
    q_sink,  # [R, T, Hq, D], q itself where the positions are absolute
    gate,  # [R, T, Hq, D]
    out,  # [R, T, Hq, D]
    lse,  # [R, T, Hq]
    rows,  # [R]
    plan,  # [8, num_tiles]
    num_tiles,
    num_own,
    window,
    offset,
    c,
    HAS_SINK: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log2 normaliser of one tile of queries: own keys, then the window, then sinks behind it."""
    # The longest prefixes first: a long tile that starts last would leave the other processors idle.
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first_i = tl.load(plan + tile)
    num_m = tl.load(plan + num_tiles + tile)
    m0 = tl.load(plan + 2 * num_tiles + tile)
    if m0 >= num_m:
        return
    start = tl.load(plan + 3 * num_tiles + tile)
    first_row = tl.load(plan + 4 * num_tiles + tile)
    last_row = tl.load(plan + 5 * num_tiles + tile)

    m = m0 + tl.arange(0, BLOCK_M)
    live = m < num_m
    i = first_i + m // (T * G)
    t = m % (T * G) // G
    index = (i * T + t).to(tl.int64) * (HKV * G) + head * G + m % G
    row = tl.load(rows + i, mask=live, other=-1).to(tl.int32)
    pos = row + offset + t
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last_pos = last_row + offset + T - 1

    queries = _load(q, index, live, D, BLOCK_D, True)
    if HAS_OWN:
        # A tile of own keys belongs to several rows, each of which sees its own: mostly masked, yet cheaper than
        # products outside the tensor cores, which also need float32 copies of queries, keys and values at once.
        own_lo = (first_i + m0 // (T * G)) * num_own
        own_hi = (first_i + tl.minimum(m0 + BLOCK_M - 1, num_m - 1) // (T * G) + 1) * num_own
        for o0 in range(own_lo, own_hi, BLOCK_N):
            o = o0 + tl.arange(0, BLOCK_N)
            keys = _load_keys(own_k, o0, own_hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
            scores = _dot(queries, tl.trans(keys), None, PRECISION)
            values = _load_keys(own_v, o0, own_hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
            seen = (o < own_hi)[None, :] & _own_seen(
                (o // num_own)[None, :],
                (o % num_own)[None, :],
                i[:, None],
                row[:, None],
                pos[:, None],
                window,
                CAUSAL,
            )
            acc, top, total = _fold(acc, top, total, scores, seen, values, c, True, PRECISION)

    lo = tl.maximum(start, first_row + offset - window + 1)
    hi = last_row + 1
    mid_lo, mid_hi = _middle(lo, hi, first_row, last_pos, start, window, BLOCK_N)
    # Both edges in one loop: a body less to compile, and the second edge is fetched while the first is folded.
    acc, top, total = _attend(
        acc, top, total, queries, k, v, lo, hi, mid_lo, mid_hi, row, pos, head, window, c,
        False, True, HKV, D, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, queries, k, v, mid_lo, mid_hi, mid_hi, mid_hi, row, pos, head, window, c,
        False, False, HKV, D, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip

    if HAS_SINK:
        far_lo = tl.maximum(tl.load(plan + 6 * num_tiles + tile), start)
        far_hi = tl.minimum(tl.load(plan + 7 * num_tiles + tile), tl.minimum(last_pos - window, last_row) + 1)
        far_q = _load(q_sink, index, live, D, BLOCK_D, True)
        acc, top, total = _attend(
            acc, top, total, far_q, k, v, far_lo, far_hi, far_hi, far_hi, row, pos, head, window, c,
            True, True, HKV, D, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + index, tl.where(top == float("-inf"), 0.0, top + tl.log2(total)), mask=live)
    acc = acc / total[:, None]
    if HAS_GATE:
        acc = acc * tl.sigmoid(_load(gate, index, live, D, BLOCK_D, True).to(tl.float32))
    _store(out, index, live, acc, D, BLOCK_D)


@triton.jit
def _dq_step(dq, q, do, keys, values, seen, lse, delta, c, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile's share: P = exp2(s - lse), dS = P (dO V^T - delta), dQ += dS K."""
    p = tl.exp2(_dot(q, tl.trans(keys), None, PRECISION) * c - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    ds = p * (_dot(do, tl.trans(values), None, PRECISION) - delta[:, None])
    return _dot(ds.to(keys.dtype), keys, dq, PRECISION)


@triton.jit
def _dq_span(
    dq, q, do, k, v, lo, hi, gap_lo, gap_hi, row, pos, lse, delta, head, window, c,
    FAR: tl.constexpr, MASKED: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of the prefix keys lo .. hi - 1 without gap_lo .. gap_hi - 1."""
    for u0 in range(lo, hi - (gap_hi - gap_lo), BLOCK_N):
        n0 = _skip(u0, gap_lo, gap_hi, MASKED)
        n = n0 + tl.arange(0, BLOCK_N)
        keys = _load_keys(k, n0, hi, head, MASKED, HKV, D, BLOCK_N, BLOCK_D)
        values = _load_keys(v, n0, hi, head, MASKED, HKV, D, BLOCK_N, BLOCK_D)
        seen = (n < hi)[None, :]
        if MASKED:
            seen = seen & _seen(n[None, :], row[:, None], pos[:, None], window, FAR)
        dq = _dq_step(dq, q, do, keys, values, seen, lse, delta, c, MASKED, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def prefix_bwd_dq_kernel(
    q,  # [R, T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    q_sink,  # [R, T, Hq, D], q itself where the positions are absolute
    out,  # [R, T, Hq, D]
    grad,  # [R, T, Hq, D]
    lse,  # [R, T, Hq]
    delta_out,  # [R, T, Hq], written
    dq_out,  # [R, T, Hq, D], holds the own keys' share, written
    dq_sink_out,  # [R, T, Hq, D], written
    rows,  # [R]
    plan,  # [8, num_tiles]
    num_tiles,
    window,
    offset,
    c,
    scale,
    HAS_SINK: tl.constexpr,
    HAS_Q_SINK: tl.constexpr,
    HAS_OWN: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Query gradients of one tile of queries, and delta = rowsum(dO O) for the key gradients."""
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first_i = tl.load(plan + tile)
    num_m = tl.load(plan + num_tiles + tile)
    m0 = tl.load(plan + 2 * num_tiles + tile)
    if m0 >= num_m:
        return
    start = tl.load(plan + 3 * num_tiles + tile)
    first_row = tl.load(plan + 4 * num_tiles + tile)
    last_row = tl.load(plan + 5 * num_tiles + tile)

    m = m0 + tl.arange(0, BLOCK_M)
    live = m < num_m
    i = first_i + m // (T * G)
    t = m % (T * G) // G
    index = (i * T + t).to(tl.int64) * (HKV * G) + head * G + m % G
    row = tl.load(rows + i, mask=live, other=-1).to(tl.int32)
    pos = row + offset + t
    last_pos = last_row + offset + T - 1

    do = _load(grad, index, live, D, BLOCK_D, True)
    delta = tl.sum(do.to(tl.float32) * _load(out, index, live, D, BLOCK_D, True).to(tl.float32), 1)
    tl.store(delta_out + index, delta, mask=live)
    norm = tl.load(lse + index, mask=live, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    if HAS_SINK:
        far_lo = tl.maximum(tl.load(plan + 6 * num_tiles + tile), start)
        far_hi = tl.minimum(tl.load(plan + 7 * num_tiles + tile), tl.minimum(last_pos - window, last_row) + 1)
        far_q = _load(q_sink, index, live, D, BLOCK_D, True)
        dq = _dq_span(
            dq, far_q, do, k, v, far_lo, far_hi, far_hi, far_hi, row, pos, norm, delta, head, window, c,
            True, True, HKV, D, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        if HAS_Q_SINK:
            _store(dq_sink_out, index, live, dq * scale, D, BLOCK_D)
            dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    queries = _load(q, index, live, D, BLOCK_D, True)
    if HAS_OWN:
        # The own keys' share, which prefix_bwd_own_kernel has left there.
        dq += _load(dq_out, index, live, D, BLOCK_D, True).to(tl.float32) / scale
    lo = tl.maximum(start, first_row + offset - window + 1)
    hi = last_row + 1
    mid_lo, mid_hi = _middle(lo, hi, first_row, last_pos, start, window, BLOCK_N)
    dq = _dq_span(
        dq, queries, do, k, v, lo, hi, mid_lo, mid_hi, row, pos, norm, delta, head, window, c,
        False, True, HKV, D, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    dq = _dq_span(
        dq, queries, do, k, v, mid_lo, mid_hi, mid_hi, mid_hi, row, pos, norm, delta, head, window, c,
        False, False, HKV, D, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    _store(dq_out, index, live, dq * scale, D, BLOCK_D)


@triton.jit
def _dkv_step(dk, dv, keys, values, queries, do, seen, lse, delta, c, PRECISION: tl.constexpr):
    """Add a tile's share, transposed: P [N, M], dV += P dO, dS = P (V dO^T - delta), dK += dS Q. Returns dS too."""
    p = tl.exp2(_dot(keys, tl.trans(queries), None, PRECISION) * c - lse[None, :])
    p = tl.where(seen, p, 0.0)
    dv = _dot(p.to(do.dtype), do, dv, PRECISION)
    ds = p * (_dot(values, tl.trans(do), None, PRECISION) - delta[None, :])
    ds = ds.to(queries.dtype)
    return _dot(ds, queries, dk, PRECISION), dv, ds


@triton.jit
def _dkv_span(
    dk, dv, keys, values, n, key_live, q, grad, lse, delta, rows, i_lo, i_hi, head, window, offset, c,
    FAR: tl.constexpr, T: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries of row indices i_lo .. i_hi - 1."""
    num_m = (i_hi - i_lo) * (T * G)
    for m0 in range(0, num_m, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        live = m < num_m
        i = i_lo + m // (T * G)
        t = m % (T * G) // G
        index = (i * T + t).to(tl.int64) * (HKV * G) + head * G + m % G
        row = tl.load(rows + i, mask=live, other=-1).to(tl.int32)
        pos = row + offset + t
        seen = _seen(n[:, None], row[None, :], pos[None, :], window, FAR) & key_live[:, None] & live[None, :]
        queries = _load(q, index, live, D, BLOCK_D, True)
        do = _load(grad, index, live, D, BLOCK_D, True)
        norm = tl.load(lse + index, mask=live, other=0.0)
        d = tl.load(delta + index, mask=live, other=0.0)
        dk, dv, _ = _dkv_step(dk, dv, keys, values, queries, do, seen, norm, d, c, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def prefix_bwd_dkv_kernel(
    q,  # [R, T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    q_sink,  # [R, T, Hq, D], q itself where the positions are absolute
    grad,  # [R, T, Hq, D]
    lse,  # [R, T, Hq]
    delta,  # [R, T, Hq]
    dk_out,  # [N, Hkv, D], written
    dv_out,  # [N, Hkv, D], written
    rows,  # [R]
    plan,  # [8, num_tiles]
    num_tiles,
    window,
    offset,
    c,
    scale,
    HAS_SINK: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Key and value gradients of one tile of prefix keys, summed over the query heads of the group."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    key_lo = tl.load(plan + tile)
    key_hi = tl.load(plan + num_tiles + tile)
    if key_lo >= key_hi:
        return
    n = key_lo + tl.arange(0, BLOCK_N)
    key_live = n < key_hi
    keys = _load_keys(k, key_lo, key_hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
    values = _load_keys(v, key_lo, key_hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if HAS_SINK:
        far_live = (n >= tl.load(plan + 6 * num_tiles + tile)) & (n < tl.load(plan + 7 * num_tiles + tile))
        dk, dv = _dkv_span(
            dk, dv, keys, values, n, far_live, q_sink, grad, lse, delta, rows,
            tl.load(plan + 4 * num_tiles + tile), tl.load(plan + 5 * num_tiles + tile), head, window, offset, c,
            True, T, G, HKV, D, BLOCK_M, BLOCK_D, PRECISION,
        )  # fmt: skip
    dk, dv = _dkv_span(
        dk, dv, keys, values, n, key_live, q, grad, lse, delta, rows,
        tl.load(plan + 2 * num_tiles + tile), tl.load(plan + 3 * num_tiles + tile), head, window, offset, c,
        False, T, G, HKV, D, BLOCK_M, BLOCK_D, PRECISION,
    )  # fmt: skip
    _store(dk_out, n * HKV + head, key_live, dk * scale, D, BLOCK_D)
    _store(dv_out, n * HKV + head, key_live, dv, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def prefix_bwd_own_kernel(
    q,  # [R, T, Hq, D]
    own_k,  # [R, J, Hkv, D]
    own_v,  # [R, J, Hkv, D]
    out,  # [R, T, Hq, D]
    grad,  # [R, T, Hq, D]
    lse,  # [R, T, Hq]
    dq_out,  # [R, T, Hq, D], written: the own keys' share
    d_own_k,  # [R, J, Hkv, D], written
    d_own_v,  # [R, J, Hkv, D], written
    rows,  # [R]
    cu_seqlens,  # [S+1]
    num_seqs,
    num_queries,
    num_own,
    window,
    offset,
    c,
    scale,
    CAUSAL: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Own-key and own-value gradients of a few whole rows, and those keys' share of the query gradients."""
    # Whole rows to a program, BLOCK_N // J of them: their queries then need no other program's keys.
    per_tile = BLOCK_N // num_own
    i_lo = tl.program_id(0) * per_tile
    i_hi = tl.minimum(i_lo + per_tile, num_queries)
    head = tl.program_id(1)
    num_rows = tl.load(cu_seqlens + num_seqs).to(tl.int32)
    o = i_lo * num_own + tl.arange(0, BLOCK_N)
    key_live = o < i_hi * num_own
    keys = _load_keys(own_k, i_lo * num_own, i_hi * num_own, head, True, HKV, D, BLOCK_N, BLOCK_D)
    values = _load_keys(own_v, i_lo * num_own, i_hi * num_own, head, True, HKV, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    num_m = (i_hi - i_lo) * (T * G)
    for m0 in range(0, num_m, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        live = m < num_m
        i = i_lo + m // (T * G)
        t = m % (T * G) // G
        index = (i * T + t).to(tl.int64) * (HKV * G) + head * G + m % G
        row = tl.load(rows + i, mask=live, other=-1).to(tl.int32)
        pos = row + offset + t
        seen = _own_seen(
            (o // num_own)[:, None],
            (o % num_own)[:, None],
            i[None, :],
            row[None, :],
            pos[None, :],
            window,
            CAUSAL,
        )
        # Rows outside every sequence are padding: they take part in nothing.
        seen = seen & key_live[:, None] & ((row >= 0) & (row < num_rows))[None, :]
        queries = _load(q, index, live, D, BLOCK_D, True)
        do = _load(grad, index, live, D, BLOCK_D, True)
        norm = tl.load(lse + index, mask=live, other=0.0)
        d = tl.sum(do.to(tl.float32) * _load(out, index, live, D, BLOCK_D, True).to(tl.float32), 1)
        dk, dv, ds = _dkv_step(dk, dv, keys, values, queries, do, seen, norm, d, c, PRECISION)
        dq = _dot(tl.trans(ds), keys, None, PRECISION)
        _store(dq_out, index, live, dq * scale, D, BLOCK_D)
    _store(d_own_k, o * HKV + head, key_live, dk * scale, D, BLOCK_D)
    _store(d_own_v, o * HKV + head, key_live, dv, D, BLOCK_D)


@triton.jit
def _stats_span(
    mass, recent_mass, entropy, q, k, labels, lo, hi, row, pos, norm, head, window, recent, c,
    FAR: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    regions = tl.arange(0, BLOCK_C)
    for n0 in range(lo, hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        keys = _load_keys(k, n0, hi, head, True, HKV, D, BLOCK_N, BLOCK_D)
        logp = _dot(q, tl.trans(keys), None, PRECISION) * c - norm[:, None]
        seen = (n < hi)[None, :] & _seen(n[None, :], row[:, None], pos[:, None], window, FAR)
        p = tl.where(seen, tl.exp2(logp), 0.0)
        entropy -= tl.sum(tl.where(seen, p * logp, 0.0), 1)
        late = p * (n[None, :] > pos[:, None] - recent)
        recent_mass += tl.sum(late, 1)
        one_hot = (
            (tl.load(labels + n, mask=n < hi, other=-1)[:, None] == regions[None, :])
            .to(tl.float32)
            .to(tl.bfloat16)
        )
        # One-hot is exact in bfloat16, and two bfloat16 parts of p hold 16 of its bits.
        high = (p - late).to(tl.bfloat16)
        mass = _dot(high, one_hot, mass, PRECISION)
        mass = _dot((p - late - high.to(tl.float32)).to(tl.bfloat16), one_hot, mass, PRECISION)
    return mass, recent_mass, entropy


@triton.jit(do_not_specialize=SIZES)
def prefix_stats_kernel(
    q,  # [R, Hq, D]
    k,  # [N, Hkv, D]
    own_k,  # [R, J, Hkv, D]
    q_sink,  # [R, Hq, D], q itself where the positions are absolute
    lse,  # [R, Hq]
    labels,  # [N]
    mass_out,  # [R, Hq, C + J], written
    entropy_out,  # [R, Hq], written
    rows,  # [R]
    plan,  # [8, num_tiles]
    num_tiles,
    num_own,
    num_regions,
    num_columns,
    window,
    recent,
    c,
    HAS_SINK: tl.constexpr,
    HAS_RECENT: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mass per region and entropy of one tile of queries, from the forward pass's normaliser."""
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first_i = tl.load(plan + tile)
    num_m = tl.load(plan + num_tiles + tile)
    m0 = tl.load(plan + 2 * num_tiles + tile)
    if m0 >= num_m:
        return
    start = tl.load(plan + 3 * num_tiles + tile)
    first_row = tl.load(plan + 4 * num_tiles + tile)
    last_row = tl.load(plan + 5 * num_tiles + tile)

    m = m0 + tl.arange(0, BLOCK_M)
    live = m < num_m
    i = first_i + m // G
    index = i.to(tl.int64) * (HKV * G) + head * G + m % G
    row = tl.load(rows + i, mask=live, other=-1).to(tl.int32)
    pos = row + num_own
    norm = tl.load(lse + index, mask=live, other=0.0)
    mass = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    recent_mass = tl.zeros([BLOCK_M], tl.float32)
    entropy = tl.zeros([BLOCK_M], tl.float32)

    columns = num_columns + num_own
    # Before the products, with a load of its own: beside them these queries would take the layout of an operand, and
    # every own key with them.
    plain_q = _load(q, index, live, D, BLOCK_D, True).to(tl.float32)
    for j in range(0, num_own):
        o = (i * num_own + j).to(tl.int64) * HKV + head
        keys = _load(own_k, o, live, D, BLOCK_D, True).to(tl.float32)
        logp = tl.sum(plain_q * keys, 1) * c - norm
        seen = _own_seen(i, j, i, row, pos, window, False)
        p = tl.where(seen, tl.exp2(logp), 0.0)
        entropy -= tl.where(seen, p * logp, 0.0)
        tl.store(mass_out + index * columns + num_columns + j, p, mask=live)

    if HAS_SINK:
        far_lo = tl.maximum(tl.load(plan + 6 * num_tiles + tile), start)
        far_hi = tl.minimum(
            tl.load(plan + 7 * num_tiles + tile), tl.minimum(last_row + num_own - window, last_row) + 1
        )
        far_q = _load(q_sink, index, live, D, BLOCK_D, True)
        mass, recent_mass, entropy = _stats_span(
            mass, recent_mass, entropy, far_q, k, labels, far_lo, far_hi, row, pos, norm, head, window, 0, c,
            True, HKV, D, BLOCK_N, BLOCK_D, BLOCK_C, PRECISION,
        )  # fmt: skip
    queries = _load(q, index, live, D, BLOCK_D, True)
    lo = tl.maximum(start, first_row + num_own - window + 1)
    mass, recent_mass, entropy = _stats_span(
        mass, recent_mass, entropy, queries, k, labels, lo, last_row + 1, row, pos, norm, head, window, recent, c,
        False, HKV, D, BLOCK_N, BLOCK_D, BLOCK_C, PRECISION,
    )  # fmt: skip
    regions = tl.arange(0, BLOCK_C)
    address = mass_out + index[:, None] * columns + regions[None, :]
    tl.store(address, mass, mask=live[:, None] & (regions < num_regions)[None, :])
    if HAS_RECENT:
        tl.store(mass_out + index * columns + num_regions, recent_mass, mask=live)
    # Entropy in nats: the sums above are in units of log2.
    tl.store(entropy_out + index, entropy * 0.6931471805599453, mask=live)
