"""Decode: the real draft, verify, accept loop, one answer at a time, with timings. Lossless.

Example:
    result = decode(engine, target, drafter, prompt, depth=5, settings=settings)
    result.answer_ids, result.rounds[0].num_accepted, result.rounds[0].verify_ms
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specbench.drafters.resolve import required_taps
from specbench.errors import UserError
from specbench.runners.answers import answer_limit
from specbench.runners.engine import Engine, Segment, UnsupportedModelError
from specbench.runners.runner import Outcome, RunSettings, Work, answer_facts
from specbench.runners.sampling import describe, draw, law, stream
from specbench.runners.stopping import Ending
from specbench.runners.targets import Target
from specbench.types import (
    Drafter,
    DrafterInfo,
    PositionScores,
    Proposal,
    RenderedPrompt,
    Round,
    Sampler,
    Sampling,
    ScoreRequest,
    Trace,
)


@dataclass(slots=True, kw_only=True)
class Decoded:
    """One answer decoded with a drafter."""

    answer_ids: list[int]
    rounds: list[Round]
    finish: Literal["stop", "length"]
    margins: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    prefill_ms: float = 0.0


def verify(
    logits: Tensor,
    proposal: Proposal,
    sampling: Sampling,
    sampler: Sampler,
    random: np.random.Generator | None,
) -> tuple[int, list[int]]:
    """Judge a round.

    Args:
        logits: [d + 1, V], the target's after the newest token and after each draft token.
        proposal: d draft tokens, with the laws q they were drawn from for rejection sampling.
        sampling: the target's law p.
        sampler: greedy, match (the target samples; a draft counts where it is the same token) or rejection
            (accept with probability min(1, p/q), else draw from (p - q)+; Leviathan et al. 2023).
        random: the answer's stream; one number per emitted token for match, so that the tokens are those of plain
            sampling with the same stream.

    Returns:
        (accepted, emitted tokens): the accepted drafts and the target's own token behind them.
    """
    drafts = proposal.tokens
    if sampler == "greedy":
        best = logits.argmax(-1).tolist()
        count = next((i for i, token in enumerate(drafts) if token != best[i]), len(drafts))
        return count, [*drafts[:count], best[count]]
    assert random is not None
    emitted: list[int] = []
    for i in range(len(drafts) + 1):
        p = law(logits[i], sampling)
        if sampler == "match" or i == len(drafts):
            token = _draw_one(p, random)
        else:
            token = drafts[i]
            q = _draft_law(proposal, i, p)
            if random.random() >= float(p[token] / q[token]):
                residual = (p - q).clamp(min=0)
                # p == q leaves nothing to draw from, and then the draft cannot have been refused but by rounding
                emitted.append(_draw_one(residual if float(residual.sum()) > 0 else p, random))
                return i, emitted
        emitted.append(token)
        if i == len(drafts) or token != drafts[i]:
            return i, emitted
    raise AssertionError("the loop returns at the bonus token at the latest")


def _draft_law(proposal: Proposal, step: int, like: Tensor) -> Tensor:
    """[V] the law a draft token was drawn from; a one-hot draft was certain of itself."""
    if proposal.probs is not None:
        return proposal.probs[step]
    return torch.zeros_like(like).index_fill_(0, torch.tensor(proposal.tokens[step], device=like.device), 1.0)


def _draw_one(probs: Tensor, random: np.random.Generator) -> int:
    return int(
        draw(probs[None], torch.tensor([random.random()], dtype=torch.float64, device=probs.device))[0]
    )


def decode(
    engine: Engine,
    target: Target,
    drafter: Drafter,
    prompt: RenderedPrompt,
    *,
    depth: int,
    settings: RunSettings,
) -> Decoded:
    """Answer one prompt with a drafter.

    Args:
        engine: one slot, long enough for prompt, answer and ``depth`` more; taps as the drafter needs them.
        target: whose law is reproduced.
        drafter: who proposes.
        prompt: token ids.
        depth: k.
        settings: sampling, sampler and the answer limit.
    """
    sampling, sampler = settings.sampling, settings.sampler
    limit = answer_limit(prompt, settings.max_new_tokens, target.info.max_positions)
    random = None if sampling.greedy else stream(sampling.seed, *prompt.key)
    generator = None
    if sampler == "rejection":
        generator = torch.Generator().manual_seed(
            int(stream(sampling.seed, "draft", *prompt.key).integers(1 << 62))
        )
    session = drafter.session(prompt)
    ending = Ending.of(target, prompt)
    begun = time.perf_counter()
    length = len(prompt.token_ids)
    out = engine.forward([Segment(slot=0, start=0, ids=prompt.token_ids)], logits_at=[length - 1])
    _count, answer = verify(out.logits, Proposal(tokens=[]), sampling, sampler, random)
    result = Decoded(answer_ids=answer, rounds=[], finish="length", prefill_ms=_since(begun, target))
    _note(result, out.logits, answer, sampling)
    session.observe([*prompt.token_ids, *answer], out.taps)

    ended = ending.reached(answer)
    while not ended and len(answer) < limit:
        begun = time.perf_counter()
        room = target.info.max_positions - length - len(answer)
        proposal = session.propose(min(depth, room), generator, sampling.temperature)
        draft_ms = _since(begun, target)

        begun = time.perf_counter()
        block = [answer[-1], *proposal.tokens]
        segment = Segment(slot=0, start=length + len(answer) - 1, ids=block)
        out = engine.forward([segment], logits_at=range(len(block)))
        accepted, new = verify(out.logits, proposal, sampling, sampler, random)
        verify_ms = _since(begun, target)

        received = ending.received(answer, new, limit - len(answer))
        result.rounds.append(
            Round(
                index=len(result.rounds),
                start=len(answer) - 1,
                num_drafted=len(proposal.tokens),
                num_accepted=min(accepted, received),
                num_emitted=received,
                cut=False,
                engine_accepted=accepted,
                draft_ms=draft_ms,
                verify_ms=verify_ms,
            )
        )
        _note(result, out.logits[:received], new[:received], sampling)
        answer.extend(new[:received])
        # rejected drafts leave keys behind in the slot; the next round overwrites them and attention never looks
        session.observe(new[:received], {tap: states[:received] for tap, states in out.taps.items()})
        ended = ending.reached(answer)

    result.finish = "stop" if ended else "length"
    total = len(answer)
    result.rounds = [_mark_cut(r, total, depth) for r in result.rounds]
    return result


def _mark_cut(entry: Round, answer_length: int, depth: int) -> Round:
    return replace(entry, cut=answer_length - 1 - entry.start < depth)


def _note(result: Decoded, logits: Tensor, tokens: Sequence[int], sampling: Sampling) -> None:
    facts = describe(logits, torch.tensor(list(tokens), device=logits.device), sampling)
    result.margins.extend(facts.margins.tolist())
    result.entropies.extend(facts.entropies.tolist())


def _since(begun: float, target: Target) -> float:
    """Milliseconds since ``begun``, with the device's queue drained."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return (time.perf_counter() - begun) * 1e3


class DecodeRunner:
    """Decodes every prompt once per drafter and depth."""

    name = "decode"

    def __init__(self, target: Target, settings: RunSettings) -> None:
        self.target = target
        self.settings = settings

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield an outcome for every piece of work; the answer is that of the first drafter that gave one.

        Raises:
            UserError: the target keeps recurrent state, which cannot be rolled back; replay can score it.
        """
        for item in work:
            outcome = Outcome(work=item)
            if item.path == "forced":
                outcome.errors[""] = (
                    "decode makes its own answers; --answer-path forced needs --runner replay"
                )
                yield outcome
                continue
            for name in item.drafters:
                self._run_drafter(outcome, name, drafters[name], on_tokens)
            if not item.drafters:
                self._run_drafter(outcome, "", NoDrafter(), on_tokens)
                outcome.rounds.clear()
            yield outcome

    def _run_drafter(
        self, outcome: Outcome, name: str, drafter: Drafter, on_tokens: Callable[[int], None]
    ) -> None:
        prompt = outcome.work.prompt
        taps = required_taps([drafter])
        for depth in self.settings.depths:
            begun = time.perf_counter()
            try:
                length = (
                    len(prompt.token_ids)
                    + (prompt.max_new_tokens or self.settings.max_new_tokens)
                    + depth
                    + 1
                )
                engine = Engine(self.target.model, num_slots=1, max_length=length, taps=taps)
                decoded = decode(engine, self.target, drafter, prompt, depth=depth, settings=self.settings)
            except UnsupportedModelError as error:
                raise UserError(
                    f"target {self.target.info.name!r} cannot be decoded here ({error}); use --runner replay"
                ) from error
            except Exception as error:  # recorded with the prompt's id; other drafters and prompts go on
                outcome.errors[name] = f"{type(error).__name__}: {error}"
                return
            on_tokens(len(decoded.answer_ids))
            outcome.rounds[name, depth] = decoded.rounds
            outcome.drafter_seconds[name] = (
                outcome.drafter_seconds.get(name, 0.0) + time.perf_counter() - begun
            )
            if not outcome.answer_ids:
                outcome.answer_ids = tuple(decoded.answer_ids)
                outcome.finish = decoded.finish
                outcome.margins = tuple(decoded.margins)
                outcome.facts = answer_facts(decoded.answer_ids, decoded.entropies)


class NoDrafter:
    """Proposes nothing: plain decoding, for answers whose rounds are already known and as the speed baseline."""

    info = DrafterInfo(name="none", kind="none", fingerprint="")

    def session(self, prompt: RenderedPrompt | None = None) -> NoDrafter:
        """Nothing to follow."""
        return self

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """Nothing to learn."""

    def propose(self, depth: int, generator: Any = None, temperature: float = 0.0) -> Proposal:
        """Draft nothing."""
        return Proposal(tokens=[])

    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        """Accept nothing, everywhere."""
        sizes = [max(len(trace.answer_ids) - 1, 0) for trace in traces]
        return [
            PositionScores(depth=request.depth, accepted=torch.zeros(n).long(), drafted=torch.zeros(n).long())
            for n in sizes
        ]


def decode_runner(target: Target, settings: RunSettings) -> DecodeRunner:
    """Make the decode runner."""
    return DecodeRunner(target, settings)
