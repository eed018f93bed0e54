"""The target's answers, batched, as traces.

Sequences are answered in buckets of similar length over a fixed number of slots; a slot whose answer ended is given
to the next prompt at once. What prompts of one condition begin with (a long system prompt) is run once for all of
them. Nothing an answer contains depends on what shares its batch, up to floating-point ties.

Example:
    answerer = Answerer(target, taps=(2, 15, 27), max_new_tokens=128)
    for trace in answerer.answer(rendered_prompts):
        print(trace.prompt.key, len(trace.answer_ids), trace.finish)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.errors import UserError
from specbench.runners.engine import Engine, Prefix, Segment, TapRecorder, UnsupportedModelError
from specbench.runners.sampling import Choice, choose, describe, stream
from specbench.runners.stopping import Ending
from specbench.runners.targets import Target
from specbench.types import AnswerPath, PromptKey, RenderedPrompt, Sampling, Trace

_PREFILL_TOKENS = 2048
_LOGIT_ROWS = 256
_SMALLEST_BUCKET = 256
_SMALLEST_SHARED_BUCKET = 512
"""Larger, so that a prefix is seldom needed in two buckets: what follows it is short as a rule."""
_LEAST_SHARED = 64
"""A shorter common beginning is not worth the bookkeeping."""
_ROOM_TO_GROW = 512
"""Positions beyond a forced answer's own, so that the next one under the same system prompt fits too."""

Finish = Literal["stop", "length"]


class GivenAnswer(NamedTuple):
    """An answer that is not generated but forced."""

    ids: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """Token ids that several prompts begin with; equal to itself only, so that looking one up costs nothing."""

    ids: tuple[int, ...]


@dataclass(slots=True)
class _Request:
    """One answer in the making."""

    prompt: RenderedPrompt
    limit: int
    """Answer tokens at most."""
    random: np.random.Generator | None
    ending: Ending
    answer: list[int] = field(default_factory=list)
    facts: list[tuple[float, float, float]] = field(default_factory=list)
    """(logprob, margin, entropy) per answer token."""
    shared: _Shared | None = None
    given: GivenAnswer | None = None
    """Forced after the prompt as well, once its own answer has ended."""

    @property
    def skipped(self) -> int:
        """Prompt tokens that the prefix holds."""
        return 0 if self.shared is None else len(self.shared.ids)

    @property
    def own(self) -> int:
        """Positions of its own: what follows the shared ids, and the longer of its answers."""
        answer = max(self.limit, len(self.given.ids) if self.given else 0)
        return len(self.prompt.token_ids) - self.skipped + answer

    @property
    def length(self) -> int:
        """Tokens whose keys are in the slot: all but the newest answer token."""
        return len(self.prompt.token_ids) + len(self.answer) - 1


def answer_limit(prompt: RenderedPrompt, max_new_tokens: int, max_positions: int) -> int:
    """Answer tokens this prompt may get within the target's positions.

    Raises:
        UserError: the prompt alone fills them.
    """
    room = max_positions - len(prompt.token_ids)
    if room < 1:
        raise UserError(
            f"prompt {prompt.prompt_id} under {prompt.condition.id} has {len(prompt.token_ids)} tokens, but the target "
            f"has {max_positions} positions; use shorter lengths or leave it out"
        )
    return min(prompt.max_new_tokens or max_new_tokens, room)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many items two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _share(requests: Sequence[_Request]) -> None:
    """Find what requests of one condition begin with in common; each keeps a last prompt token of its own."""
    alike: dict[tuple[str, tuple[int, ...]], list[_Request]] = {}
    for request in requests:
        ids = request.prompt.token_ids
        if len(ids) > _LEAST_SHARED:
            alike.setdefault((request.prompt.condition.id, ids[:_LEAST_SHARED]), []).append(request)
    for group in alike.values():
        if len(group) < 2:
            continue
        prompts = [request.prompt.token_ids for request in group]
        # whatever the first and the last in sorted order share, all between them share
        length = min(common_length(min(prompts), max(prompts)), min(map(len, prompts)) - 1)
        shared = _Shared(prompts[0][:length])
        for request in group:
            request.shared = shared


def _rows_after(request: _Request) -> int:
    """Rows of logits that the answer given to a finished request needs; one without has a turn of its own."""
    return len(request.given.ids) if request.given else _LOGIT_ROWS


def kv_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values one token takes over all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize)


class Answerer:
    """Answers prompts with one target and one setting."""

    def __init__(
        self,
        target: Target,
        *,
        taps: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        batch_size: int = 48,
        kv_budget: int | None = None,
        on_tokens: Callable[[int], None] = lambda _count: None,
    ) -> None:
        """Prepare; allocates nothing yet.

        Args:
            target: who answers.
            taps: ``hidden_states`` indices to keep.
            max_new_tokens: answer tokens at most, where the prompt names no other limit.
            sampling: the law; default greedy.
            batch_size: sequences at a time, at most.
            kv_budget: bytes for keys and values; default 2 GiB on a CPU, 40 % of what is free on a GPU.
            on_tokens: called with the number of answer tokens of every pass (progress).
        """
        self.target = target
        self.taps = tuple(taps)
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling or Sampling()
        self.batch_size = batch_size
        self.on_tokens = on_tokens
        if kv_budget is None:
            cuda = target.device.type == "cuda"
            kv_budget = int(torch.cuda.mem_get_info(target.device)[0] * 0.4) if cuda else 2 << 30
        self.kv_budget = kv_budget
        self._forced: tuple[Engine, tuple[int, ...]] | None = None
        """The slot that the last forced answer filled, and with which ids: the next one may begin alike."""

    def answer(
        self,
        prompts: Sequence[RenderedPrompt],
        given: Mapping[PromptKey, GivenAnswer] | None = None,
    ) -> Iterator[Trace]:
        """Yield one trace per prompt, in the order they finish, and one per given answer.

        Args:
            prompts: what to answer.
            given: by a prompt's key, an answer to force after the same prompt: it goes on from the prompt's keys and
                values, so that it costs its own tokens only. Its trace has path ``forced`` and is what :meth:`force`
                gives; it must fit, see :meth:`fits`.

        Raises:
            UserError: a prompt fills the target's positions.
        """
        self._forced = None
        requests = [self._request(p) for p in prompts]
        for request in requests:
            request.given = (given or {}).get(request.prompt.key)
        _share(requests)
        try:
            for bucket in self._buckets(requests):
                yield from self._run_bucket(bucket)
        except UnsupportedModelError:
            done = {id(r) for r in requests if r.answer}
            for request in requests:
                if id(request) not in done:
                    yield self._answer_plainly(request)
                    if request.given is not None:
                        yield self.force(request.prompt, *request.given)

    def fits(self, prompt: RenderedPrompt, answer_ids: Sequence[int]) -> bool:
        """Whether a prompt and a given answer fit the target's positions; the last token is scored and never fed."""
        return len(prompt.token_ids) + len(answer_ids) - 1 <= self.target.info.max_positions

    def force(self, prompt: RenderedPrompt, answer_ids: Sequence[int], finish: Finish) -> Trace:
        """Trace a given answer under a prompt: one pass, nothing is generated.

        Used for the forced answer path, and to rebuild the taps of an answer that an earlier run stored.
        """
        assert answer_ids, "an answer has at least one token"
        ids = [*prompt.token_ids, *answer_ids]
        first = len(prompt.token_ids) - 1
        if not self.fits(prompt, answer_ids):
            raise UserError(
                f"prompt {prompt.prompt_id} under {prompt.condition.id} and its answer have {len(ids)} tokens, but the "
                f"target has {self.target.info.max_positions} positions"
            )
        request = _Request(
            prompt,
            len(answer_ids),
            random=None,
            ending=Ending.of(self.target, prompt),
            answer=list(answer_ids),
        )
        try:
            taps = self._force_slots(request, ids, first)
        except UnsupportedModelError:
            taps = self._force_plainly(request, ids, first)
        return self._trace(request, finish, taps, path="forced")

    def _request(self, prompt: RenderedPrompt) -> _Request:
        random = None if self.sampling.greedy else stream(self.sampling.seed, *prompt.key)
        limit = answer_limit(prompt, self.max_new_tokens, self.target.info.max_positions)
        return _Request(prompt=prompt, limit=limit, random=random, ending=Ending.of(self.target, prompt))

    def _buckets(self, requests: Sequence[_Request]) -> Iterator[list[_Request]]:
        """Group requests whose own lengths share a power of two, those with a prefix apart; longest first."""
        buckets: dict[tuple[int, bool], list[_Request]] = {}
        for request in requests:
            with_prefix = request.shared is not None
            least = _SMALLEST_SHARED_BUCKET if with_prefix else _SMALLEST_BUCKET
            size = max(least, 1 << (request.own - 1).bit_length())
            buckets.setdefault((size, with_prefix), []).append(request)
        for key in sorted(buckets, reverse=True):
            # one prefix after the other, so that few are held at a time
            yield sorted(
                buckets[key],
                key=lambda r: (-r.skipped, r.shared.ids if r.shared else (), -len(r.prompt.token_ids)),
            )

    def _run_bucket(self, bucket: list[_Request]) -> Iterator[Trace]:
        length = max(request.own for request in bucket)
        per_token = kv_bytes_per_token(self.target.model)
        sizes = [len(shared.ids) for shared in {r.shared for r in bucket} if shared is not None]
        # prefixes get half of the budget at most, but the longest must fit
        room = min(sum(sizes), max(max(sizes), self.kv_budget // (2 * per_token))) if sizes else 0
        left = self.kv_budget - room * per_token
        slots = max(1, min(self.batch_size, len(bucket), left // (length * per_token)))
        engine = Engine(self.target.model, num_slots=slots, max_length=length, taps=self.taps)
        pending = deque(bucket)
        active: list[_Request] = []
        prefixes: dict[_Shared, Prefix] = {}
        while pending or active:
            free = slots - len(active)
            # a prefill reads every weight once, so it waits until it serves several prompts
            if pending and (free >= max(1, slots // 8) or not active):
                fresh = self._admit(pending, active, free, room)
                if fresh:
                    self._hold(prefixes, [*active, *fresh])
                    self._prefill(engine, fresh, prefixes, first_slot=len(active))
                    active.extend(fresh)
            yield from self._retire(engine, active)
            if active:
                self._step(engine, active)
                yield from self._retire(engine, active)

    @staticmethod
    def _admit(pending: deque[_Request], active: Sequence[_Request], free: int, room: int) -> list[_Request]:
        """Take up to ``free`` requests, as far as their prefixes fit into ``room`` tokens."""
        held = {request.shared for request in active if request.shared is not None}
        fresh: list[_Request] = []
        while pending and len(fresh) < free:
            shared = pending[0].shared
            if shared is not None and shared not in held:
                if held and sum(len(s.ids) for s in held) + len(shared.ids) > room:
                    break
                held.add(shared)
            fresh.append(pending.popleft())
        return fresh

    def _hold(self, prefixes: dict[_Shared, Prefix], requests: Sequence[_Request]) -> None:
        """Run the prefixes that requests need and are not there yet; let go of all others."""
        needed = {request.shared for request in requests if request.shared is not None}
        for shared in prefixes.keys() - needed:
            del prefixes[shared]
        for shared in needed - prefixes.keys():
            prefixes[shared] = Prefix(self.target.model, shared.ids, taps=self.taps, chunk=_PREFILL_TOKENS)

    def _prefill(
        self,
        engine: Engine,
        fresh: Sequence[_Request],
        prefixes: Mapping[_Shared, Prefix],
        *,
        first_slot: int,
    ) -> None:
        """Fill the slots of new requests and pick their first tokens, several prompts to a pass."""
        batch: list[tuple[_Request, Segment]] = []
        waiting = 0
        for slot, request in enumerate(fresh, start=first_slot):
            ids = request.prompt.token_ids
            start = request.skipped
            engine.begin(slot, prefixes[request.shared] if request.shared else None)
            while len(ids) - start > _PREFILL_TOKENS:
                piece = ids[start : start + _PREFILL_TOKENS]
                engine.forward([Segment(slot=slot, start=start, ids=piece)], logits_at=[len(piece) - 1])
                start += _PREFILL_TOKENS
            rest = ids[start:]
            if batch and waiting + len(rest) > _PREFILL_TOKENS:
                self._first_tokens(engine, batch)
                batch, waiting = [], 0
            batch.append((request, Segment(slot=slot, start=start, ids=rest)))
            waiting += len(rest)
        self._first_tokens(engine, batch)

    def _first_tokens(self, engine: Engine, batch: Sequence[tuple[_Request, Segment]]) -> None:
        segments = [segment for _request, segment in batch]
        last = np.cumsum([len(s.ids) for s in segments]) - 1
        out = engine.forward(segments, logits_at=torch.from_numpy(last))
        self._take(out.logits, [request for request, _segment in batch])

    def _step(self, engine: Engine, active: Sequence[_Request]) -> None:
        segments = [Segment(slot=i, start=r.length, ids=r.answer[-1:]) for i, r in enumerate(active)]
        out = engine.forward(segments, logits_at=range(len(active)))
        self._take(out.logits, active)

    def _take(self, logits: Tensor, requests: Sequence[_Request]) -> None:
        """Give every request its next token."""
        uniforms = None
        if not self.sampling.greedy:
            values = [r.random.random() for r in requests if r.random is not None]
            uniforms = torch.tensor(values, dtype=torch.float64, device=logits.device)
        self._note(requests, choose(logits, self.sampling, uniforms))
        self.on_tokens(len(requests))

    @staticmethod
    def _note(requests: Sequence[_Request], choice: Choice) -> None:
        facts = torch.stack([choice.logprobs, choice.margins, choice.entropies], dim=1).tolist()
        for request, token, fact in zip(requests, choice.tokens.tolist(), facts, strict=True):
            request.answer.append(token)
            request.facts.append(tuple(fact))

    def _finish(self, request: _Request) -> Finish | None:
        if request.ending.reached(request.answer):
            return "stop"
        return "length" if len(request.answer) >= request.limit else None

    def _retire(self, engine: Engine, active: list[_Request]) -> Iterator[Trace]:
        """Yield finished answers, and the given ones behind their prompts; close the gaps they leave."""
        ended = [(slot, r, finish) for slot, r in enumerate(active) if (finish := self._finish(r))]
        while ended:
            # from the back: the last sequence moves into a gap, and no slot below it changes hands
            batch = [ended.pop()]
            rows = _rows_after(batch[0][1])
            while ended and rows + _rows_after(ended[-1][1]) <= _LOGIT_ROWS:
                batch.append(ended.pop())
                rows += _rows_after(batch[-1][1])
            traces = [self._trace(r, finish, engine.slot_taps(slot, r.length)) for slot, r, finish in batch]
            # the prompts' keys and values are still there
            traces += self._force_in_place(engine, [(slot, r) for slot, r, _finish in batch if r.given])
            for slot, request, _finish in batch:
                last = active.pop()
                if last is not request:
                    engine.move(len(active), slot, last.length)
                    active[slot] = last
                engine.begin(len(active), None)
            yield from traces

    def _force_in_place(self, engine: Engine, ended: Sequence[tuple[int, _Request]]) -> list[Trace]:
        """Force the given answers of requests over their own ones, in their slots."""
        if not ended:
            return []
        forced: list[tuple[int, _Request, Finish]] = []
        for slot, request in ended:
            assert request.given is not None
            answer = list(request.given.ids)
            again = _Request(request.prompt, len(answer), random=None, ending=request.ending, answer=answer)
            forced.append((slot, again, request.given.finish))
        self._score_answers(engine, [(slot, request) for slot, request, _finish in forced])
        return [
            self._trace(request, finish, engine.slot_taps(slot, request.length), path="forced")
            for slot, request, finish in forced
        ]

    def _score_answers(self, engine: Engine, requests: Sequence[tuple[int, _Request]]) -> None:
        """Run the answers of requests in slots that hold their prompts; the last prompt token is fed again.

        Its logits score the first answer token. Few rows of logits at a time: a row is the whole vocabulary.
        """
        longest = max(len(request.answer) for _slot, request in requests)
        for begin in range(0, longest, _LOGIT_ROWS):
            here = slice(begin, begin + _LOGIT_ROWS)
            segments = [
                Segment(slot=slot, start=len(request.prompt.token_ids) - 1 + begin, ids=fed)
                for slot, request in requests
                if (fed := (request.prompt.token_ids[-1], *request.answer[:-1])[here])
            ]
            logits = engine.forward(segments, logits_at=range(sum(len(s.ids) for s in segments))).logits
            for _slot, request in requests:
                tokens = request.answer[here]
                self._describe(request, logits[: len(tokens)], tokens)
                logits = logits[len(tokens) :]

    def _trace(
        self, request: _Request, finish: Finish, taps: dict[int, Tensor], path: AnswerPath = "free"
    ) -> Trace:
        facts = torch.tensor(request.facts, dtype=torch.float32)
        if not bool(torch.isfinite(facts[:, 0]).all()) and path == "free":
            raise UserError(
                f"the target gives non-finite logits on prompt {request.prompt.prompt_id} under "
                f"{request.prompt.condition.id}; use --dtype float32"
            )
        return Trace(
            prompt=request.prompt,
            answer_ids=tuple(request.answer),
            taps={tap: states.cpu() for tap, states in taps.items()},
            logprobs=facts[:, 0],
            margins=facts[:, 1],
            entropies=facts[:, 2],
            finish=finish,
            sampling=self.sampling,
            path=path,
        )

    def _force_slots(self, request: _Request, ids: Sequence[int], first: int) -> dict[int, Tensor]:
        engine, start = self._forcing_slot(ids, first)
        while start < first:
            piece = ids[start : min(start + _PREFILL_TOKENS, first)]
            engine.forward([Segment(slot=0, start=start, ids=piece)], logits_at=[len(piece) - 1])
            start += len(piece)
        self._score_answers(engine, [(0, request)])
        stop = len(ids) - 1
        self._forced = engine, tuple(ids[:stop])
        return engine.slot_taps(0, stop)

    def _forcing_slot(self, ids: Sequence[int], first: int) -> tuple[Engine, int]:
        """Return an engine of one slot, and how many of the ids it holds: ``first`` at most, they need no logits."""
        # let go of it first: a pass that fails leaves a slot that holds neither the old ids nor the new ones
        kept, self._forced = self._forced, None
        if kept is not None:
            engine, before = kept
            held = min(common_length(before, ids), first)
            if held >= _LEAST_SHARED and engine.max_length >= len(ids):
                return engine, held
        length = len(ids) + _ROOM_TO_GROW
        return Engine(self.target.model, num_slots=1, max_length=length, taps=self.taps), 0

    def _describe(self, request: _Request, logits: Tensor, tokens: Sequence[int]) -> None:
        choice = describe(logits, torch.tensor(list(tokens), device=logits.device), self.sampling)
        facts = torch.stack([choice.logprobs, choice.margins, choice.entropies], dim=1).tolist()
        request.facts.extend(tuple(f) for f in facts)

    @torch.no_grad()
    def _answer_plainly(self, request: _Request) -> Trace:
        """One sequence at a time with the model's own cache: for layers that slots cannot hold."""
        request.answer.clear()
        request.facts.clear()
        recorder = TapRecorder(self.target.model, self.taps)
        pieces: dict[int, list[Tensor]] = {tap: [] for tap in self.taps}
        cache = None
        ids = list(request.prompt.token_ids)
        try:
            while (finish := self._finish(request) if request.answer else None) is None:
                out = self.target.model(
                    input_ids=torch.tensor([ids], device=self.target.device),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                for tap in self.taps:
                    pieces[tap].append(recorder.states[tap][0])
                self._take(out.logits[0].float(), [request])
                ids = request.answer[-1:]
        finally:
            recorder.close()
        return self._trace(request, finish, {tap: torch.cat(states) for tap, states in pieces.items()})

    @torch.no_grad()
    def _force_plainly(self, request: _Request, ids: Sequence[int], first: int) -> dict[int, Tensor]:
        recorder = TapRecorder(self.target.model, self.taps)
        try:
            out = self.target.model(
                input_ids=torch.tensor([ids[:-1]], device=self.target.device),
                use_cache=False,
                logits_to_keep=len(ids) - 1 - first,
            )
            self._describe(request, out.logits[0].float(), ids[first + 1 :])
            return {tap: recorder.states[tap][0] for tap in self.taps}
        finally:
            recorder.close()
