"""EAGLE-3 drafters: offline scores over traces, and the factory behind ``eagle3=PATH``.

Example:
    drafter = create("runs/my-drafter", {"window": "1024", "sink": "bos"}, target)
    scores = drafter.score(traces, ScoreRequest(depth=8))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specbench.drafters.chains import Packed, Perturb, Probe, run_chains, sink_span
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.eagle3_session import Eagle3Session
from specbench.drafters.mtp import MtpModel
from specbench.drafters.scoring import Judge, check_sampler, groups, pack_traces, system_span
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

    def pack(self, traces: Sequence[Trace]) -> tuple[Packed, Tensor]:
        """Pack traces, and return the packed rows of all their round starts in order.

        Returns:
            The packing, and rows [sum of A-1] int64: round s of a trace hangs on position P + s - 1.

        Raises:
            UserError: a trace lacks a tap.
        """
        config = self.model.config
        sinks = None
        if config.sink != "none":
            ids = [(t.prompt.token_ids, system_span(t.prompt)) for t in traces]
            sinks = [sink_span(config, tokens, self.target.bos_id, span) for tokens, span in ids]
        return pack_traces(
            traces, taps=config.taps, name=self.info.name, device=self.model.device, sinks=sinks
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
        with torch.inference_mode():
            for group in groups(traces, self._row_bytes()):
                results += self._score_pack(group, request, probe, perturb)
        return results

    def _row_bytes(self) -> int:
        c = self.model.config
        per_row = len(c.taps) * c.target_hidden_size + 6 * c.hidden_size + 2 * c.num_kv_heads * c.head_dim
        return self.model.dtype.itemsize * per_row

    def _score_pack(
        self, traces: Sequence[Trace], request: ScoreRequest, probe: Probe | None, perturb: Perturb | None
    ) -> list[PositionScores]:
        packed, rows = self.pack(traces)
        judge = Judge(self.model, packed, rows, traces, request)
        run_chains(
            self.model, packed, rows, request.depth, judge,
            probe=probe, perturb=perturb, block_rows=BLOCK_ROWS,
        )  # fmt: skip
        return judge.results(traces)


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
