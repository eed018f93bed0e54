"""Every Triton kernel compiles for sm_80, sm_90 and sm_100 without a GPU, and none spills at head dimension 128."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = Path(__file__).parents[2] / "perf" / "kernels_report.py"
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227}
"""Shared memory one thread block may have, from NVIDIA's tables of compute capabilities."""

CHAIN = ("chain fwd", "chain dq", "chain dkv", "chain own", "chain stats")
BLOCK = ("block fwd", "block dq", "block dkv", "block own")
DECODE = ("decode split T1", "decode split T16", "decode merge")
# The tiles of a launch depend on the head dimension's class (64, 128, 256) and on the dtype's width.
KERNELS = {
    (128, "bfloat16"): CHAIN + BLOCK + DECODE,
    (128, "float32"): (*CHAIN, "decode split T1", "decode merge"),
    (64, "float16"): (*CHAIN, "decode split T1"),
    (64, "float32"): CHAIN,
    (256, "bfloat16"): (*CHAIN, "decode split T1", "decode split T16"),
    (192, "float32"): (*CHAIN, "decode split T1"),
    (0, "float32"): ("plan queries", "plan keys"),
}
WANTED = [
    (arch, name, dim, dtype)
    for (dim, dtype), names in KERNELS.items()
    for name in names
    for arch in SHARED_KIB
]


def run_report(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the report in a process of its own: kernels imported for the interpreter cannot be compiled."""
    pytest.importorskip("triton")
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPORT.parents[1]), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(REPORT), *arguments], env=environment, capture_output=True, text=True
    )


def report(*arguments: str) -> list[dict[str, str]]:
    """Return the rows of the report's table."""
    done = run_report(*arguments)
    lines = [line.strip("|").split("|") for line in done.stdout.splitlines() if line[:1] == "|"]
    assert lines and "variants in" in done.stdout, done.stdout + done.stderr
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str, int, str], dict[str, str]]:
    """What the report says of each variant; one run serves all tests."""
    rows = report()
    found = {(r["arch"], r["kernel"], int(r["D"]), r["dtype"]): r for r in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(("arch", "name", "dim", "dtype"), WANTED, ids=lambda x: str(x).replace(" ", "-"))
def test_compiles(
    compiled: dict[tuple[str, str, int, str], dict[str, str]], arch: str, name: str, dim: int, dtype: str
) -> None:
    row = compiled[arch, name, dim, dtype]
    assert 8 <= int(row["registers"]) <= 255
    assert float(row["shared KiB"].split()[0]) <= SHARED_KIB[arch]
    if dim <= 128:
        assert int(row["spill B"]) == 0


def test_nothing_else_is_reported(compiled: dict[tuple[str, str, int, str], dict[str, str]]) -> None:
    assert set(compiled) == set(WANTED)


@pytest.mark.parametrize(("arch", "matrix"), [("sm_80", "mma"), ("sm_90", "wgmma"), ("sm_100", "tcgen05")])
@pytest.mark.parametrize("name", ["chain fwd", "chain dq", "chain dkv", "block fwd", "block dq"])
def test_products_run_on_the_architecture_s_tensor_cores(
    compiled: dict[tuple[str, str, int, str], dict[str, str]], arch: str, matrix: str, name: str
) -> None:
    assert compiled[arch, name, 128, "bfloat16"]["matrix"] == matrix


def test_a_record_is_as_good_as_compiling_until_something_changes(tmp_path: Path) -> None:
    """The two kernels that cut work into tiles, on three architectures: compiled once, then taken from the record."""
    record = tmp_path / "kernels.csv"
    few = ("--all", "--only", "plan")
    first = run_report(*few, "--record", str(record))
    assert first.returncode == 0, first.stderr
    written = record.read_text()
    assert written.count("\n") == 7
    assert run_report(*few, "--record", str(record)).stdout == first.stdout
    assert run_report(*few, "--check", str(record)).returncode == 0
    # a kernel whose source was another
    head, changed, *others = written.splitlines(keepends=True)
    record.write_text(head + "0" * 16 + changed[16:] + "".join(others))
    stale = run_report(*few, "--check", str(record))
    assert stale.returncode == 1
    assert "not recorded: plan queries, 0, float32, sm_80" in stale.stdout
    assert "6 variants, 1 not in" in stale.stdout
    record.write_text(written.replace(f",{changed.split(',')[5]},", ",0.1,"))
    other = run_report(*few, "--check", str(record))
    assert other.returncode == 3 and "was made with Triton 0.1" in other.stdout


def test_every_variant_stands_in_the_record_as_it_is_today() -> None:
    """The whole product, compiled once for this source and this Triton; what changed has to be compiled again."""
    done = run_report("--all", "--check", str(REPORT.with_name("kernels.csv")))
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr
    assert "546 variants, 0 not in" in done.stdout and "0 not fit to launch" in done.stdout


@pytest.mark.slow
def test_the_whole_product_of_head_dims_and_dtypes_compiles_and_does_not_spill() -> None:
    rows = report("--all")
    assert {(int(r["D"]), r["dtype"]) for r in rows} >= {
        (dim, dtype) for dim in (64, 96, 128, 192, 256) for dtype in ("bfloat16", "float16", "float32")
    }
    bad = [r for r in rows if "over" in r["shared KiB"] or (int(r["D"]) <= 128 and int(r["spill B"]))]
    assert not bad
