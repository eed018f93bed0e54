"""EAGLE-3 drafters: offline scores over traces, and the factory behind ``eagle3=PATH``.

Example:
    drafter = create("runs/my-drafter", {"window": "1024", "sink": "bos"}, target)
    scores = drafter.score(traces, ScoreRequest(depth=8))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.chains import Packed, Perturb, Probe, run_chains, sink_span
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.eagle3_session import Eagle3Session
from specbench.errors import UserError
from specbench.types import (
    DrafterInfo,
    PositionScores,
    RenderedPrompt,
    ScoreRequest,
    TargetInfo,
    TargetWeights,
    Trace,
)

PACK_BYTES = 512 * 2**20
"""Bound on what one pack's rows take while they are scored."""
LOGIT_BYTES = 128 * 2**20
"""Bound on one block of logits."""
BLOCK_ROWS = 4096
"""Rows whose inputs are made at a time in step 1."""


class Eagle3Drafter:
    """An ``Eagle3Model`` with its target's facts; implements ``Drafter``."""

    def __init__(self, model: Eagle3Model, target: TargetInfo, name: str, notes: Sequence[str] = ()) -> None:
        """Wrap ``model``.

        Args:
            model: in evaluation use; on the device where it is to run.
            target: the target it was made for.
            name: shown in the rows.
            notes: what was found odd while loading.
        """
        self.model = model
        self.target = target
        self.info = DrafterInfo(
            name=name,
            kind="eagle3",
            fingerprint=model.fingerprint(),
            taps=model.config.taps,
            num_parameters=sum(p.numel() for p in model.parameters()),
            max_positions=model.config.max_positions,
            trained_depth=model.config.trained_depth,
            reads_states=True,
            settings=model.config.settings(),
            notes=tuple(notes),
        )

    def session(self, prompt: RenderedPrompt | None = None) -> Eagle3Session:
        """Start following one answer.

        Args:
            prompt: needed only for ``sink=system``, whose span the token ids alone do not tell.

        Raises:
            UserError: ``sink=system`` without a prompt.
        """
        if self.model.config.sink == "system" and prompt is None:
            raise UserError("sink=system needs the prompt's spans: call session(prompt), or use sink=bos")
        return Eagle3Session(self.model, self.target.bos_id, None if prompt is None else system_span(prompt))

    def pack(self, traces: Sequence[Trace]) -> tuple[Packed, Tensor]:
        """Pack traces, and return the packed rows of all their round starts in order.

        Returns:
            The packing, and rows [sum of A-1] int64: round s of a trace hangs on position P + s - 1.

        Raises:
            UserError: a trace lacks a tap.
        """
        config, device = self.model.config, self.model.device
        for trace in traces:
            missing = [t for t in config.taps if t not in trace.taps]
            if missing:
                raise UserError(
                    f"drafter {self.info.name!r} needs tap {missing[0]}, but the trace of "
                    f"{trace.prompt.prompt_id!r} holds {sorted(trace.taps)}; "
                    "trace again with this drafter in the list"
                )
        sinks = None
        if config.sink != "none":
            ids = [(t.prompt.token_ids, system_span(t.prompt)) for t in traces]
            sinks = [sink_span(config, tokens, self.target.bos_id, span) for tokens, span in ids]
        packed = Packed.build(
            [(torch.tensor(t.ids), [t.taps[i] for i in config.taps]) for t in traces], sinks, device
        )
        starts = packed.cu_seqlens[:-1].tolist()
        rows = [
            torch.arange(start + t.prompt_length - 1, start + len(t.ids) - 2)
            for start, t in zip(starts, traces, strict=True)
        ]
        return packed, torch.cat(rows).to(device)

    def score(
        self,
        traces: Sequence[Trace],
        request: ScoreRequest,
        *,
        probe: Probe | None = None,
        perturb: Perturb | None = None,
    ) -> list[PositionScores]:
        """Score every round start of every trace.

        Args:
            traces: target answers with this drafter's taps.
            request: depth, sampler, whether chains go on after a miss.
            probe: sees every step of every pack; pass one trace at a time to tell them apart.
            perturb: changes what the steps read.

        Raises:
            UserError: a tap is missing; rejection sampling is asked of a greedy trace.
        """
        if request.sampler == "rejection":
            greedy = next((t for t in traces if t.sampling.greedy), None)
            if greedy is not None:
                raise UserError(
                    f"rejection sampling needs sampled answers, but {greedy.prompt.prompt_id!r} was traced "
                    "at temperature 0; trace at a temperature above 0 or use the greedy sampler"
                )
        results: list[PositionScores] = []
        with torch.inference_mode():
            for group in self._groups(traces):
                results += self._score_pack(group, request, probe, perturb)
        return results

    def _groups(self, traces: Sequence[Trace]) -> Iterator[Sequence[Trace]]:
        """Cut ``traces`` into runs whose rows fit the budget; a trace that does not fit goes alone."""
        c = self.model.config
        per_row = len(c.taps) * c.target_hidden_size + 6 * c.hidden_size + 2 * c.num_kv_heads * c.head_dim
        limit = PACK_BYTES // (self.model.dtype.itemsize * per_row)
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

    def _score_pack(
        self, traces: Sequence[Trace], request: ScoreRequest, probe: Probe | None, perturb: Perturb | None
    ) -> list[PositionScores]:
        packed, rows = self.pack(traces)
        judge = _Judge(self.model, packed, rows, traces, request)
        run_chains(
            self.model, packed, rows, request.depth, judge,
            probe=probe, perturb=perturb, block_rows=BLOCK_ROWS,
        )  # fmt: skip
        return judge.results(traces)


class _Judge:
    """Compares every step with the trace; the ``on_step`` of scoring."""

    def __init__(
        self, model: Eagle3Model, packed: Packed, rows: Tensor, traces: Sequence[Trace], request: ScoreRequest
    ) -> None:
        self.model, self.packed, self.rows, self.request = model, packed, rows, request
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
        label_rows = self.rows[active] + step
        labels = self.model.draft_ids[self.packed.inputs[label_rows]]
        best, log_q, bad = self._read(post, labels, label_rows)
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
        """Return best draft ids, log q of the labels (rejection only; -inf outside), bad rows."""
        block = max(1, LOGIT_BYTES // (4 * self.model.config.draft_vocab_size))
        best, log_q, bad = [], [], []
        for start in range(0, post.shape[0], block):
            piece = slice(start, start + block)
            logits = self.model.logits(post[piece])
            top, index = logits.max(dim=-1)
            best.append(index)
            bad.append(~(top.isfinite() & post[piece].isfinite().all(-1)))
            if self.alpha is not None:
                heated = logits.double() / self.temperature[label_rows[piece], None]
                chosen = heated.gather(-1, labels[piece].clamp(min=0)[:, None]).squeeze(-1)
                inside = chosen - heated.logsumexp(-1)
                log_q.append(torch.where(labels[piece] < 0, -math.inf, inside))
        return torch.cat(best), torch.cat(log_q) if log_q else None, torch.cat(bad)

    def results(self, traces: Sequence[Trace]) -> list[PositionScores]:
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


def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> Eagle3Drafter:
    """Load the checkpoint at ``argument``; the factory behind ``eagle3=PATH``.

    Args:
        argument: a directory, or a Hugging Face repository.
        options: ``window``, ``sink``, ``positions``, ``feedback``, ``taps_offset``, ``input_norm``,
            ``vocab_map``.
        target: whose tensors it shares.

    Raises:
        UserError: the checkpoint does not load, does not fit the target, or an option is unknown.
    """
    from specbench.drafters.checkpoints.load import load_checkpoint

    if not argument:
        raise UserError("eagle3 needs a checkpoint: eagle3=PATH")
    loaded = load_checkpoint(argument, target, options)
    return Eagle3Drafter(loaded.model, target.info, f"eagle3={argument}", loaded.notes)
