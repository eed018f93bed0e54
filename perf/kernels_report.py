"""Compile Triton kernels for sm_80, sm_90 and sm_100 and print what each needs. No GPU is used.

Example: ``python perf/kernels_report.py`` compiles each kernel in every set of tiles it is launched with, as the tests
do; ``--all`` every head dimension with every dtype; ``--dims 128 --dtypes bfloat16`` these.

All of them take 22 minutes of CPU, so ``perf/kernels.csv`` keeps what came out, each row under a digest of its kernel's
source, constants, types and Triton. ``--all --record perf/kernels.csv`` compiles what has no row of its digest and
keeps the others (a stopped run goes on where it was); ``--all --check perf/kernels.csv`` compiles nothing and says what
it lacks.
"""

from __future__ import annotations

import argparse
import csv
import resource
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

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


KEYS = ("digest", "kernel", "dim", "dtype", "architecture", "triton")
RESULTS = ("registers", "shared_bytes", "spill_bytes", "cubin_bytes", "matrix_instruction", "cpu_seconds")


def row_of(job: Job) -> dict[str, str]:
    """Return the columns that name a variant."""
    variant = job.variants()[job.number]
    values = (
        ahead.digest(variant, job.arch), variant.name, variant.dim, str(variant.dtype)[6:], job.arch,
        triton.__version__,
    )  # fmt: skip
    return dict(zip(KEYS, map(str, values), strict=True))


def read_record(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a record by digest; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["digest"]: row for row in csv.DictReader(file)}


def write_record(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Replace a record."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, KEYS + RESULTS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def known(row: Mapping[str, str]) -> tuple[ahead.Resources, float]:
    """Return what a row of a record says."""
    numbers = {n: int(row[n]) for n in ("registers", "shared_bytes", "spill_bytes", "cubin_bytes")}
    return ahead.Resources(**numbers, matrix_instruction=row["matrix_instruction"]), float(row["cpu_seconds"])


def check(path: Path, jobs: Sequence[Job]) -> int:
    """Say which variants the record does not hold as they are today."""
    record = read_record(path)
    versions = {row["triton"] for row in record.values()}
    if record and versions != {triton.__version__}:
        print(f"{path} was made with Triton {', '.join(sorted(versions))}; this is {triton.__version__}")
        return 3
    rows = [row_of(job) for job in jobs]
    missing = [row for row in rows if row["digest"] not in record]
    found = [(job, record.get(row["digest"])) for job, row in zip(jobs, rows, strict=True)]
    bad = sum(show(job, *known(old)) for job, old in found if old is not None)
    for row in missing:
        print(f"not recorded: {row['kernel']}, {row['dim']}, {row['dtype']}, sm_{row['architecture']}")
    print(
        f"{len(jobs)} variants, {len(missing)} not in {path} as they are today, {bad} not fit to launch"
        + (f"; python perf/kernels_report.py --all --record {path}" if missing else "")
    )
    return 1 if missing or bad else 0


def main() -> int:
    """Print the table; exit status 1 if a variant spills at head dimension 128 or needs too much shared memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="every head dimension with every dtype: 22 CPU minutes"
    )
    parser.add_argument("--dims", type=int, nargs="+", help="head dimensions; with every dtype or --dtypes")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ahead.ARCHITECTURES))
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--record", type=Path, help="keep the results here, and take from it what stands there"
    )
    parser.add_argument("--check", type=Path, help="compile nothing; say what this record lacks")
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
    if args.check is not None:
        return check(args.check, jobs)
    bad, spent = 0, 0.0
    record = read_record(args.record) if args.record else {}
    rows = [row_of(job) for job in jobs]
    new = [j for j, row in zip(jobs, rows, strict=True) if row["digest"] not in record]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = pool.map(measure, new)
        for job, row in zip(jobs, rows, strict=True):
            old = record.get(row["digest"])
            found, seconds = known(old) if old else next(results)
            bad += show(job, found, seconds)
            spent += seconds
            if args.record and not old:
                values = asdict(found) | {"cpu_seconds": f"{seconds:.1f}"}
                record[row["digest"]] = row | {n: str(values[n]) for n in RESULTS}
                write_record(args.record, list(record.values()))
    if args.record:
        # rows of kernels as they were before go
        write_record(args.record, [record[row["digest"]] for row in rows])
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
