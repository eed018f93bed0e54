"""How fast an engine serves a fixed number of users, and how much of each step its drafter takes.

Example:
    answers, pace = engine.measure(requests, sampling, stop_ids, users=4, costs=False)
    pace.window_tokens / pace.window_seconds     # tokens/s of all four together
    pace.draft_seconds / pace.step_seconds       # the drafter's share
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a number of users got out of an engine, and what its steps cost."""

    users: int
    window_seconds: float
    """From the first request to the end of the last step in which every user was served."""
    window_tokens: int
    """Answer tokens of that time."""
    steps: int
    """Steps in which every user was past the prompt: each is one round of every user."""
    step_seconds: float
    """Their time."""
    draft_seconds: float | None
    """The drafter's part of it; None where the engine does not let it be told."""


class Meter:
    """Adds up an engine's steps."""

    def __init__(self, *, users: int) -> None:
        """Start at nothing.

        Args:
            users: requests that are served at a time.
        """
        self.users = users
        self._begun: float | None = None
        self._end = 0.0
        self._tokens = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._draft_seconds = 0.0

    def step(
        self, begun: float, end: float, *, drafting: float, num_tokens: int, serving: int, decoding: bool
    ) -> None:
        """Enter one step.

        Args:
            begun: clock before it, seconds.
            end: clock behind it.
            drafting: seconds of it that the drafter took.
            num_tokens: answer tokens it gave.
            serving: requests that were at work.
            decoding: whether every user was served and past the prompt.
        """
        if self._begun is None:
            self._begun = begun
        if serving == self.users:
            self._end = end
            self._tokens += num_tokens
        if decoding:
            self._steps += 1
            self._step_seconds += end - begun
            self._draft_seconds += drafting

    def pace(self, *, told: bool) -> Pace:
        """Return the sums.

        Args:
            told: whether the drafter's time is known.
        """
        return Pace(
            users=self.users,
            window_seconds=max(self._end - (self._begun or 0.0), 0.0),
            window_tokens=self._tokens,
            steps=self._steps,
            step_seconds=self._step_seconds,
            draft_seconds=self._draft_seconds if told else None,
        )


class DraftClock:
    """Time that the engine in this process spends proposing."""

    def __init__(self, *, on_device: bool) -> None:
        """Hook into the installed vLLM, where its model runner proposes in a method of its own.

        Args:
            on_device: drafts are made on an accelerator, whose work goes on behind the call unless it is waited for.
        """
        self.seconds = 0.0
        self.on_device = on_device
        self.wait = False
        self.installed = self._install()

    def _install(self) -> bool:
        try:
            # the CPU's derives from it
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner as ModelRunner

            inner = ModelRunner.propose_draft_token_ids
        except (ImportError, AttributeError):
            return False

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._settle()
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._settle()
                self.seconds += time.perf_counter() - begun

        ModelRunner.propose_draft_token_ids = timed
        return True

    def _settle(self) -> None:
        if self.wait and self.on_device:
            import torch

            torch.cuda.synchronize()
