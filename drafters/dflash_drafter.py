"""DFlash drafters: offline scores over traces, an online session, and the factory behind ``dflash=PATH``.

Example:
    drafter = create("runs/my-drafter", {}, target)
    scores = drafter.score(traces, ScoreRequest(depth=7))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specbench.drafters.dflash import DFlashLayer, DFlashModel
from specbench.drafters.modules import rotate
from specbench.drafters.scoring import Judge, check_sampler, groups, pack_traces
from specbench.errors import UserError
from specbench.types import (
    DrafterInfo,
    PositionScores,
    Proposal,
    RenderedPrompt,
    ScoreRequest,
    TargetInfo,
    TargetWeights,
    Trace,
)

BLOCK_ROWS = 1024
"""Positions of blocks that run at a time."""


class DFlashDrafter:
    """A ``DFlashModel`` with its target's facts; implements ``Drafter``.

    The whole block is always run, whatever depth is asked for, so its first draft tokens do not depend on the
    depth. vLLM runs depth + 1 positions instead: ``@block=K+1`` models it at depth K.
    """

    def __init__(self, model: DFlashModel, target: TargetInfo, name: str, notes: Sequence[str] = ()) -> None:
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
            kind="dflash",
            fingerprint=model.fingerprint(),
            taps=model.config.taps,
            num_parameters=sum(p.numel() for p in model.parameters()),
            max_positions=model.config.max_positions,
            max_depth=model.config.max_depth,
            settings=model.config.settings(),
            notes=tuple(notes),
        )

    def session(self, prompt: RenderedPrompt | None = None) -> DFlashSession:
        """Start following one answer."""
        return DFlashSession(self.model)

    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        """Score every round start of every trace.

        Args:
            traces: target answers with this drafter's taps.
            request: depth at most ``info.max_depth``, sampler, whether steps are judged after a miss.

        Raises:
            UserError: more depth than the block has masks, a tap is missing, or rejection sampling is asked of a
                greedy trace.
        """
        if request.depth > self.model.config.max_depth:
            raise UserError(
                f"drafter {self.info.name!r} has blocks of {self.model.config.block_size} and cannot draft "
                f"{request.depth} tokens; ask for k up to {self.model.config.max_depth}"
            )
        check_sampler(traces, request)
        results: list[PositionScores] = []
        with torch.inference_mode():
            for group in groups(traces, self._row_bytes()):
                results += self._score_pack(group, request)
        return results

    def _row_bytes(self) -> int:
        c = self.model.config
        per_row = len(c.taps) * c.target_hidden_size + 3 * c.hidden_size
        per_row += 2 * c.num_layers * c.num_kv_heads * c.head_dim + c.block_size * c.hidden_size
        return self.model.dtype.itemsize * per_row

    def _score_pack(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        model, config = self.model, self.model.config
        packed, rows = pack_traces(
            traces, taps=config.taps, name=self.info.name, device=model.device, share=True
        )
        positions = packed.positions if packed.shared is None else packed.positions[packed.shared.stands]
        context = model.context(packed.taps, positions)
        if packed.shared is not None:
            reads = packed.shared.reads
            context = [(k[reads], v[reads]) for k, v in context]
        size = max(1, BLOCK_ROWS // config.block_size)
        parts = [model.block(context, packed, rows[i : i + size]) for i in range(0, len(rows), size)]
        judge = Judge(model, packed, rows, traces, request)
        if parts:
            _judge_all(judge, torch.cat(parts), rows, packed.last, request.depth)
        return judge.results(traces)


def _judge_all(judge: Judge, post: Tensor, rows: Tensor, last: Tensor, depth: int) -> None:
    """Show the judge slots 1..depth of every block, those past the answer's end left out."""
    active = torch.arange(len(rows), device=rows.device)
    for step in range(1, depth + 1):
        active = active[rows[active] + step <= last[rows[active]]]
        if not len(active):
            return
        keep = judge(step, active, post[active, step])
        if keep is not None:
            active = active[keep]


class DFlashSession:
    """Implements ``DraftSession``: keys of verified positions are kept, those of the block are not.

    Deliberately independent of the packed computation: plain attention, one block at a time.
    """

    def __init__(self, model: DFlashModel) -> None:
        self.model = model
        self.newest: int | None = None
        self.num_tokens = 0
        self.num_rows = 0
        self.pending: list[tuple[Tensor, ...]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """Take in committed tokens and the taps of newly verified positions; see ``DraftSession``."""
        self.num_tokens += len(token_ids)
        self.newest = int(token_ids[-1])
        self.pending.append(tuple(taps[i].to(self.model.device) for i in self.model.config.taps))

    @torch.inference_mode()
    def propose(
        self, depth: int, generator: torch.Generator | None = None, temperature: float = 0.0
    ) -> Proposal:
        """Draft at most ``depth`` tokens, or as many as the block has masks; see ``DraftSession``."""
        if self.pending:
            self._catch_up()
        assert self.newest is not None, "observe() comes before propose()"
        assert self.num_rows == self.num_tokens - 1, "every committed token but the newest needs its taps"
        depth = min(depth, self.model.config.max_depth)
        logits = self.model.logits(self._block()[1 : 1 + depth])
        ids = self.model.target_ids
        if generator is None or temperature == 0.0:
            return Proposal(tokens=ids[logits.argmax(-1)].tolist())
        law = torch.softmax(logits.float() / temperature, dim=-1)
        drawn = torch.multinomial(law.to(generator.device), 1, generator=generator).flatten()
        full = law.new_zeros(depth, self.model.config.vocab_size)
        full[:, ids] = law
        return Proposal(tokens=ids[drawn.to(ids.device)].tolist(), probs=full)

    def _catch_up(self) -> None:
        """Turn pending taps into every layer's keys and values."""
        taps = [torch.cat(column) for column in zip(*self.pending, strict=True)]
        self.pending = []
        count = taps[0].shape[0]
        positions = torch.arange(self.num_rows, self.num_rows + count, device=self.model.device)
        new = self.model.context(taps, positions)
        if not self.keys:
            self.keys, self.values = [k for k, _ in new], [v for _, v in new]
        else:
            self.keys = [torch.cat((old, k)) for old, (k, _) in zip(self.keys, new, strict=True)]
            self.values = [torch.cat((old, v)) for old, (_, v) in zip(self.values, new, strict=True)]
        self.num_rows += count

    def _block(self) -> Tensor:
        """Return the final norm's outputs [block_size, H] of one block."""
        model = self.model
        size = model.config.block_size
        x = model.block_inputs(torch.tensor([self.newest], device=model.device))[0]
        positions = torch.arange(self.num_rows, self.num_rows + size, device=model.device)
        tables = model.rope.tables(positions, x.dtype)
        for layer in model.layers:
            assert isinstance(layer, DFlashLayer)
            z = layer.input_layernorm(x)
            q = rotate(layer.self_attn.queries(z), tables)
            k, v = layer.keys_values(z, tables)
            x = layer.leave(z, x, self._attend(layer.index, q, k, v, positions))
        post: Tensor = model.norm(x)
        return post

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return attention outputs [block_size, Hq, D] over the kept context and the block."""
        config = self.model.config
        keys, values = torch.cat((self.keys[index], k)), torch.cat((self.values[index], v))
        group = config.num_heads // config.num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        where = torch.arange(len(keys), device=q.device)
        visible = torch.ones(len(positions), len(keys), dtype=torch.bool, device=q.device)
        if config.is_causal(index):
            visible = where <= positions[:, None]
        window = config.window(index)
        if window is not None:
            visible = visible & (where > positions[:, None] - window)
        scores = torch.einsum("qhd,khd->hqk", q, keys).float() * config.head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).to(values.dtype)
        out: Tensor = torch.einsum("hqk,khd->qhd", weights, values)
        return out


def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> DFlashDrafter:
    """Load the checkpoint at ``argument``; the factory behind ``dflash=PATH``.

    Args:
        argument: a directory, or a Hugging Face repository.
        options: ``block``, ``context_norm``, ``taps_offset``, ``vocab_map``.
        target: whose tensors it shares.

    Raises:
        UserError: the checkpoint does not load, does not fit the target, or an option is unknown.
    """
    from specbench.drafters.checkpoints.dflash import load_dflash

    if not argument:
        raise UserError("dflash needs a checkpoint: dflash=PATH")
    loaded = load_dflash(argument, target, options)
    return DFlashDrafter(loaded.model, target.info, f"dflash={argument}", loaded.notes)
