r"""Running code that a model wrote: another process, with time, memory, files and network limited.

The limits are fences against accidents (endless loops, full disks, stray deletes, downloads), not a prison against an
attacker: Python's audit events stop what goes through Python. Where the system lets an unprivileged process have a
network of its own, it gets an empty one.

Example:
    run_program("def add(a, b):\n    return a + b\nassert add(1, 2) == 3").passed   # True
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.errors import UserError

SECONDS = 10.0
MEMORY_MIB = 1024
FLAG = "--run-generated-code"

# Runs in the other process. The verdict goes through a pipe with a word only it knows, so that a program which exits
# early, or prints something, does not pass.
_CHILD = r"""
import os, sys
word = sys.stdin.readline().strip()
memory, seconds = (int(n) for n in sys.stdin.readline().split())
program = sys.stdin.read()
verdict = int(sys.argv[1])
here = os.path.realpath(os.getcwd())
try:
    import resource
    for kind, most in (("AS", memory), ("CPU", seconds), ("FSIZE", 1 << 20), ("CORE", 0), ("NOFILE", 64)):
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
        except (ValueError, OSError, AttributeError):
            pass
except ImportError:
    pass
if sys.platform == "linux":
    import ctypes
    unshare = ctypes.CDLL(None).unshare
    # a network namespace, for root as it is, else with a user namespace; containers refuse both, and then the
    # audit hook stands alone
    unshare(0x40000000) and unshare(0x10000000 | 0x40000000)

def fence(event, details, real=os.path.realpath, join=os.path.join, text=str, decode=os.fsdecode, here=here):
    if event.startswith(("socket.", "subprocess.", "ctypes.", "os.exec", "os.spawn", "os.posix_spawn", "os.fork",
                         "os.system", "os.kill", "pty.", "ftplib.", "smtplib.", "urllib.", "http.",
                         "webbrowser.", "sys.addaudithook", "signal.pthread_kill", "os.startfile")):
        raise PermissionError("generated code may not use " + event)
    writes = event == "open" and (
        (isinstance(details[1], str) and set(details[1]) & set("wax+")) or (details[2] or 0) & 0o1103
    )
    if writes or event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown",
                           "os.link", "os.symlink", "os.chdir", "shutil.rmtree", "shutil.move"):
        for path in details[: 2 if event in ("os.rename", "os.link", "os.symlink", "shutil.move") else 1]:
            if isinstance(path, (str, bytes)) and not (real(decode(path)) + "/").startswith(here + "/"):
                raise PermissionError("generated code may not change " + text(path))

def say(what, write=os.write):
    write(verdict, (word + " " + what).encode("utf-8", "replace")[:2000])

sys.argv[1:] = []
sys.addaudithook(fence)
try:
    exec(compile(program, "<generated>", "exec"), {"__name__": "__main__"})
except BaseException as error:
    say("failed " + type(error).__name__ + ": " + str(error))
else:
    say("passed")
finally:
    os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a program."""

    passed: bool
    reason: str = ""
    """Why it did not pass: its exception, "timed out", "died"."""


def run_program(program: str, *, seconds: float = SECONDS, memory_mib: int = MEMORY_MIB) -> Verdict:
    """Run a Python program to its end, apart from this process.

    Args:
        program: its source; it passes when nothing is raised.
        seconds: of wall time, and of processor time rounded up.
        memory_mib: of address space.
    """
    word = secrets.token_hex(16)
    head = f"{word}\n{memory_mib << 20} {int(seconds) + 1}\n"
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="specbench-code-") as folder:
        with subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            pass_fds=(writer,),
            start_new_session=True,
        ) as process:
            os.close(writer)
            timed_out = False
            try:
                process.communicate((head + program).encode("utf-8", "surrogatepass"), timeout=seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
            except BrokenPipeError:
                pass
            finally:
                # whatever it started is in its session and goes with it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read(4096).decode("utf-8", "replace")
    if timed_out:
        return Verdict(passed=False, reason=f"timed out after {seconds:g} s")
    known, _, rest = said.partition(" ")
    if known != word:
        return Verdict(passed=False, reason="died before its end")
    return Verdict(passed=rest == "passed", reason="" if rest == "passed" else rest.removeprefix("failed "))


class CodeEval:
    """Stands where tasks ask ``evaluate`` for ``code_eval``: the same call, run by :func:`run_program`.

    ``evaluate``'s own fetches itself from the hub and executes candidates as soon as a task's module is imported.
    """

    allowed: bool = False
    """Whether generated code may run; one switch for all, set while a run is scored."""
    _loading: bool = False

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Return pass@k over all problems, and every candidate's outcome.

        Args:
            references: test code of each problem.
            predictions: candidates of each problem.
            k: which pass@k, estimated without bias (Chen et al. 2021); those above the number of candidates are
                left out.

        Raises:
            UserError: generated code may not run.
        """
        if CodeEval._loading:
            # tasks try the metric once when they are imported and look at nothing it returns
            return {f"pass@{n}": 0.0 for n in k}, {}
        if not CodeEval.allowed:
            raise UserError(f"this task is scored by running what the model wrote; allow it with {FLAG}")
        outcomes: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for number, (test, candidates) in enumerate(zip(references, predictions, strict=True)):
            verdicts = [run_program(f"{candidate}\n{test}") for candidate in candidates]
            outcomes[number] = [
                (i, {"task_id": number, "passed": v.passed, "result": v.reason or "passed"})
                for i, v in enumerate(verdicts)
            ]
        counts = [(len(found), sum(v["passed"] for _, v in found)) for found in outcomes.values()]
        rates = {
            f"pass@{n}": sum(_pass_at(total, good, n) for total, good in counts) / len(counts)
            for n in k
            if counts and all(total >= n for total, _ in counts)
        }
        return rates, outcomes

    @staticmethod
    @contextlib.contextmanager
    def in_place_of_evaluate() -> Iterator[None]:
        """Give tasks that are imported meanwhile this class for ``evaluate.load("code_eval")``."""
        import evaluate

        original = evaluate.load

        def load(path: str, *arguments: Any, **options: Any) -> Any:
            return CodeEval() if path == "code_eval" else original(path, *arguments, **options)

        evaluate.load = load
        CodeEval._loading = True
        try:
            yield
        finally:
            evaluate.load = original
            CodeEval._loading = False

    @staticmethod
    @contextlib.contextmanager
    def permitted(allowed: bool) -> Iterator[None]:
        """Let generated code run meanwhile, or not."""
        before = CodeEval.allowed
        CodeEval.allowed = allowed
        try:
            yield
        finally:
            CodeEval.allowed = before


def _pass_at(total: int, good: int, k: int) -> float:
    """1 - C(total - good, k) / C(total, k)."""
    missed = 1.0
    for i in range(k):
        missed *= max(total - good - i, 0) / (total - i)
    return 1.0 - missed
