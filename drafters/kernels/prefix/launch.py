"""Running the prefix kernels on tensors: the plan of tiles, block sizes, forward, backward, statistics.

Example: ``attend(q, k, v, own_k, own_v, q_sink, rows, cu_seqlens, sink, options)`` with q [R, T, Hq, D].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specbench.drafters.kernels import dispatch
from specbench.drafters.kernels.prefix import triton as kernels
from specbench.drafters.kernels.prefix.options import Options

NO_WINDOW = 1 << 30
LOG2_E = 1.4426950408889634
MAX_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Block sizes of one kernel for one head dimension and dtype."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def launch(self) -> dict[str, int]:
        """The sizes as keyword arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# (block_m, block_n, warps, stages) for head dimensions up to 64, 128 and 256.
_HALF = {
    "fwd": ((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    "dq": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 1)),
    "dkv": ((64, 128, 8, 2), (32, 128, 8, 2), (32, 32, 8, 1)),
    "own": ((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 8, 1)),
    "stats": ((128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
}
# Three TF32 products keep both halves of every operand in registers: few rows, many warps.
_FLOAT32 = {
    "fwd": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    "dq": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    "dkv": ((32, 32, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    "own": ((32, 32, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    "stats": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
}


# Before Hopper the accumulators of a matrix product pass through the registers of every operand.
_AMPERE = {
    ("fwd", 128): (64, 64, 8, 2),
    ("dq", 128): (64, 64, 8, 2),
    ("dkv", 128): (64, 64, 8, 2),
    ("own", 128): (32, 64, 8, 1),
}


@functools.cache
def _architecture() -> int:
    """Compute capability of the GPU at hand, as 80 or 90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def tiles(kernel: str, dim: int, dtype: torch.dtype, architecture: int | None = None) -> Tiles:
    """Return the block sizes for a kernel: ``fwd``, ``dq``, ``dkv``, ``own`` or ``stats``.

    Chosen so that nothing spills at head dimensions up to 128 (``perf/kernels_report.py`` prints the table).

    Args:
        kernel: which.
        dim: head dimension.
        dtype: of queries and keys.
        architecture: compute capability times 10; default: of the GPU at hand.
    """
    if dispatch.interpreted():
        return Tiles(block_m=32, block_n=16, num_warps=4, num_stages=1)
    column = 0 if dim <= 64 else 1 if dim <= 128 else 2
    size = (_FLOAT32 if dtype == torch.float32 else _HALF)[kernel][column]
    if dtype != torch.float32 and (architecture or _architecture()) < 90:
        size = _AMPERE.get((kernel, (64, 128, 256)[column]), size)
    if dtype != torch.float32 and 64 < dim < 128 and kernel == "dq":
        # loads of padded heads are masked, which takes registers: the wide tile of 128 would spill
        size = _AMPERE[kernel, 128]
    block_m, block_n, num_warps, num_stages = size
    return Tiles(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def unsupported(q: Tensor, k: Tensor, num_own: int) -> str | None:
    """Return why the kernels cannot take these tensors (None: they can)."""
    reason = dispatch.triton_missing(q)
    if reason is not None:
        return reason
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is none of float32, bfloat16, float16"
    if q.dtype != k.dtype:
        return f"queries are {q.dtype} but keys are {k.dtype}"
    if not 16 <= q.shape[-1] <= MAX_DIM:
        return f"head_dim {q.shape[-1]} is not in 16..{MAX_DIM}"
    if num_own > tiles("own", q.shape[-1], q.dtype).block_n:
        return f"{num_own} own keys a row are more than one tile holds"
    return None


def window_size(options: Options) -> int:
    """Return the window as the kernels want it."""
    return NO_WINDOW if options.window is None else min(options.window, NO_WINDOW)


def precision(dtype: torch.dtype, *, tensor_cores: bool = True) -> str:
    """Return how matrix products treat float32: three TF32 products keep its accuracy on tensor cores.

    Args:
        dtype: of the operands; 16-bit ones do not ask.
        tensor_cores: False where the three products would spill: products outside the tensor cores.
    """
    if dispatch.interpreted():
        return "upcast"
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if tensor_cores else "ieee"


def shapes(q: Tensor, k: Tensor) -> dict[str, int]:
    """Return the constants every kernel takes from the shapes."""
    dim = q.shape[-1]
    return {
        "G": q.shape[-2] // k.shape[-2],
        "HKV": k.shape[-2],
        "D": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
    }


class Plan:
    """Which rows and keys each program takes; built on the device."""

    def __init__(self, rows: Tensor, cu_seqlens: Tensor, sink: Tensor | None, q: Tensor, k: Tensor) -> None:
        self.rows = rows
        self.cu_seqlens = cu_seqlens
        self.sink = sink
        self.num_seqs = cu_seqlens.numel() - 1
        self.block_s = triton.next_power_of_2(max(self.num_seqs, 1))
        self.bounds = torch.searchsorted(rows, cu_seqlens)
        self.group = (q.shape[-2] // k.shape[-2]) * q.shape[1]
        self.num_rows = rows.numel()
        self.num_keys = k.shape[0]

    def queries(self, block_m: int) -> tuple[Tensor, int]:
        """Return the tiles of flattened queries [8, num_tiles] and their number (some may be empty)."""
        num_tiles = triton.cdiv(self.num_rows * self.group, block_m) + self.num_seqs
        plan = torch.empty(8, num_tiles, dtype=torch.int32, device=self.rows.device)
        kernels.prefix_plan_queries_kernel[(num_tiles,)](
            self.rows,
            self.bounds,
            self.cu_seqlens,
            self.rows if self.sink is None else self.sink,
            plan,
            num_tiles,
            self.num_seqs,
            HAS_SINK=self.sink is not None,
            GROUP=self.group,
            BLOCK_M=block_m,
            BLOCK_S=self.block_s,
        )
        return plan, num_tiles

    def keys(self, block_n: int, num_queries: int, options: Options) -> tuple[Tensor, int]:
        """Return the tiles of keys [8, num_tiles] and their number (some may be empty)."""
        num_tiles = triton.cdiv(self.num_keys, block_n) + self.num_seqs
        plan = torch.empty(8, num_tiles, dtype=torch.int32, device=self.rows.device)
        kernels.prefix_plan_keys_kernel[(num_tiles,)](
            self.rows,
            self.bounds,
            self.cu_seqlens,
            self.rows if self.sink is None else self.sink,
            plan,
            num_tiles,
            self.num_seqs,
            window_size(options),
            options.offset,
            HAS_SINK=self.sink is not None,
            T=num_queries,
            BLOCK_N=block_n,
            BLOCK_S=self.block_s,
        )
        return plan, num_tiles


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    q_sink: Tensor | None,
    gate: Tensor | None,
    plan: Plan,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return the output [R, T, Hq, D] and the log2 normaliser [R, T, Hq] (0 where nothing is visible)."""
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
    size = tiles("fwd", q.shape[-1], q.dtype)
    table, num_tiles = plan.queries(size.block_m)
    kernels.prefix_fwd_kernel[(num_tiles, k.shape[1])](
        q,
        k,
        v,
        q if own_k is None else own_k,
        q if own_v is None else own_v,
        q if q_sink is None else q_sink,
        q if gate is None else gate,
        out,
        lse,
        plan.rows,
        table,
        num_tiles,
        0 if own_k is None else own_k.shape[1],
        window_size(options),
        options.offset,
        options.scale * LOG2_E,
        HAS_SINK=plan.sink is not None,
        HAS_GATE=gate is not None,
        HAS_OWN=own_k is not None,
        CAUSAL=options.causal,
        T=q.shape[1],
        PRECISION=precision(q.dtype),
        **size.launch(),
        **shapes(q, k),
    )
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    q_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    plan: Plan,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, own_k, own_v and q_sink."""
    scalars = (window_size(options), options.offset, options.scale * LOG2_E, options.scale)
    num_own = 0 if own_k is None else own_k.shape[1]
    constants = {**shapes(q, k), "T": q.shape[1], "PRECISION": precision(q.dtype)}
    dim, dtype = q.shape[-1], q.dtype

    dq, d_own_k, d_own_v = torch.zeros_like(q), None, None
    if own_k is not None and own_v is not None:
        d_own_k, d_own_v = torch.empty_like(own_k), torch.empty_like(own_v)
        size = tiles("own", dim, dtype)
        kernels.prefix_bwd_own_kernel[(triton.cdiv(q.shape[0], size.block_n // num_own), k.shape[1])](
            q,
            own_k,
            own_v,
            out,
            grad,
            lse,
            dq,
            d_own_k,
            d_own_v,
            plan.rows,
            plan.cu_seqlens,
            plan.num_seqs,
            q.shape[0],
            num_own,
            *scalars,
            CAUSAL=options.causal,
            **size.launch(),
            **constants,
        )

    delta = torch.zeros_like(lse)
    dq_sink = None if q_sink is None else torch.zeros_like(q_sink)
    size = tiles("dq", dim, dtype)
    table, num_tiles = plan.queries(size.block_m)
    kernels.prefix_bwd_dq_kernel[(num_tiles, k.shape[1])](
        q,
        k,
        v,
        q if q_sink is None else q_sink,
        out,
        grad,
        lse,
        delta,
        dq,
        dq if dq_sink is None else dq_sink,
        plan.rows,
        table,
        num_tiles,
        *scalars,
        HAS_SINK=plan.sink is not None,
        HAS_Q_SINK=q_sink is not None,
        HAS_OWN=own_k is not None,
        **size.launch(),
        **constants,
    )

    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    size = tiles("dkv", dim, dtype)
    table, num_tiles = plan.keys(size.block_n, q.shape[1], options)
    kernels.prefix_bwd_dkv_kernel[(num_tiles, k.shape[1])](
        q,
        k,
        v,
        q if q_sink is None else q_sink,
        grad,
        lse,
        delta,
        dk,
        dv,
        plan.rows,
        table,
        num_tiles,
        *scalars,
        HAS_SINK=plan.sink is not None,
        **size.launch(),
        **constants,
    )
    return dq, dk, dv, d_own_k, d_own_v, dq_sink


def statistics(
    q: Tensor,
    k: Tensor,
    own_k: Tensor | None,
    q_sink: Tensor | None,
    lse: Tensor,
    labels: Tensor,
    num_regions: int,
    recent: int | None,
    plan: Plan,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return mass [R, Hq, C + J] and entropy [R, Hq] of a forward pass with T = 1 and normaliser ``lse``."""
    num_own = 0 if own_k is None else own_k.shape[1]
    num_columns = num_regions + (recent is not None)
    mass = q.new_zeros(q.shape[0], q.shape[2], num_columns + num_own, dtype=torch.float32)
    entropy = q.new_zeros(q.shape[0], q.shape[2], dtype=torch.float32)
    size = tiles("stats", q.shape[-1], q.dtype)
    table, num_tiles = plan.queries(size.block_m)
    kernels.prefix_stats_kernel[(num_tiles, k.shape[1])](
        q,
        k,
        q if own_k is None else own_k,
        q if q_sink is None else q_sink,
        lse,
        labels,
        mass,
        entropy,
        plan.rows,
        table,
        num_tiles,
        num_own,
        num_regions,
        num_columns,
        window_size(options),
        0 if recent is None else recent,
        options.scale * LOG2_E,
        HAS_SINK=plan.sink is not None,
        HAS_RECENT=recent is not None,
        BLOCK_C=max(16, triton.next_power_of_2(num_regions)),
        PRECISION=precision(q.dtype, tensor_cores=False),
        **size.launch(),
        **shapes(q, k),
    )
    return mass, entropy


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        q_sink: Tensor | None,
        plan: Plan,
        options: Options,
    ) -> Tensor:
        out, lse = forward(q, k, v, own_k, own_v, q_sink, None, plan, options)
        ctx.save_for_backward(q, k, v, own_k, own_v, q_sink, out, lse)
        ctx.plan, ctx.options = plan, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, q_sink, out, lse = ctx.saved_tensors
        args = (q, k, v, own_k, own_v, q_sink, out, lse, grad.contiguous())
        return (*backward(*args, ctx.plan, ctx.options), None, None)


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
    gate: Tensor | None = None,
) -> Tensor:
    """Return the output [R, T, Hq, D], differentiable in the float arguments unless ``gate`` is given.

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
        options: offset, window, scale.
        gate: [R, T, Hq, D]; the output is multiplied by its sigmoid before it is written.
    """
    assert options.scale > 0, options.scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    own_k = None if own_k is None or own_k.shape[1] == 0 else own_k.contiguous()
    own_v = None if own_k is None or own_v is None else own_v.contiguous()
    sink = None if sink is None or options.window is None else sink.contiguous()
    q_sink = None if q_sink is None or sink is None else q_sink.contiguous()
    plan = Plan(rows.contiguous(), cu_seqlens.contiguous(), sink, q, k)
    if gate is not None:
        return forward(q, k, v, own_k, own_v, q_sink, gate.contiguous(), plan, options)[0]
    out: Tensor = _Attend.apply(q, k, v, own_k, own_v, q_sink, plan, options)  # type: ignore[no-untyped-call]
    return out
