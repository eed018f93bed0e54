"""Compile Triton kernels for sm_80, sm_90 and sm_100 and print what each needs. No GPU is used.

Example: ``python perf/kernels_report.py`` compiles each kernel in every set of tiles it is launched with, as the tests
do; ``--all`` every head dimension with every dtype; ``--dims 128 --dtypes bfloat16`` these.
"""

from __future__ import annotations

import argparse
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from specbench.drafters.kernels import ahead

DIMS = (64, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One variant, named by its number: compiled functions cannot be sent to another process."""

    number: int
    arch: int
    dims: tuple[int, ...]
    """With ``dtypes``, a product; empty: the covering set."""
    dtypes: tuple[str, ...]

    def variants(self) -> list[ahead.Variant]:
        """Return the list that ``number`` counts in."""
        if not self.dims:
            return list(ahead.covering(self.arch))
        return list(ahead.variants(self.dims, tuple(getattr(torch, d) for d in self.dtypes), self.arch))


def cpu_seconds() -> float:
    """Return the seconds this process and the assemblers it started have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(job: Job) -> tuple[ahead.Resources, float]:
    """Compile one variant."""
    variant = job.variants()[job.number]
    start = cpu_seconds()
    return ahead.compile_variant(variant, job.arch), cpu_seconds() - start


def main() -> int:
    """Print the table; exit status 1 if a variant spills at head dimension 128 or needs too much shared memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every head dimension with every dtype: an hour")
    parser.add_argument("--dims", type=int, nargs="+", help="head dimensions; with every dtype or --dtypes")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ahead.ARCHITECTURES))
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    product = args.all or args.dims or args.dtypes
    dims, dtypes = tuple(args.dims or DIMS), tuple(args.dtypes or DTYPES)
    if not product:
        dims, dtypes = (), ()
    names = [v.name for v in Job(number=0, arch=args.arch[0], dims=dims, dtypes=dtypes).variants()]
    jobs = [
        Job(number=i, arch=a, dims=dims, dtypes=dtypes)
        for i, name in enumerate(names)
        if args.only in name
        for a in args.arch
    ]
    print(
        "| kernel | D | dtype | tile | warps | stages | arch | registers | shared KiB | spill B | matrix | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    bad, spent = 0, 0.0
    with ProcessPoolExecutor(args.jobs) as pool:
        for job, (found, seconds) in zip(jobs, pool.map(measure, jobs), strict=True):
            bad += show(job, found, seconds)
            spent += seconds
    print(
        f"{len(jobs)} variants in {spent:.0f} CPU s, "
        f"{bad} with spills at head_dim <= 128 or too much shared memory"
    )
    return 1 if bad else 0


def show(job: Job, found: ahead.Resources, seconds: float) -> bool:
    """Print one row; return whether the variant is not fit to launch."""
    variant = job.variants()[job.number]
    tile = "x".join(str(variant.constants[n]) for n in ("BLOCK_M", "BLOCK_N") if n in variant.constants)
    too_big = found.shared_bytes > ahead.SHARED_LIMIT[job.arch]
    print(
        f"| {variant.name} | {variant.dim} | {str(variant.dtype)[6:]} | {tile} | {variant.num_warps} "
        f"| {variant.num_stages} | sm_{job.arch} | {found.registers} | {found.shared_bytes / 1024:.0f}"
        f"{' (over)' if too_big else ''} | {found.spill_bytes} | {found.matrix_instruction} | {seconds:.1f} |",
        flush=True,
    )
    return too_big or (found.spill_bytes > 0 and variant.dim <= 128)


if __name__ == "__main__":
    sys.exit(main())
