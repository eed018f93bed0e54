"""An engine in a process of its own: what it breaks, leaks or dies of stays there, and the run goes on.

The engine registers its kernels once per process and fails at the second start in one, its thread count is fixed when
torch is imported, and a process killed for memory takes everything in it along: three reasons for a child.

Example:
    engine = RemoteEngine(options, defects)        # returns when the engine stands, or raises UserError
    answers = list(engine.answer(requests, Sampling(), stop_ids=(2,)))
    engine.close()
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specbench.errors import UserError
from specbench.runners import engine_defects
from specbench.runners.pace import Pace
from specbench.runners.vllm_start import (
    EngineAnswer,
    EngineOptions,
    Request,
    VllmEngine,
    engine_environment,
    start_failure,
)
from specbench.types import Sampling

START_SECONDS = 1800.0
"""Most seconds an engine may take to stand; large targets are read from slow disks."""
STEP_SECONDS = 600.0
"""Most seconds between two signs of life while it answers."""
_LOG_LINES = 6


class RemoteEngine:
    """The parent's side; the same calls as ``VllmEngine``."""

    def __init__(
        self,
        options: EngineOptions,
        defects: Mapping[str, str],
        *,
        start_seconds: float = START_SECONDS,
        step_seconds: float = STEP_SECONDS,
        serve: Callable[..., None] | None = None,
    ) -> None:
        """Start the child and wait until its engine stands.

        Args:
            options: of the engine.
            defects: from ``engine_defects.check``; workarounds are applied in the child.
            start_seconds: see ``START_SECONDS``.
            step_seconds: see ``STEP_SECONDS``.
            serve: what the child runs; tests put a fake one here.

        Raises:
            UserError: it does not start, dies, or takes too long.
        """
        self._step_seconds = step_seconds
        handle, name = tempfile.mkstemp(prefix="specbench-engine-", suffix=".log")
        os.close(handle)
        self._log = Path(name)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_child,
            args=(serve or _serve, theirs, options, dict(defects), str(self._log)),
            name="specbench-engine",
        )
        with _environment(options.device):
            self._process.start()
        theirs.close()
        try:
            kind, *details = self._receive(start_seconds, "starting")
            if kind == "failed":
                name, text, lines = details
                raise start_failure(name, text, lines)
        except BaseException:
            self.close()
            raise
        assert kind == "ready", kind

    def answer(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: Callable[[int], None] = lambda _count: None,
    ) -> Iterator[EngineAnswer]:
        """Yield one answer per request as they finish.

        Raises:
            UserError: the engine fails, dies or hangs.
        """
        self._send(("answer", tuple(requests), sampling, tuple(stop_ids)))
        while True:
            kind, *details = self._receive(self._step_seconds, "answering")
            if kind == "tokens":
                on_tokens(details[0])
            elif kind == "answer":
                yield details[0]
            elif kind == "done":
                return
            else:
                raise UserError(f"vLLM failed while answering: {details[0]}{self._tail()}")

    def measure(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        users: int,
        costs: bool,
    ) -> tuple[list[EngineAnswer], Pace]:
        """Answer with ``users`` requests at work at any time; see ``VllmEngine.measure``.

        Raises:
            UserError: the engine fails, dies or hangs.
        """
        self._send(("measure", tuple(requests), sampling, tuple(stop_ids), users, costs))
        # nothing is told meanwhile: telling takes time
        kind, *details = self._receive(self._step_seconds * max(1, len(requests) // users), "measured")
        if kind != "pace":
            raise UserError(f"vLLM failed while answering: {details[0]}{self._tail()}")
        answers, pace = details
        return answers, pace

    def metrics(self) -> dict[str, Any]:
        """Return the engine's counters by name."""
        self._send(("metrics",))
        kind, *details = self._receive(self._step_seconds, "counting")
        assert kind == "metrics", kind
        found: dict[str, Any] = details[0]
        return found

    def close(self) -> None:
        """End the child; kill it where it does not listen."""
        with contextlib.suppress(OSError, ValueError):
            self._pipe.send(("close",))
        self._process.join(20)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(10)
        self._pipe.close()
        self._log.unlink(missing_ok=True)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._dead("answering") from error

    def _receive(self, seconds: float, doing: str) -> tuple[Any, ...]:
        until = time.monotonic() + seconds
        while not self._pipe.poll(min(1.0, seconds)):
            if not self._process.is_alive() and not self._pipe.poll(0):
                raise self._dead(doing)
            if time.monotonic() > until:
                raise UserError(
                    f"vLLM gave no sign of life for {seconds:.0f} s while {doing}; it was stopped{self._tail()}"
                )
        try:
            message: tuple[Any, ...] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._dead(doing) from error
        return message

    def _dead(self, doing: str) -> UserError:
        self._process.join(10)
        code = self._process.exitcode
        cause = f"exit code {code}"
        if code == -9:
            cause = "killed, most likely for memory: lower --engine max_num_seqs=, kv_gib= or gpu_memory="
        elif code is not None and code < 0:
            cause = f"signal {-code}"
        return UserError(f"vLLM's process died while {doing} ({cause}){self._tail()}")

    def _tail(self) -> str:
        """The last lines of the child's output."""
        try:
            lines = [
                line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()
            ]
        except OSError:
            lines = []
        return f"; its last lines: {' | '.join(lines[-_LOG_LINES:])}" if lines else ""


@contextlib.contextmanager
def _environment(device: str) -> Iterator[None]:
    """The child's environment is copied from this one when it starts."""
    before = dict(os.environ)
    os.environ.update(engine_environment(device))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _child(serve: Callable[..., None], *arguments: Any) -> None:
    """What the child runs: ``serve``, until it returns or the run is gone."""
    run = multiprocessing.parent_process()
    assert run is not None, "the engine's process is started by the run's"

    def end_with_the_run() -> None:
        run.join()
        Path(arguments[-1]).unlink(missing_ok=True)
        # a killed run cannot ask the engine to stop, and an engine at work or starting would not listen for minutes
        os._exit(1)

    threading.Thread(target=end_with_the_run, name="run-watch", daemon=True).start()
    with contextlib.suppress(
        BrokenPipeError, ConnectionResetError
    ):  # the run is gone: nobody is left to tell
        serve(*arguments)


def _serve(pipe: Connection, options: EngineOptions, defects: Mapping[str, str], log: str) -> None:
    """The child's side."""
    _redirect(log)
    lines: list[str] = []
    try:
        engine = VllmEngine(options, lambda: engine_defects.repair(defects), lines)
    except Exception as error:  # told to the parent, who says what it means
        pipe.send(("failed", type(error).__name__, str(error), list(lines)))
        return
    pipe.send(("ready",))
    while True:
        try:
            what, *details = pipe.recv()
        except EOFError:
            break
        if what == "close":
            break
        try:
            _handle(pipe, engine, what, details)
        except (BrokenPipeError, ConnectionResetError):
            break
        except Exception as error:  # as above; the engine may still be good for the next prompts
            pipe.send(("error", f"{type(error).__name__}: {str(error).strip().splitlines()[-1:] or ''}"))


def _handle(pipe: Connection, engine: Any, what: str, details: Sequence[Any]) -> None:
    if what == "metrics":
        pipe.send(("metrics", engine.metrics()))
        return
    if what == "measure":
        requests, sampling, stops, users, costs = details
        pipe.send(("pace", *engine.measure(requests, sampling, stops, users=users, costs=costs)))
        return
    requests, sampling, stops = details
    for answer in engine.answer(requests, sampling, stops, lambda count: pipe.send(("tokens", count))):
        pipe.send(("answer", answer))
    pipe.send(("done",))


def _redirect(log: str) -> None:
    """Send everything the engine prints to a file; the terminal belongs to the run's own display."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
