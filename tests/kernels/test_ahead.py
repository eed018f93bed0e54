"""Every Triton kernel compiles for sm_80, sm_90 and sm_100 without a GPU, and the report reads what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = Path(__file__).parents[2] / "perf" / "kernels_report.py"


def report(*arguments: str) -> list[list[str]]:
    """Run the report in a process of its own: kernels imported for the interpreter cannot be compiled."""
    pytest.importorskip("triton")
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPORT.parents[1]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(REPORT), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line[:1] == "|"
    ]


def test_chain_forward_compiles_for_hopper_with_its_matrix_instruction() -> None:
    header, _, row = report("--dims", "128", "--dtypes", "bfloat16", "--arch", "90", "--only", "chain fwd")
    found = dict(zip(header, row, strict=True))
    assert found["kernel"] == "chain fwd" and found["arch"] == "sm_90"
    assert found["matrix"] == "wgmma"
    assert 32 <= int(found["registers"]) <= 255
    assert found["spill B"] == "0"


@pytest.mark.slow
def test_every_variant_compiles_everywhere_and_none_spills_at_head_dim_128() -> None:
    rows = report("--dims", "64", "128", "256", "--dtypes", "bfloat16", "float16", "float32")[2:]
    assert {row[6] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    assert {row[0] for row in rows} >= {
        "chain fwd",
        "chain dq",
        "chain dkv",
        "chain own",
        "chain stats",
        "block fwd",
    }
