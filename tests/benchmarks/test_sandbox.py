"""Generated code runs apart, to its end, and not beyond its limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbench.benchmarks.sandbox import CodeEval, Verdict, run_program
from specbench.errors import UserError


@pytest.mark.parametrize(
    "program",
    [
        "import math, typing, re, heapq\nassert math.gcd(12, 8) == 4",
        "open('here', 'w').write('x')",
        "print('é')",
    ],
)
def test_good_programs_pass(program: str) -> None:
    assert run_program(program) == Verdict(passed=True)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "died before its end"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("import socket\nsocket.socket()", "may not use socket"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", "may not use"),
        ("import subprocess\nsubprocess.run(['true'])", "may not use subprocess.Popen"),
        ("import os\nos.system('true')", "may not use os.system"),
        ("print('passed')\nassert False", "AssertionError"),
    ],
)
def test_bad_programs_do_not(program: str, reason: str) -> None:
    verdict = run_program(program)
    assert not verdict.passed and reason in verdict.reason


def test_endless_programs_are_ended() -> None:
    verdict = run_program("while True:\n    pass", seconds=1)
    assert verdict == Verdict(passed=False, reason="timed out after 1 s")


def test_files_elsewhere_stay_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for program in (f"open({str(kept)!r}, 'a')", f"import os\nos.remove({str(kept)!r})"):
        assert "may not change" in run_program(program).reason
    assert kept.read_text() == "mine"


def test_the_users_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert os.environ["HF_TOKEN"] == "secret"
    assert run_program("import os\nassert 'HF_TOKEN' not in os.environ").passed


def test_code_eval_counts_as_the_published_one() -> None:
    """Two problems: one of two candidates right, then both wrong; pass@1 = (1/2 + 0) / 2, pass@2 = (1 + 0) / 2."""
    tests = ["assert add(2, 3) == 5", "assert add(2, 3) == 6"]
    good, bad = "def add(a, b): return a + b", "def add(a, b): return a * b - 7"
    with pytest.raises(UserError, match="--run-generated-code"):
        CodeEval().compute(references=tests, predictions=[[good], [bad]])
    with CodeEval.permitted(True):
        rates, outcomes = CodeEval().compute(
            references=tests, predictions=[[good, bad], [good, bad]], k=[1, 2, 3]
        )
    assert rates == {"pass@1": 0.25, "pass@2": 0.5}
    assert [passed["passed"] for _, passed in outcomes[0]] == [True, False]
    assert not CodeEval.allowed
