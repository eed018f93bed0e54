"""EAGLE-3 drafters: offline scores over traces, and the factory behind ``eagle3=PATH``.

Example:
    drafter = create("runs/my-drafter", {"window": "1024", "sink": "bos"}, target)
    scores = drafter.score(traces, ScoreRequest(depth=8))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.drafters.chains import Packed, Perturb, Probe, run_chains, sink_span
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.eagle3_session import Eagle3Session
from specbench.drafters.mtp import MtpModel
from specbench.drafters.scoring import DraftListener, Judge, check_sampler, groups, pack_traces, system_span
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

BLOCK_ROWS = 4096
"""Rows whose inputs are made at a time in step 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Traces packed, ready to be replayed."""

    traces: Sequence[Trace]
    packed: Packed
    rows: Tensor
    """[sum of A-1] int64 packed rows of all round starts."""


class Eagle3Drafter:
    """An ``Eagle3Model`` with its target's facts; implements ``Drafter``."""

    kind = "eagle3"

    def __init__(
        self, model: Eagle3Model | MtpModel, target: TargetInfo, name: str, notes: Sequence[str] = ()
    ) -> None:
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
            kind=self.kind,
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

    def pack(self, traces: Sequence[Trace], *, share: bool = False) -> tuple[Packed, Tensor]:
        """Pack traces, and return the packed rows of all their round starts in order.

        Args:
            traces: with this drafter's taps.
            share: take what several traces begin with once.

        Returns:
            The packing, and rows [sum of A-1] int64: round s of a trace hangs on position P + s - 1.

        Raises:
            UserError: a trace lacks a tap.
        """
        model = self.model
        return pack_traces(
            traces,
            taps=model.config.taps,
            name=self.info.name,
            device=model.device,
            sinks=self._sinks(traces),
            share=share,
        )

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
        check_sampler(traces, request)
        results: list[PositionScores] = []
        share = probe is None and perturb is None and self.model.config.num_layers == 1
        with torch.inference_mode():
            for group in groups(traces, self._row_bytes()):
                packed, rows = self.pack(group, share=share)
                part = Prepared(traces=group, packed=packed, rows=rows)
                results += self._replay(part, request, probe, perturb, None)
        return results

    def prepare(self, traces: Sequence[Trace]) -> list[Prepared]:
        """Pack traces for several replays: taps are fused once.

        Raises:
            UserError: a trace lacks a tap.
        """
        parts = []
        with torch.inference_mode():
            for group in groups(traces, self._row_bytes()):
                packed, rows = self.pack(group)
                blocks = zip(*(torch.split(tap, BLOCK_ROWS) for tap in packed.taps), strict=True)
                fused = torch.cat([self.model.fuse(block) for block in blocks])
                parts.append(Prepared(traces=group, packed=replace(packed, fused=fused), rows=rows))
        return parts

    def replay(
        self,
        prepared: Sequence[Prepared],
        request: ScoreRequest,
        *,
        probe: Probe | None = None,
        perturb: Perturb | None = None,
        beyond: int = -1,
    ) -> list[PositionScores]:
        """Score prepared traces; see ``score``.

        Args:
            prepared: by this drafter, or by one with the same weights and taps.
            request: as of ``score``, like all arguments not named here.
            probe: sees every step.
            perturb: changes what the steps read.
            beyond: chains on positions up to this one are left out; they show as nothing accepted.

        Raises:
            UserError: rejection sampling is asked of a greedy trace.
        """
        results: list[PositionScores] = []
        with torch.inference_mode():
            for part in prepared:
                check_sampler(part.traces, request)
                packed = part.packed.with_sinks(self._sinks(part.traces))
                which = (packed.positions[part.rows] > beyond).nonzero().flatten() if beyond >= 0 else None
                results += self._replay(replace(part, packed=packed), request, probe, perturb, which)
        return results

    def _row_bytes(self) -> int:
        c = self.model.config
        per_row = len(c.taps) * c.target_hidden_size + 6 * c.hidden_size + 2 * c.num_kv_heads * c.head_dim
        return self.model.dtype.itemsize * per_row

    def _sinks(self, traces: Sequence[Trace]) -> list[tuple[int, int]] | None:
        config = self.model.config
        if config.sink == "none":
            return None
        return [
            sink_span(config, t.prompt.token_ids, self.target.bos_id, system_span(t.prompt)) for t in traces
        ]

    def _replay(
        self,
        part: Prepared,
        request: ScoreRequest,
        probe: Probe | None,
        perturb: Perturb | None,
        which: Tensor | None,
    ) -> list[PositionScores]:
        """Run the chains on ``part.rows``, or only on those at indices ``which``."""
        listener = probe if isinstance(probe, DraftListener) else None
        judge = Judge(self.model, part.packed, part.rows, part.traces, request, listener)
        rows, on_step = part.rows, judge.__call__
        if which is not None:
            rows = rows[which]

            def on_step(step: int, active: Tensor, post: Tensor) -> Tensor | None:
                return judge(step, which[active], post)

        run_chains(
            self.model, part.packed, rows, request.depth, on_step,
            probe=probe, perturb=perturb, block_rows=BLOCK_ROWS,
        )  # fmt: skip
        return judge.results(part.traces)


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
