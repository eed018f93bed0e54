"""Replay: score every drafter on a trace, then walk the rounds that online decoding would have made.

The accepted count a(s) of a round that starts at answer token s is known for every s; the rounds are the walk
s -> s + a(s) + 1 from s = 0. A smaller depth needs no new pass: a_k(s) = min(a(s), k).

Example: with accepted counts [2, 0, 0, 1, 0] at depth 2 and 6 answer tokens the walk visits s = 0 (a=2), s = 3 (a=1)
and s = 5 is the last token: two rounds, 1 + (2+1) + (1+1) = 6 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from specbench.drafters.resolve import required_taps
from specbench.errors import UserError
from specbench.runners.answers import Answerer, GivenAnswer
from specbench.runners.noise import is_noisy, noise_for
from specbench.runners.runner import ForcedCounts, Outcome, RunSettings, Work, answer_facts
from specbench.runners.targets import Target
from specbench.types import Drafter, PositionScores, PromptKey, Round, ScoreRequest, Trace

_SCORE_TRACES = 32
_SCORE_ROWS = 16_384
"""Traces are scored in groups of at most this many answers and rows: wide products, bounded memory."""


def walk_rounds(scores: PositionScores, answer_length: int, depth: int) -> list[Round]:
    """Return the rounds of one answer at depth ``depth``.

    Args:
        scores: accepted and drafted counts at every start, for a depth of at least ``depth``.
        answer_length: A, the answer's tokens.
        depth: k.
    """
    assert depth <= scores.depth
    accepted, drafted = scores.accepted.tolist(), scores.drafted.tolist()
    rounds: list[Round] = []
    start = 0
    while start < answer_length - 1:
        left = answer_length - 1 - start
        count = min(accepted[start], depth, left)
        emitted = min(count + 1, left)
        rounds.append(
            Round(
                index=len(rounds),
                start=start,
                num_drafted=min(drafted[start], depth),
                num_accepted=count,
                num_emitted=emitted,
                cut=left < depth,
            )
        )
        start += emitted
    return rounds


def expected_rounds(scores: PositionScores, answer_length: int, depth: int) -> list[Round]:
    """Return the rounds of exact rejection sampling as an expectation over its own randomness.

    Given the answer's tokens, step i of a round that starts at s is accepted with probability alpha(s, i), whatever
    happened before (the accepted tokens are the answer's). So the probability v(s) that a round starts at s follows
    from v(0) = 1 by one sweep, and every (s, a) becomes a row of weight v(s) * P(a | s).
    """
    assert scores.alpha is not None, "rejection sampling needs acceptance probabilities"
    alpha = scores.alpha[:, :depth].double()
    drafted = scores.drafted.tolist()
    visits = [0.0] * answer_length
    visits[0] = 1.0
    rounds: list[Round] = []
    for start in range(answer_length - 1):
        if visits[start] == 0.0:
            continue
        left = answer_length - 1 - start
        reach = min(depth, left, drafted[start])
        survive = [1.0, *torch.cumprod(alpha[start, :reach], dim=0).tolist()]
        for count in range(reach + 1):
            after = survive[count + 1] if count < reach else 0.0
            weight = visits[start] * (survive[count] - after)
            if weight <= 0.0:
                continue
            emitted = min(count + 1, left)
            visits[start + emitted] += weight
            rounds.append(
                Round(
                    index=start,
                    start=start,
                    num_drafted=min(drafted[start], depth),
                    num_accepted=count,
                    num_emitted=emitted,
                    cut=left < depth,
                    weight=weight,
                )
            )
    return rounds


def forced_counts(scores: PositionScores) -> ForcedCounts | None:
    """Sum up forced-chain accuracy over an answer's starts."""
    if scores.forced is None:
        return None
    return ForcedCounts(
        positions=tuple((scores.forced >= 0).sum(0).tolist()),
        hits=tuple((scores.forced == 1).sum(0).tolist()),
    )


def score_traces(
    traces: Sequence[Trace],
    outcomes: Sequence[Outcome],
    drafters: Mapping[str, Drafter],
    settings: RunSettings,
) -> None:
    """Score the drafters each outcome asks for and enter the rounds there.

    A drafter that fails on a group is tried answer by answer, so that one bad answer costs itself alone.
    """
    for name, drafter in drafters.items():
        wanted = [i for i, outcome in enumerate(outcomes) if name in outcome.work.drafters]
        noisy = [i for i in wanted if is_noisy(traces[i].prompt.condition)]
        plain = [i for i in wanted if i not in noisy]
        # noise is drawn per answer, so a noisy answer is scored on its own
        for group in ([plain] if plain else []) + [[i] for i in noisy]:
            _score_some(name, drafter, [traces[i] for i in group], [outcomes[i] for i in group], settings)


def _score_some(
    name: str, drafter: Drafter, traces: Sequence[Trace], outcomes: Sequence[Outcome], settings: RunSettings
) -> None:
    depth = min(settings.depth, drafter.info.max_depth or settings.depth)
    request = ScoreRequest(depth=depth, sampler=settings.sampler, full_chains=settings.full_chains)
    begun = time.perf_counter()
    extra: dict[str, Any] = {}
    if is_noisy(traces[0].prompt.condition):
        extra["perturb"] = noise_for(traces[0], settings.sampling.seed)
    try:
        results = drafter.score(traces, request, **extra)
    except Exception as error:  # whatever a drafter from outside raises costs one answer, not the run
        if len(traces) == 1:
            outcomes[0].errors[name] = f"{type(error).__name__}: {error}"
            return
        for trace, outcome in zip(traces, outcomes, strict=True):
            _score_some(name, drafter, [trace], [outcome], settings)
        return
    rows = sum(len(t.answer_ids) for t in traces)
    spent = time.perf_counter() - begun
    walk = expected_rounds if settings.sampler == "rejection" else walk_rounds
    for trace, outcome, scores in zip(traces, outcomes, results, strict=True):
        for k in settings.depths:
            if k <= depth:
                outcome.rounds[name, k] = walk(scores, len(trace.answer_ids), k)
        counts = forced_counts(scores)
        if counts is not None:
            outcome.forced[name] = counts
        outcome.num_nonfinite[name] = scores.num_nonfinite
        outcome.drafter_seconds[name] = spent * len(trace.answer_ids) / max(rows, 1)


class ReplayRunner:
    """Traces the target once per prompt and scores every drafter on the trace."""

    name = "replay"

    def __init__(self, target: Target, settings: RunSettings) -> None:
        self.target = target
        self.settings = settings
        self.on_trace: Callable[[Trace], None] | None = None
        """Receives every trace while it is whole (trace packs)."""
        self.extra_taps: tuple[int, ...] = ()
        self.make_answerer: Callable[[Sequence[int], Callable[[int], None]], Any] | None = None
        """(taps, on_tokens) -> who answers in the place of the target's own model."""

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield an outcome for every piece of work."""
        taps = sorted({*required_taps(drafters.values()), *self.extra_taps})
        answerer = self.make_answerer and self.make_answerer(taps, on_tokens)
        answerer = answerer or Answerer(
            self.target,
            taps=taps,
            max_new_tokens=self.settings.max_new_tokens,
            sampling=self.settings.sampling,
            batch_size=self.settings.batch_size,
            on_tokens=on_tokens,
        )
        failed: list[Outcome] = []
        traced = _trace_all(answerer, work, failed, on_tokens)
        yield from score_in_groups(self._seen(traced), drafters, self.settings)
        yield from failed

    def _seen(self, traced: Iterable[tuple[Work, Trace]]) -> Iterator[tuple[Work, Trace]]:
        for item, trace in traced:
            if self.on_trace is not None:
                self.on_trace(trace)
            yield item, trace


def score_in_groups(
    traced: Iterable[tuple[Work, Trace]], drafters: Mapping[str, Drafter], settings: RunSettings
) -> Iterator[Outcome]:
    """Score traces as they come, some at a time, and yield their outcomes."""
    group: list[tuple[Work, Trace]] = []
    begun = time.perf_counter()
    for pair in traced:
        group.append(pair)
        if len(group) >= _SCORE_TRACES or sum(len(t.ids) for _, t in group) >= _SCORE_ROWS:
            yield from _score_group(group, drafters, settings, time.perf_counter() - begun)
            group, begun = [], time.perf_counter()
    if group:
        yield from _score_group(group, drafters, settings, time.perf_counter() - begun)


def _score_group(
    group: Sequence[tuple[Work, Trace]],
    drafters: Mapping[str, Drafter],
    settings: RunSettings,
    seconds: float,
) -> Iterator[Outcome]:
    outcomes = [_outcome(item, trace, seconds / len(group)) for item, trace in group]
    score_traces([trace for _item, trace in group], outcomes, drafters, settings)
    yield from outcomes


def _outcome(work: Work, trace: Trace, seconds: float) -> Outcome:
    return Outcome(
        work=work,
        answer_ids=trace.answer_ids,
        finish=trace.finish,
        facts=answer_facts(trace.answer_ids, trace.entropies.tolist()),
        margins=tuple(trace.margins.tolist()),
        target_seconds=seconds,
    )


def _trace_all(
    answerer: Answerer, work: Sequence[Work], failed: list[Outcome], on_tokens: Callable[[int], None]
) -> Iterator[tuple[Work, Trace]]:
    """Yield a trace for all work that has one; what fails goes to ``failed`` with the reason."""
    open_items = [item for item in work if item.answer_ids is None]
    asked = {item.prompt.key: item for item in open_items}
    given: dict[PromptKey, Work] = {}
    for item in work:
        if item.answer_ids is None:
            continue
        if _goes_behind(item, asked.get(item.prompt.key), answerer):
            given[item.prompt.key] = item
            continue
        try:
            trace = answerer.force(item.prompt, item.answer_ids, item.finish)
            trace.path = item.path
        except Exception as error:  # one prompt's trouble must not end the run; it is recorded with its id
            failed.append(_failure(item, error))
            continue
        on_tokens(len(item.answer_ids))
        yield item, trace
    for item, trace in _generate(answerer, open_items, given, failed):
        if trace.path == "forced":
            on_tokens(len(trace.answer_ids))
        yield item, trace


def _goes_behind(item: Work, asked: Work | None, answerer: Answerer) -> bool:
    """Whether a forced answer can go on from a prompt that is answered freely in the same call."""
    return (
        isinstance(answerer, Answerer)
        and item.path == "forced"
        and asked is not None
        and asked.prompt.token_ids == item.prompt.token_ids
        and answerer.fits(item.prompt, item.answer_ids or ())
    )


def _generate(
    answerer: Answerer,
    work: Sequence[Work],
    given: Mapping[PromptKey, Work],
    failed: list[Outcome],
) -> Iterator[tuple[Work, Trace]]:
    """Answer prompts, freely and as given; after a crash the rest is halved until the culprits stand alone."""
    waiting = {item.prompt.key: item for item in work}
    assert len(waiting) == len(work), "a prompt was asked twice under one condition"
    forced = {key: item for key, item in given.items() if key in waiting}
    try:
        prompts = [item.prompt for item in work]
        if forced:
            answers = {key: GivenAnswer(item.answer_ids or (), item.finish) for key, item in forced.items()}
            traces = answerer.answer(prompts, answers)
        else:
            traces = answerer.answer(prompts)
        for trace in traces:
            yield (forced if trace.path == "forced" else waiting).pop(trace.prompt.key), trace
        return
    except Exception as error:  # see above
        rest = list(waiting.values())
        # given answers whose prompts are answered, or whose prompt stands alone: without them the rest may go on
        culprits = [item for key, item in forced.items() if key not in waiting or len(rest) == 1]
        if culprits:
            failed.extend(_failure(item, error) for item in culprits)
            yield from _generate(answerer, rest, {} if len(rest) == 1 else forced, failed)
            return
        if len(rest) == 1:
            failed.append(_failure(rest[0], error))
            return
    for half in (rest[: len(rest) // 2], rest[len(rest) // 2 :]):
        yield from _generate(answerer, half, forced, failed)


def _failure(work: Work, error: Exception) -> Outcome:
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return Outcome(work=work, errors={"": text})


def replay_runner(target: Target, settings: RunSettings) -> ReplayRunner:
    """Make the replay runner."""
    return ReplayRunner(target, settings)
