"""How good a drafter is on held-out answers, by the very code that scores drafters in a run.

Example:
    report = evaluate(model, target.info, examples, source, depth=8)
    report.accepted_per_round, report.accuracy[0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.training.data import Example, TapSource
from specbench.drafters.training.kinds import TrainModel, make_drafter
from specbench.types import (
    CLEAN,
    ConditionInfo,
    PositionScores,
    RenderedPrompt,
    ScoreRequest,
    Span,
    TargetInfo,
    Trace,
)

_CLEAN = ConditionInfo(id=CLEAN, family="template", severity=0, description="as trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a drafter does on held-out answers."""

    accepted_per_round: float
    """Draft tokens accepted per round, greedy; no bonus token."""
    rounds: int
    accuracy: tuple[float, ...]
    """Per step: share of rows where the step's own proposal is the target's token, whatever earlier steps did."""
    marginal: tuple[float, ...]
    """Per step: share of rounds that accept at least that many tokens."""
    rms: tuple[float, ...]
    """Per step: mean over rows of the RMS of the state that is fed back; empty where nothing is."""

    @property
    def growth(self) -> float:
        """RMS of the last step's fed-back state over the first one's."""
        return self.rms[-1] / self.rms[0]


class _StateSize:
    """A probe that measures what is fed back."""

    regions = None

    def __init__(self, depth: int) -> None:
        self.total = torch.zeros(depth, dtype=torch.float64)
        self.count = torch.zeros_like(self.total)

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        size = tensors["state"].float().pow(2).mean(-1).sqrt()
        self.total[step - 1] += size.double().sum().cpu()
        self.count[step - 1] += len(size)


def to_trace(example: Example, source: TapSource, taps: Sequence[int], dtype: torch.dtype) -> Trace:
    """Return an example as the trace that scoring takes; the target's own law is not in it."""
    features = source.read(example)
    size = len(example.prompt_ids)
    prompt = RenderedPrompt(
        prompt_id=example.id,
        suite="held-out",
        category="",
        turn=0,
        condition=_CLEAN,
        token_ids=example.prompt_ids,
        spans=(Span(kind="user", start=0, end=size),),
        bos_count=0,
        template_hash="",
    )
    unknown = torch.zeros(len(example.answer_ids))
    return Trace(
        prompt=prompt,
        answer_ids=example.answer_ids,
        taps={tap: state.to(dtype) for tap, state in zip(taps, features.taps, strict=True)},
        logprobs=unknown,
        margins=unknown,
        entropies=unknown,
        finish="length",
    )


def walk(scores: PositionScores) -> list[int]:
    """Return the accepted count of every round: s -> s + a + 1 from the first answer token."""
    accepted = scores.accepted.tolist()
    counts, start = [], 0
    while start < len(accepted):
        counts.append(accepted[start])
        start += accepted[start] + 1
    return counts


def evaluate(
    model: TrainModel, target: TargetInfo, examples: Sequence[Example], source: TapSource, *, depth: int
) -> HeldOut:
    """Score ``model`` on held-out examples, with every chain run to full depth.

    Args:
        model: in the precision to be judged.
        target: its target's facts.
        examples: answers it was not trained on.
        source: their states.
        depth: k; of a block drafter at most its masks.
    """
    drafter = make_drafter(model, target)
    depth = min(depth, drafter.info.max_depth or depth)
    traces = [to_trace(e, source, model.config.taps, model.dtype) for e in examples]
    request = ScoreRequest(depth=depth, full_chains=True)
    rms: tuple[float, ...] = ()
    if isinstance(drafter, DFlashDrafter):
        results = drafter.score(traces, request)
    else:
        sizes = _StateSize(depth)
        results = drafter.score(traces, request, probe=sizes)
        rms = tuple((sizes.total / sizes.count.clamp(min=1)).tolist())
    rounds = torch.tensor([count for scores in results for count in walk(scores)])
    forced = torch.cat([s.forced for s in results if s.forced is not None])
    asked = (forced >= 0).sum(0).clamp(min=1)
    return HeldOut(
        accepted_per_round=float(rounds.float().mean()),
        rounds=len(rounds),
        accuracy=tuple(((forced == 1).sum(0) / asked).tolist()),
        marginal=tuple((rounds[:, None] > torch.arange(depth)).float().mean(0).tolist()),
        rms=rms,
    )
