"""Compile every Triton kernel variant for sm_80, sm_90 and sm_100 and print what each needs. No GPU is used.

Example: ``python perf/kernels_report.py --dims 128 --dtypes bfloat16``
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from specbench.drafters.kernels import ahead


def measure(job: tuple[int, int, tuple[int, ...], tuple[str, ...]]) -> tuple[ahead.Resources, float]:
    """Compile one variant, named by its number: compiled functions cannot be sent to another process."""
    number, architecture, dims, dtypes = job
    variant = list(ahead.variants(dims, tuple(getattr(torch, d) for d in dtypes), architecture))[number]
    start = time.perf_counter()
    return ahead.compile_variant(variant, architecture), time.perf_counter() - start


def main() -> int:
    """Print the table; exit status 1 if a variant spills at head dimension 128 or needs too much shared memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ahead.ARCHITECTURES))
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    dims, dtypes = tuple(args.dims), tuple(args.dtypes)
    torch_dtypes = tuple(getattr(torch, d) for d in dtypes)
    by_arch = {a: list(ahead.variants(dims, torch_dtypes, a)) for a in args.arch}
    names = [v.name for v in by_arch[args.arch[0]]]
    jobs = [(i, a, dims, dtypes) for i, name in enumerate(names) if args.only in name for a in args.arch]
    print(
        "| kernel | D | dtype | tile | warps | stages | arch | registers | shared KiB | spill B | matrix | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    bad = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for (number, arch, _, _), (found, seconds) in zip(jobs, pool.map(measure, jobs), strict=True):
            variant = by_arch[arch][number]
            tile = "x".join(
                str(variant.constants[n]) for n in ("BLOCK_M", "BLOCK_N") if n in variant.constants
            )
            too_big = found.shared_bytes > ahead.SHARED_LIMIT[arch]
            bad += too_big or (found.spill_bytes > 0 and variant.dim <= 128)
            print(
                f"| {variant.name} | {variant.dim} | {str(variant.dtype)[6:]} | {tile} | {variant.num_warps} "
                f"| {variant.num_stages} | sm_{arch} | {found.registers} | {found.shared_bytes / 1024:.0f}"
                f"{' (over)' if too_big else ''} | {found.spill_bytes} | {found.matrix_instruction} | {seconds:.1f} |",
                flush=True,
            )
    print(f"{len(jobs)} variants, {bad} with spills at head_dim <= 128 or too much shared memory")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
