"""What all drafters with weights share in scoring: packing traces, and judging every step against them.

Example:
    packed, rows = pack_traces(traces, taps=(2, 15, 27), name="eagle3", device=torch.device("cpu"))
    judge = Judge(model, packed, rows, traces, ScoreRequest(depth=8))
    run_chains(model, packed, rows, 8, judge)
    judge.results(traces)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specbench.drafters.chains import Packed
from specbench.drafters.modules import DrafterModel
from specbench.errors import UserError
from specbench.types import PositionScores, RenderedPrompt, ScoreRequest, Trace

PACK_BYTES = 512 * 2**20
"""Bound on what one pack's rows take while they are scored."""
_BEATEN = -2
"""In place of a draft id: some token beats the label, whichever is best."""
_WORTH_SHARING = 0.1
"""Share of the rows that must be saved: finding out which row is whose costs something too."""
LOGIT_BYTES = 128 * 2**20
"""Bound on one block of logits."""


def check_sampler(traces: Sequence[Trace], request: ScoreRequest) -> None:
    """Refuse rejection sampling on greedy traces.

    Raises:
        UserError: naming the first such trace.
    """
    if request.sampler != "rejection":
        return
    greedy = next((t for t in traces if t.sampling.greedy), None)
    if greedy is not None:
        raise UserError(
            f"rejection sampling needs sampled answers, but {greedy.prompt.prompt_id!r} was traced "
            "at temperature 0; trace at a temperature above 0 or use the greedy sampler"
        )


def groups(traces: Sequence[Trace], row_bytes: int) -> Iterator[Sequence[Trace]]:
    """Cut ``traces`` into runs whose rows of ``row_bytes`` fit ``PACK_BYTES``; one that does not goes alone."""
    limit = PACK_BYTES // row_bytes
    group: list[Trace] = []
    total = 0
    for trace in traces:
        if group and total + len(trace.ids) > limit:
            yield group
            group, total = [], 0
        group.append(trace)
        total += len(trace.ids)
    if group:
        yield group


def pack_traces(
    traces: Sequence[Trace],
    *,
    taps: Sequence[int],
    name: str,
    device: torch.device,
    sinks: Sequence[tuple[int, int]] | None = None,
    share: bool = False,
) -> tuple[Packed, Tensor]:
    """Pack traces, and return the packed rows of all their round starts in order.

    Args:
        traces: with every one of ``taps``.
        taps: ``hidden_states`` indices.
        name: the drafter's, for the error.
        device: where the result lies.
        sinks: per trace (start, end) positions that stay visible in spite of a window.
        share: take what several traces begin with once, where that is worth it.

    Returns:
        The packing, and rows [sum of A-1] int64: round s of a trace hangs on position P + s - 1.

    Raises:
        UserError: a trace lacks a tap.
    """
    for trace in traces:
        missing = [t for t in taps if t not in trace.taps]
        if missing:
            raise UserError(
                f"drafter {name!r} needs tap {missing[0]}, but the trace of "
                f"{trace.prompt.prompt_id!r} holds {sorted(trace.taps)}; "
                "trace again with this drafter in the list"
            )
    sequences = [(torch.tensor(t.ids), [t.taps[i] for i in taps]) for t in traces]
    beginnings = common_beginnings(sequences) if share else []
    saved = sum(count for _, count in beginnings)
    worth = saved > _WORTH_SHARING * sum(len(t.ids) for t in traces)
    packed = Packed.build(sequences, sinks, device, beginnings if worth else None)
    starts = packed.cu_seqlens[:-1].tolist()
    rows = [
        torch.arange(start + t.prompt_length - 1, start + len(t.ids) - 2)
        for start, t in zip(starts, traces, strict=True)
    ]
    return packed, torch.cat(rows).to(device)


def common_beginnings(sequences: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> list[tuple[int, int]]:
    """Return for every sequence an earlier one, and with how many rows it begins as that one does.

    Row p begins alike where tokens 0..p+1 are the same and the states of rows 0..p are the same bits, as they are where
    the target ran a system prompt once for several prompts, or a prompt once for its free and its forced answer.

    Args:
        sequences: per sequence (ids [T+1], taps each [T, H_target]).

    Returns:
        Per sequence (number of the earlier one, rows); (0, 0) where none begins alike.
    """
    found: list[tuple[int, int]] = []
    for i, (ids, taps) in enumerate(sequences):
        alike = [(j, _first_difference(ids, sequences[j][0]) - 1) for j in range(i)]
        other, count = max(alike, key=lambda pair: pair[1], default=(0, 0))
        for mine, theirs in zip(taps, sequences[other][1], strict=True):
            if count > 0 and not torch.equal(mine[:count], theirs[:count]):
                same = (mine[:count] == theirs[:count]).all(dim=1)
                count = int(same.int().argmin())
        found.append((other, count) if count > 0 else (0, 0))
    return found


def _first_difference(left: Tensor, right: Tensor) -> int:
    """Return how many elements two vectors begin with in common."""
    size = min(len(left), len(right))
    same = left[:size] == right[:size]
    return size if bool(same.all()) else int(same.int().argmin())


@runtime_checkable
class DraftListener(Protocol):
    """Hears what every chain drafts."""

    def on_drafts(self, rows: Tensor, draft_ids: Tensor) -> None:
        """Take in one step: packed rows [R_j] and the best draft id [R_j] of the chain on each."""
        ...


class Judge:
    """Compares every step with the trace; the ``on_step`` of scoring.

    Row r's step i is compared with token r + 1 + i of its sequence.
    """

    def __init__(
        self,
        model: DrafterModel,
        packed: Packed,
        rows: Tensor,
        traces: Sequence[Trace],
        request: ScoreRequest,
        listener: DraftListener | None = None,
    ) -> None:
        self.model, self.packed, self.rows, self.request = model, packed, rows, request
        self.listener = listener
        # whether single rows may do without the whole head: a GPU gains nothing by it
        self.screens = (
            request.sampler == "greedy"
            and listener is None
            and rows.device.type == "cpu"
            and model.config.logit_scale > 0
            and bool(model.head_weight().sum().isfinite())
        )
        device, k = rows.device, request.depth
        self.accepted = torch.zeros(rows.shape[0], dtype=torch.int64, device=device)
        # whether all steps so far hit; chains that go on after a miss must not be counted again
        self.alive = torch.ones(rows.shape[0], dtype=torch.bool, device=device)
        self.nonfinite = torch.zeros(rows.shape[0], dtype=torch.int64, device=device)
        self.forced: Tensor | None = None
        if request.full_chains:
            self.forced = torch.full((rows.shape[0], k), -1, dtype=torch.int8, device=device)
        self.alpha: Tensor | None = None
        if request.sampler == "rejection":
            self.alpha = torch.zeros((rows.shape[0], k), dtype=torch.float64, device=device)
            # per packed row: law of the token it carries
            logp = [torch.zeros(t.prompt_length - 1, dtype=torch.float64) for t in traces]
            law = [torch.cat((head, t.logprobs.double().cpu())) for head, t in zip(logp, traces, strict=True)]
            self.logprobs = torch.cat(law).to(device)
            heat = [torch.full((len(t.ids) - 1,), t.sampling.temperature) for t in traces]
            self.temperature = torch.cat(heat).to(device)

    def __call__(self, step: int, active: Tensor, post: Tensor) -> Tensor | None:
        """Judge one step; see ``OnStep``."""
        label_rows = self.rows[active] + step
        labels = self.model.draft_ids[self.packed.inputs[label_rows]]
        best, log_q, bad = self._read(post, labels, label_rows)
        if self.listener is not None:
            self.listener.on_drafts(self.rows[active], best)
        hits = best == labels
        self.nonfinite[active] += bad
        alive = self.alive[active] & hits
        self.alive[active] = alive
        self.accepted[active] += alive
        if self.forced is not None:
            self.forced[active, step - 1] = hits.to(torch.int8)
        going = hits
        if self.alpha is not None:
            assert log_q is not None
            alpha = (log_q - self.logprobs[label_rows]).exp().clamp(max=1.0)
            self.alpha[active, step - 1] = alpha
            going = alpha > 0
        return None if self.request.full_chains else going

    def _read(self, post: Tensor, labels: Tensor, label_rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return best draft ids, log q of the labels (rejection only; -inf outside), bad rows.

        Best ids of rows that cannot hit may be left out: they are then ``_BEATEN``.
        """
        block = max(1, LOGIT_BYTES // (4 * self.model.config.draft_vocab_size))
        best, log_q = torch.full_like(labels, _BEATEN), []
        bad = ~post.isfinite().all(-1)
        chosen = torch.arange(len(labels), device=labels.device)
        if self.screens:
            chosen = self.model.contenders(post, labels)
        for piece in torch.split(chosen, block):
            logits = self.model.logits(post if len(piece) == len(post) else post[piece])
            top, best[piece] = logits.max(dim=-1)
            bad[piece] |= ~top.isfinite()
            if self.alpha is not None:
                heated = logits.double() / self.temperature[label_rows[piece], None]
                label = heated.gather(-1, labels[piece].clamp(min=0)[:, None]).squeeze(-1)
                inside = label - heated.logsumexp(-1)
                log_q.append(torch.where(labels[piece] < 0, -math.inf, inside))
        return best, torch.cat(log_q) if log_q else None, bad

    def results(self, traces: Sequence[Trace]) -> list[PositionScores]:
        """Return what was found, one result per trace."""
        sizes = [max(0, len(t.answer_ids) - 1) for t in traces]
        parts: dict[str, Sequence[Any]] = {
            "accepted": torch.split(self.accepted.cpu(), sizes),
            "bad": torch.split(self.nonfinite.cpu(), sizes),
            "alpha": [None] * len(sizes) if self.alpha is None else torch.split(self.alpha.cpu(), sizes),
            "forced": [None] * len(sizes) if self.forced is None else torch.split(self.forced.cpu(), sizes),
        }
        depth = self.request.depth
        return [
            PositionScores(
                depth=depth,
                accepted=parts["accepted"][i],
                drafted=torch.full((n,), depth, dtype=torch.int64),
                alpha=parts["alpha"][i],
                forced=parts["forced"][i],
                num_nonfinite=int(parts["bad"][i].sum()),
            )
            for i, n in enumerate(sizes)
        ]


def system_span(prompt: RenderedPrompt) -> tuple[int, int] | None:
    """Return the first system-prompt span's (start, end), or None where the prompt has none."""
    return next(((s.start, s.end) for s in prompt.spans if s.kind == "system"), None)
