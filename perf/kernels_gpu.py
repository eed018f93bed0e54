"""Attention kernels on a CUDA GPU: correctness against float64, then time beside FlexAttention, SDPA, flash-attention.

Example: ``python perf/kernels_gpu.py`` (under four minutes); ``--tune`` tries other block sizes of the chain kernels.

Prints Markdown tables: the device's measured ceilings (bfloat16 matrix rate, copy bandwidth), relative errors, and for
each shape milliseconds, TFLOP/s or GB/s, and ratios. Rows that no longer fit the time are named at the end.
``TRITON_INTERPRET=1 python perf/kernels_gpu.py --smoke`` runs tiny shapes on the CPU, to test this script itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specbench.drafters.kernels import block, chain, decode
from specbench.drafters.kernels.chain.blocked import chain_options
from specbench.drafters.kernels.prefix import dense, launch

HEADS, KV_HEADS, DIM, OWN = 32, 8, 128, 3


@dataclass
class Clock:
    """Times functions on the device, and knows when the budget is spent."""

    device: str
    budget: float
    start: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    def late(self, what: str, reserve: float = 0.0) -> bool:
        """Whether ``what`` no longer fits; it is then named at the end."""
        spent = time.monotonic() - self.start
        if spent + reserve > self.budget:
            self.skipped.append(what)
            return True
        return False

    def ms(self, function: Callable[[], Any], repeats: int = 10) -> float:
        """Median milliseconds of ``function`` after a warm-up; fewer repeats where it is slow."""
        function()
        if self.device == "cpu":
            start = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - start)
        times = []
        begin = time.monotonic()
        for _ in range(repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            function()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
            if time.monotonic() - begin > 1.5:
                break
        return sorted(times)[len(times) // 2]


def table(title: str, *columns: str) -> None:
    """Print the head of a Markdown table."""
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def line(*cells: object) -> None:
    """Print one row; numbers with three digits, ``-`` for None."""
    shown = [f"{c:.3g}" if isinstance(c, float) else "-" if c is None else str(c) for c in cells]
    print(f"| {' | '.join(shown)} |", flush=True)


def ceilings(clock: Clock, smoke: bool) -> tuple[float, float]:
    """Measure and print TFLOP/s of a large bfloat16 product and GB/s of a large copy."""
    n = 256 if smoke else 8192
    a, b = (torch.randn(n, n, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    tflops = 2 * n**3 / clock.ms(lambda: a @ b, 20) / 1e9
    source = torch.empty(1 << (20 if smoke else 30), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    gbs = 2 * source.numel() / clock.ms(lambda: target.copy_(source), 20) / 1e6
    name = "cpu" if clock.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}: bfloat16 matrix rate {tflops:.0f} TFLOP/s, copy {gbs:.0f} GB/s"
    )
    return tflops, gbs


def chain_inputs(length: int, num_own: int, device: str, dtype: torch.dtype, **shape: int) -> dict[str, Any]:
    """One sequence with a chain on every row."""
    heads, kv_heads, dim = shape.get("heads", HEADS), shape.get("kv_heads", KV_HEADS), shape.get("dim", DIM)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    return {
        "q": normal(length, heads, dim),
        "k": normal(length, kv_heads, dim),
        "v": normal(length, kv_heads, dim),
        "own_k": normal(length, num_own, kv_heads, dim) if num_own else None,
        "own_v": normal(length, num_own, kv_heads, dim) if num_own else None,
        "rows": torch.arange(length, device=device),
        "cu_seqlens": torch.tensor([0, length], device=device),
    }


def with_gradients(
    function: Callable[..., Tensor], args: dict[str, Any], names: tuple[str, ...]
) -> list[Tensor]:
    """Output and gradients of a fixed projection of it."""
    leaves = {n: args[n].detach().requires_grad_() for n in names if args[n] is not None}
    out = function(**{**args, **leaves})
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out.double() * weight).sum(), list(leaves.values()))
    return [out.detach(), *grads]


def correctness(clock: Clock, smoke: bool) -> None:
    """Relative errors ||x - ref|| / ||ref|| of every kernel against its float64 reference."""
    table(
        "Relative error against float64",
        "kernel",
        "D",
        "dtype",
        "out",
        "dq",
        "dk",
        "dv",
        "own dk",
        "own dv",
        "dq sink",
    )
    length = 24 if smoke else 321
    sink = torch.tensor([[0, 4]], device=clock.device)
    for dim in (16,) if smoke else (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            shape = {"heads": 8, "kv_heads": 2, "dim": dim}
            args = chain_inputs(length, OWN, clock.device, dtype, **shape)
            args |= {"window": length // 4, "sink": sink, "q_sink": torch.randn_like(args["q"])}
            names = ("q", "k", "v", "own_k", "own_v", "q_sink")
            _errors("chain", dim, dtype, chain.chain_attention, args, names)
            rows = args["rows"][::7]
            size = (len(rows), 8, shape["kv_heads"], dim)
            blocks = {n: args[n] for n in ("k", "v", "cu_seqlens", "window", "sink")} | {"rows": rows}
            blocks |= {
                n: torch.randn(*size, device=clock.device, dtype=dtype) for n in ("block_k", "block_v")
            }
            queries = (len(rows), 8, shape["heads"], dim)
            blocks |= {n: torch.randn(*queries, device=clock.device, dtype=dtype) for n in ("q", "q_sink")}
            _errors(
                "block",
                dim,
                dtype,
                block.block_attention,
                blocks,
                ("q", "k", "v", "block_k", "block_v", "q_sink"),
            )
            cache = [torch.randn(2, length, 2, dim, device=clock.device, dtype=dtype) for _ in range(2)]
            newest = {
                n: torch.randn(2, 3, 8, dim, device=clock.device, dtype=dtype)
                for n in ("q", "q_sink", "gate")
            }
            lengths = torch.tensor([length, length // 2], device=clock.device)
            decoded = {
                "k": cache[0],
                "v": cache[1],
                "lengths": lengths,
                "window": length // 4,
                "sink": sink.expand(2, 2),
            }
            decoded |= newest
            out = decode.decode_attention(**decoded, backend="triton")
            want = decode.decode_attention(**_exact(decoded), backend="reference")
            line("decode", dim, str(dtype)[6:], _relative(out, want), *(None,) * 6)


def _exact(args: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in args.items()}


def _relative(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm().clamp_min(1e-300))


def _errors(
    op: str,
    dim: int,
    dtype: torch.dtype,
    function: Callable[..., Tensor],
    args: dict[str, Any],
    names: tuple[str, ...],
) -> None:
    found = with_gradients(lambda **x: function(**x, backend="triton"), args, names)
    want = with_gradients(lambda **x: function(**x, backend="reference"), _exact(args), names)
    line(op, dim, str(dtype)[6:], *(_relative(a, b) for a, b in zip(found, want, strict=True)))


def visible_pairs(length: int, num_own: int, window: int | None) -> int:
    """Query-key pairs of a chain on every row of one sequence."""
    if window is None:
        return length * (length + 1) // 2 + length * num_own
    near = window - num_own
    return sum(min(row + 1, near) for row in range(length)) + length * num_own


def chain_speed(clock: Clock, smoke: bool, matrix_rate: float) -> None:
    """Time of chain attention over lengths and windows, beside what else can compute it."""
    flash = importlib.util.find_spec("flash_attn") is not None
    table(
        f"Chain attention, bfloat16, {HEADS}/{KV_HEADS} heads of {DIM}, {OWN} own keys",
        *(
            "T",
            "window",
            "pass",
            "ms",
            "TFLOP/s",
            "of matrix rate",
            "flex ms",
            "flex / ours",
            "SDPA ms",
            "SDPA / ours",
        ),
        *("flash-attn ms (no own keys)", "flash / ours"),
    )
    lengths = (64,) if smoke else (1024, 4096, 32768, 131072)
    windows = (16, None) if smoke else (256, 1024, None)
    # FlexAttention compiles anew for each shape, so it runs on a few; SDPA holds a T x 4T mask.
    with_flex = {(4096, 1024), (32768, 1024), (32768, None)}
    for length in lengths:
        for window in windows:
            args = chain_inputs(length, OWN, clock.device, torch.bfloat16)
            for train in (False, True):
                what = f"chain T={length} window={window} {'forward + backward' if train else 'forward'}"
                if clock.late(what):
                    continue
                run = _pass(args, chain.chain_attention, train, window=window, backend="triton")
                ms = clock.ms(run)
                rate = (14 if train else 4) * visible_pairs(length, OWN, window) * HEADS * DIM / ms / 1e9
                others: list[float | None] = []
                flex_ms = None
                if (length, window) in with_flex and not clock.late(f"{what}, flex", 25):
                    flex_ms = _try(partial(_flex, args, window, train), f"{what}, flex", clock)
                sdpa_ms = None
                if length <= 4096 and not clock.late(f"{what}, SDPA"):
                    run = _pass(args, chain.chain_attention, train, window=window, backend="sdpa")
                    sdpa_ms = _try(partial(_same, run), f"{what}, SDPA", clock)
                flash_ms = None
                if flash and not clock.late(f"{what}, flash-attn"):
                    flash_ms = _try(partial(_flash, args, window, train), f"{what}, flash-attn", clock)
                for other in (flex_ms, sdpa_ms, flash_ms):
                    others += [other, None if other is None else other / ms]
                line(length, window, "fwd + bwd" if train else "fwd", ms, rate, rate / matrix_rate, *others)


def _same(run: Callable[[], Any]) -> Callable[[], Any]:
    return run


def _try(
    prepare: Callable[[], Callable[[], Any]], what: str, clock: Clock, repeats: int = 10
) -> float | None:
    """Milliseconds of what ``prepare`` returns; one that fails on this device is named and left out."""
    try:
        return clock.ms(prepare(), repeats)
    except Exception as error:  # noqa: BLE001
        clock.skipped.append(f"{what} ({type(error).__name__}: {str(error).splitlines()[0][:80]})")
        return None


def _pass(
    args: dict[str, Any], function: Callable[..., Tensor], train: bool, **options: Any
) -> Callable[[], Any]:
    floats = {n: x for n, x in args.items() if isinstance(x, Tensor) and x.is_floating_point()}
    leaves = {n: x.detach().requires_grad_(train) for n, x in floats.items()}
    grad = torch.randn_like(args["q"])

    def run() -> None:
        out = function(**{**args, **leaves}, **options)
        if train:
            torch.autograd.grad(out, list(leaves.values()), grad)

    return run


def _flex(args: dict[str, Any], window: int | None, train: bool) -> Callable[[], Any]:
    options = chain_options(args["q"], args["own_k"], window, None)
    mask = dense.flex_mask(args["rows"], args["cu_seqlens"], None, 1, args["k"].shape[0], OWN, options)

    def function(**x: Any) -> Tensor:
        own = (x["own_k"], x["own_v"])
        queries = x["q"][:, None]
        return dense.attend_flex(
            queries, x["k"], x["v"], *own, x["rows"], x["cu_seqlens"], None, options, mask
        )[:, 0]

    return _pass(args, function, train)


def _flash(args: dict[str, Any], window: int | None, train: bool) -> Callable[[], Any]:
    from flash_attn import flash_attn_func

    span = (-1, -1) if window is None else (window - 1, 0)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q[None], k[None], v[None], causal=True, window_size=span)[0]

    return _pass({n: args[n] for n in "qkv"}, function, train)


def decode_speed(clock: Clock, smoke: bool, copy_rate: float) -> None:
    """Bandwidth of draft-decode attention over batch, context and window."""
    table(
        f"Draft-decode attention, bfloat16, {HEADS}/{KV_HEADS} heads of {DIM}, one query",
        *(
            "B",
            "context",
            "window + sinks",
            "us",
            "GB/s",
            "of copy rate",
            "SDPA us (window sliced)",
            "SDPA / ours",
        ),
    )
    for batch in (2,) if smoke else (1, 8, 64):
        for length in (80,) if smoke else (4096, 32768, 131072):
            if batch * length > 64 * 32768 or clock.late(f"decode B={batch} context={length}"):
                continue
            q = torch.randn(batch, 1, HEADS, DIM, device=clock.device, dtype=torch.bfloat16)
            k, v = (
                torch.randn(batch, length, KV_HEADS, DIM, device=clock.device, dtype=torch.bfloat16)
                for _ in range(2)
            )
            lengths = torch.full((batch,), length, device=clock.device)
            sink = torch.tensor([[0, 4]], device=clock.device).repeat(batch, 1)
            for window in (16, None) if smoke else (1024, None):
                options = {"window": window, "sink": sink, "backend": "triton"}
                us = 1e3 * clock.ms(partial(decode.decode_attention, q, k, v, lengths, **options), 30)
                seen = length if window is None else min(length, window + 4)
                rate = 2 * 2 * batch * seen * KV_HEADS * DIM / us / 1e3
                near = [x[:, length - seen :].transpose(1, 2) for x in (k, v)]
                sdpa_call = partial(
                    functional.scaled_dot_product_attention, q.transpose(1, 2), *near, enable_gqa=True
                )
                sdpa = 1e3 * clock.ms(sdpa_call, 30)
                name = "full" if window is None else f"{window} + 4"
                line(batch, length, name, us, rate, rate / copy_rate, sdpa, sdpa / us)


def block_speed(clock: Clock, smoke: bool) -> None:
    """Time of block attention with a block on every row."""
    size = 4 if smoke else 16
    table(
        f"Block attention, bfloat16, {HEADS}/{KV_HEADS} heads of {DIM}, blocks of {size}",
        *("T", "window", "pass", "ms", "TFLOP/s"),
    )
    for length in (32,) if smoke else (1024, 4096):
        for window in (None,) if smoke else (1024, None):
            for train in (False, True):
                if clock.late(f"block T={length} window={window}"):
                    continue
                args = chain_inputs(length, size, clock.device, torch.bfloat16)
                args["q"] = torch.randn(length, size, HEADS, DIM, device=clock.device, dtype=torch.bfloat16)
                args["block_k"], args["block_v"] = args.pop("own_k"), args.pop("own_v")
                ms = clock.ms(_pass(args, block.block_attention, train, window=window, backend="triton"), 5)
                pairs = size * visible_pairs(length, 0, window) + length * size * size
                line(
                    length,
                    window,
                    "fwd + bwd" if train else "fwd",
                    ms,
                    (14 if train else 4) * pairs * HEADS * DIM / ms / 1e9,
                )


def tune(clock: Clock) -> None:
    """Time the chain kernels with other block sizes than ``launch.tiles`` gives."""
    candidates = [
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    ]
    keys = [(32, 64, 4, 2), (32, 128, 4, 2), (32, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 128, 8, 2)]
    table("Block sizes", "kernel", "T", "window", "(M, N, warps, stages)", "ms")
    given = launch.tiles
    for kernel, tries in (("fwd", candidates), ("dq", candidates), ("dkv", keys)):
        for length, window in ((32768, 1024), (16384, None)):
            args = chain_inputs(length, OWN, clock.device, torch.bfloat16)
            run = _pass(args, chain.chain_attention, kernel != "fwd", window=window, backend="triton")
            for size in tries:
                names = ("block_m", "block_n", "num_warps", "num_stages")
                chosen = launch.Tiles(**dict(zip(names, size, strict=True)))
                launch.tiles = lambda k, d, t, c=chosen, n=kernel: c if k == n else given(k, d, t)
                try:
                    ms = _try(partial(_same, run), f"{kernel} {size}", clock, 5)
                finally:
                    launch.tiles = given
                line(kernel, length, window, size, ms)


def main() -> int:
    """Run everything the budget allows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=225, help="seconds")
    parser.add_argument("--tune", action="store_true", help="only try block sizes")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, also on the CPU")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.smoke:
        print("no CUDA device; TRITON_INTERPRET=1 with --smoke tests the script itself", file=sys.stderr)
        return 2
    if args.smoke:
        global HEADS, KV_HEADS
        HEADS, KV_HEADS = 4, 1
    clock = Clock(device="cuda" if torch.cuda.is_available() else "cpu", budget=args.budget)
    torch.manual_seed(0)
    if args.tune:
        tune(clock)
    else:
        matrix_rate, copy_rate = ceilings(clock, args.smoke)
        correctness(clock, args.smoke)
        decode_speed(clock, args.smoke, copy_rate)
        chain_speed(clock, args.smoke, matrix_rate)
        block_speed(clock, args.smoke)
    print(f"\n{time.monotonic() - clock.start:.0f} s")
    for what in clock.skipped:
        print(f"left out: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
