"""A drafter that repeats the newest token (``parrot``) or one given token (``parrot=42``).

Example: ``specbench run --drafter ngram,parrot,parrot=42``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specbench.errors import UserError
from specbench.types import (
    DrafterInfo,
    PositionScores,
    Proposal,
    RenderedPrompt,
    ScoreRequest,
    TargetWeights,
    Trace,
)


class Parrot:
    """Implements ``specbench.types.Drafter``."""

    def __init__(self, token: int | None) -> None:
        self.token = token
        self.info = DrafterInfo(name="parrot", kind="parrot", fingerprint=f"parrot-{token}")

    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        """Count, at every start, the following answer tokens that are the one repeated."""
        return [self._score(trace.answer_ids, request.depth) for trace in traces]

    def session(self, prompt: RenderedPrompt | None = None) -> ParrotSession:
        """Start following one answer."""
        return ParrotSession(self.token)

    def _score(self, answer: Sequence[int], depth: int) -> PositionScores:
        accepted = []
        for start in range(len(answer) - 1):
            token = answer[start] if self.token is None else self.token
            run = 0
            while run < depth and start + run + 1 < len(answer) and answer[start + run + 1] == token:
                run += 1
            accepted.append(run)
        return PositionScores(
            depth=depth,
            accepted=torch.tensor(accepted, dtype=torch.int64),
            drafted=torch.full((len(accepted),), depth, dtype=torch.int64),
        )


class ParrotSession:
    """Implements ``specbench.types.DraftSession``."""

    def __init__(self, token: int | None) -> None:
        self.token = token
        self.newest = 0

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, torch.Tensor]) -> None:
        """Remember the newest token."""
        self.newest = token_ids[-1]

    def propose(self, depth: int, generator: Any = None, temperature: float = 0.0) -> Proposal:
        """Repeat it."""
        return Proposal(tokens=[self.newest if self.token is None else self.token] * depth)


def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> Parrot:
    """Make the drafter of ``parrot`` or ``parrot=TOKEN``.

    Raises:
        UserError: no token id of the target, or an option (there are none).
    """
    if options:
        raise UserError(f"parrot takes no options, got {', '.join(options)}")
    if argument is None:
        return Parrot(None)
    if not argument.isdigit() or int(argument) >= target.info.vocab_size:
        raise UserError(f"parrot={argument}: give a token id below {target.info.vocab_size}")
    return Parrot(int(argument))
