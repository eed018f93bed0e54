"""What every runner does: take prompts, answer them, and say round by round how each drafter fared.

Example:
    for outcome in runner.run([Work(prompt=rendered)], drafters):
        outcome.rounds["ngram", 8][0].num_accepted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from specbench.runners.targets import Target
from specbench.types import AnswerPath, Drafter, RenderedPrompt, Round, Sampler, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One target answer to be had, and the drafters that still need scoring on it."""

    prompt: RenderedPrompt
    drafters: tuple[str, ...]
    """Names of the drafters to score; may be empty where only the answer is needed (an earlier turn)."""
    path: AnswerPath = "free"
    answer_ids: tuple[int, ...] | None = None
    """The answer to replay: the clean one (forced path), or one that an earlier run stored. None: generate."""
    finish: Literal["stop", "length"] = "length"
    """How the given answer ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """What the rows say of an answer beside its tokens."""

    mean_entropy: float | None
    distinct_bigrams: float | None
    degenerate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCounts:
    """Forced-chain accuracy of one answer, per step 1..k."""

    positions: tuple[int, ...]
    hits: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one piece of work."""

    work: Work
    answer_ids: tuple[int, ...] = ()
    finish: Literal["stop", "length"] = "length"
    facts: AnswerFacts | None = None
    rounds: dict[tuple[str, int], list[Round]] = field(default_factory=dict)
    """(drafter name, k) -> the answer's rounds."""
    margins: tuple[float, ...] = ()
    """Per answer token: the target's own logit minus the best other one."""
    forced: dict[str, ForcedCounts] = field(default_factory=dict)
    num_nonfinite: dict[str, int] = field(default_factory=dict)
    target_seconds: float = 0.0
    drafter_seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """drafter name -> why it could not be scored; the key "" means the target itself failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What all work of a run has in common."""

    depths: tuple[int, ...]
    sampling: Sampling
    sampler: Sampler
    max_new_tokens: int
    batch_size: int
    full_chains: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """For runners of their own kind (engine arguments, server address)."""

    @property
    def depth(self) -> int:
        """The largest k."""
        return max(self.depths)


class Runner(Protocol):
    """Runs drafters on prompts. ``registry.load("runners", name)`` returns a factory (target, settings) -> Runner."""

    name: str

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield an outcome for every piece of work, in any order; failures are outcomes too.

        Args:
            work: prompts of one turn.
            drafters: by name.
            on_tokens: called with the number of new answer tokens, for progress.
        """
        ...


RunnerFactory = Callable[[Target, RunSettings], Runner]

_MIN_TOKENS = 20
_MIN_DISTINCT = 0.3


def answer_facts(answer_ids: Sequence[int], entropies: Sequence[float]) -> AnswerFacts:
    """Describe an answer.

    An answer of 20 tokens or more in which under 30 % of the token pairs are different ones is flagged as degenerate:
    a loop is accepted almost whole, and says nothing about the drafter.
    """
    pairs = list(zip(answer_ids, answer_ids[1:], strict=False))
    distinct = len(set(pairs)) / len(pairs) if pairs else None
    return AnswerFacts(
        mean_entropy=sum(entropies) / len(entropies) if entropies else None,
        distinct_bigrams=distinct,
        degenerate=len(answer_ids) >= _MIN_TOKENS and distinct is not None and distinct < _MIN_DISTINCT,
    )
