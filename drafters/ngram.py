"""Prompt lookup: draft what followed the same words earlier in this context.

The rule is vLLM 0.32's: among suffixes of the context of ``min``..``max`` tokens the longest that occurs
earlier wins, at its earliest occurrence; the tokens after it are proposed, as many as there are, up to k.

Example:
    index = NgramIndex(2, 5); index.extend([7, 8, 9, 7, 8]); index.propose(4) == [9, 7, 8]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.resolve import check_options
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

DEFAULT_MIN, DEFAULT_MAX = 2, 5
"""vLLM's own default of 5/5 proposes next to nothing on chat answers; single tokens match by accident."""


class NgramIndex:
    """A growing context that knows the earliest end of each of its n-grams; O(max - min) a token."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)
        self.tokens: list[int] = []
        self.first_end: dict[tuple[int, ...], int] = {}
        self.match: int | None = None

    def push(self, token: int) -> None:
        """Append one token."""
        self.tokens.append(token)
        self.match = None
        end = len(self.tokens) - 1
        for n in self.sizes:
            if n > len(self.tokens):
                continue
            earlier = self.first_end.setdefault(tuple(self.tokens[-n:]), end)
            if self.match is None and earlier < end:
                self.match = earlier

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.push(int(token))

    def propose(self, depth: int) -> list[int]:
        """Return 0..depth tokens expected after the context."""
        if self.match is None:
            return []
        return self.tokens[self.match + 1 : self.match + 1 + depth]


class NgramSession:
    """Implements ``DraftSession``; taps are ignored."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.index = NgramIndex(min_n, max_n)

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """Take in committed tokens."""
        self.index.extend(token_ids)

    def propose(self, depth: int, generator: Any = None, temperature: float = 0.0) -> Proposal:
        """Draft up to ``depth`` tokens, one-hot at any temperature."""
        return Proposal(tokens=self.index.propose(depth))


class NgramDrafter:
    """Implements ``Drafter``."""

    def __init__(self, min_n: int = DEFAULT_MIN, max_n: int = DEFAULT_MAX) -> None:
        """Look for suffixes of ``min_n``..``max_n`` tokens."""
        if not 1 <= min_n <= max_n:
            raise UserError(f"ngram needs 1 <= min <= max, not min={min_n} and max={max_n}")
        self.min_n, self.max_n = min_n, max_n
        self.info = DrafterInfo(
            name="ngram",
            kind="ngram",
            fingerprint=f"ngram-{min_n}-{max_n}",
            settings={"min": str(min_n), "max": str(max_n), "match": "longest,earliest"},
        )

    def session(self, prompt: RenderedPrompt | None = None) -> NgramSession:
        """Start following one answer."""
        return NgramSession(self.min_n, self.max_n)

    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        """Score every round start; a one-hot draft is accepted iff it equals the trace's token."""
        return [self._score_one(trace, request) for trace in traces]

    def _score_one(self, trace: Trace, request: ScoreRequest) -> PositionScores:
        ids, start, depth = trace.ids, trace.prompt_length, request.depth
        num_rounds = max(0, len(trace.answer_ids) - 1)
        index = NgramIndex(self.min_n, self.max_n)
        index.extend(ids[:start])
        accepted, drafted, hits = [], [], torch.full((num_rounds, depth), -1, dtype=torch.int8)
        for s in range(num_rounds):
            index.push(ids[start + s])
            draft = index.propose(depth)
            truth = ids[start + s + 1 : start + s + 1 + depth]
            same = [i < len(draft) and draft[i] == token for i, token in enumerate(truth)]
            accepted.append(same.index(False) if False in same else len(same))
            drafted.append(len(draft))
            hits[s, : len(same)] = torch.tensor(same, dtype=torch.int8)
        return PositionScores(
            depth=depth,
            accepted=torch.tensor(accepted, dtype=torch.int64),
            drafted=torch.tensor(drafted, dtype=torch.int64),
            alpha=(hits == 1).double() if request.sampler == "rejection" else None,
            forced=hits if request.full_chains else None,
        )


def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> NgramDrafter:
    """Return the drafter behind ``ngram@min=2,max=5``.

    Raises:
        UserError: an argument was given, or an option is unknown or no number.
    """
    if argument:
        raise UserError(f"ngram takes no argument, but got {argument!r}; write ngram or ngram@min=2,max=5")
    check_options("ngram", options, ("min", "max"))
    sizes = {}
    for key, default in (("min", DEFAULT_MIN), ("max", DEFAULT_MAX)):
        text = options.get(key, str(default))
        if not text.isdecimal():
            raise UserError(f"ngram option {key} must be a whole number, not {text!r}")
        sizes[key] = int(text)
    if "max" in options and "min" not in options:
        sizes["min"] = min(sizes["min"], sizes["max"])
    if "min" in options and "max" not in options:
        sizes["max"] = max(sizes["min"], sizes["max"])
    return NgramDrafter(sizes["min"], sizes["max"])
