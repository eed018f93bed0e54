"""Chains of draft steps at many rows of several packed sequences at once: the one step computation there is.

Row p of a sequence stands for position p: it reads the taps of position p and the embedding of token p+1, and
step 1 predicts token p+2. A chain hangs on a row; its step j reads the sequence's own token p+j and the state
that step j-1 left, at rotary position p+j-1, and sees the keys of step 1 up to row p and its own keys of
steps 2..j. Scoring and training both run this function; they differ in ``on_step``.

Example:
    def on_step(step, active, post):            # post [len(active), H]; active indexes ``rows``
        hits = model.logits(post).argmax(-1) == model.draft_ids[packed.inputs[rows[active] + step]]
        return hits                             # chains that missed are dropped; None keeps all
    run_chains(model, packed, rows, depth=8, on_step=on_step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specbench.drafters.kernels.chain import chain_attention, chain_attention_shares
from specbench.drafters.modules import rotate


class ChainConfig(Protocol):
    """What the chain computation reads of a drafter's configuration."""

    @property
    def taps(self) -> tuple[int, ...]:
        """``hidden_states`` indices."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of a step."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """D, of queries, keys and values as attention sees them."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        ...

    @property
    def sink(self) -> str:
        """Positions that stay visible in spite of a window."""
        ...

    @property
    def positions(self) -> str:
        """``absolute`` or ``repacked``."""
        ...

    def window(self, layer: int) -> int | None:
        """Return layer ``layer``'s window, or None for full attention."""
        ...


class ChainLayer(Protocol):
    """One layer of a step, around the softmax."""

    index: int
    self_attn: Any
    """``queries(z)``, ``keys_values(z, tables)``."""

    def enter(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (z, residual): what attention reads, and what its output is added to."""
        ...

    def leave(self, z: Tensor, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after attention output and MLP, [n, H]."""
        ...


class ChainModel(Protocol):
    """A drafter that drafts step by step from a state it feeds back: EAGLE-3, MTP heads."""

    @property
    def config(self) -> Any:
        """A ``ChainConfig``."""
        ...

    @property
    def layers(self) -> Any:
        """``ChainLayer`` each."""
        ...

    @property
    def norm(self) -> Callable[[Tensor], Tensor]:
        """The final norm: its output is what the head reads."""
        ...

    @property
    def rope(self) -> Any:
        """Gives rotary tables."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab_size] target id of each draft id."""
        ...

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Return the hidden input [n, H] of step 1 from the taps."""
        ...

    def embed(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return embeddings [n, H]; ``positions`` [n] are the rows' own."""
        ...

    def feedback(self, pre: Tensor, post: Tensor) -> Tensor:
        """Return what the next step receives as its hidden input."""
        ...

    def logits(self, post: Tensor) -> Tensor:
        """Return logits [n, draft_vocab_size] of final-norm outputs."""
        ...


OnStep = Callable[[int, Tensor, Tensor], Tensor | None]
"""(step, active [R_j], post [R_j, H]) -> bool mask [R_j] of the chains that go on, or None for all.

``active`` holds indices into ``rows``, ascending; ``post`` is the final-norm output that the head reads."""

Perturb = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(step, rows [n], hidden [n, H], embeds [n, H]) -> (hidden, embeds) that the step really reads.

At step 1 it is called for all packed rows (in blocks), at later steps for the rows of the active chains."""


class Probe(Protocol):
    """Watches the steps, for diagnosis."""

    @property
    def regions(self) -> tuple[Tensor, int] | None:
        """(label [N] of each packed row, number of labels) to receive attention by region, or None."""
        ...

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Take in one step.

        ``rows`` [R] packed rows; ``hidden`` [R, H] hidden input (fused taps, later the fed-back state);
        ``embeds`` [R, H]; ``residual`` [R, H] raw residual after the last layer; ``state`` [R, H] fed back;
        with regions also ``mass`` [R, Hq, regions + step - 1] and ``entropy`` [R, Hq] of layer 0's attention.
        """
        ...


@runtime_checkable
class RecentProbe(Probe, Protocol):
    """A probe that also wants to know how much attention stays near."""

    @property
    def recents(self) -> tuple[int, ...]:
        """Numbers of last positions w, the query's own included, for the step to come.

        With regions, ``on_step`` then receives ``recent`` [R, Hq, len(recents)]: the mass of those step-1 keys that
        lie among the last w positions. A chain's own keys are not counted: ``mass`` holds each of them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRows:
    """Which packed rows read the same inputs: sequences that begin alike, with the same states."""

    stands: Tensor
    """[U] int64 packed row that stands for each row of ``Packed.taps``, ascending."""
    reads: Tensor
    """[N] int64 row of ``Packed.taps`` that each packed row reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Sequences back to back, one row per position that has taps."""

    inputs: Tensor
    """[N] int64: row p's token p+1; also the label of the chain step that predicts it."""
    taps: tuple[Tensor, ...]
    """Per tap [N, H_target]; [U, H_target] where rows share."""
    cu_seqlens: Tensor
    """[S+1] int64 boundaries."""
    positions: Tensor
    """[N] int64 position of each row within its sequence."""
    last: Tensor
    """[N] int64 last row of each row's sequence."""
    sink: Tensor | None = None
    """[S, 2] int64 packed rows (start, end) that stay visible in spite of a window."""
    fused: Tensor | None = None
    """[N, H] what the model makes of the taps, where it is kept for several runs."""
    shared: SharedRows | None = None
    """None: every row has taps of its own."""

    @classmethod
    def build(
        cls,
        sequences: Sequence[tuple[Tensor, Sequence[Tensor]]],
        sinks: Sequence[tuple[int, int]] | None = None,
        device: torch.device | str = "cpu",
        beginnings: Sequence[tuple[int, int]] | None = None,
    ) -> Packed:
        """Pack sequences.

        Args:
            sequences: per sequence (ids [T+1], taps each [T, H_target]): taps of all positions but the last.
            sinks: per sequence (start, end) positions; None: no sinks.
            device: where the result lies.
            beginnings: per sequence (number of an earlier one, how many rows it begins with as that one does).
        """
        lengths = [len(ids) - 1 for ids, _ in sequences]
        assert all(t.shape[0] == n for (_, taps), n in zip(sequences, lengths, strict=True) for t in taps)
        cu = torch.tensor([0, *lengths]).cumsum(0)
        sizes = torch.tensor(lengths)
        positions = torch.cat([torch.arange(n) for n in lengths])
        last = torch.repeat_interleave(cu[1:] - 1, sizes)
        inputs = torch.cat([ids[1:] for ids, _ in sequences]).to(torch.int64)
        shared = None
        if beginnings is not None:
            shared = _share(cu.tolist(), beginnings, device)
            sequences = [
                (ids, [t[count:] for t in taps])
                for (ids, taps), (_, count) in zip(sequences, beginnings, strict=True)
            ]
        columns = zip(*(taps for _, taps in sequences), strict=True)
        taps = tuple(
            c[0].to(device) if len(c) == 1 else torch.cat([t.to(device) for t in c]) for c in columns
        )
        packed = cls(
            inputs=inputs.to(device),
            taps=taps,
            cu_seqlens=cu.to(device),
            positions=positions.to(device),
            last=last.to(device),
            shared=shared,
        )
        return packed.with_sinks(sinks)

    def with_sinks(self, sinks: Sequence[tuple[int, int]] | None) -> Packed:
        """Return the same rows under other sinks: per sequence (start, end) positions; None: no sinks."""
        if sinks is None:
            return replace(self, sink=None)
        starts = self.cu_seqlens[:-1, None]
        return replace(self, sink=torch.tensor(sinks, dtype=torch.int64, device=starts.device) + starts)


def _share(
    starts: Sequence[int], beginnings: Sequence[tuple[int, int]], device: torch.device | str
) -> SharedRows:
    """Say which rows of sequences between ``starts`` [S+1] are shared."""
    stands, reads, total = [], list[Tensor](), 0
    for start, end, (other, count) in zip(starts[:-1], starts[1:], beginnings, strict=True):
        assert count == 0 or other < len(reads), "a sequence can begin as an earlier one does"
        stands.append(torch.arange(start + count, end))
        own = torch.arange(total, total + len(stands[-1]))
        reads.append(torch.cat((reads[other][:count], own)) if count else own)
        total += len(own)
    return SharedRows(stands=torch.cat(stands).to(device), reads=torch.cat(reads).to(device))


def sink_span(
    config: ChainConfig, token_ids: Sequence[int], bos_id: int | None, system: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the positions (start, end) that stay visible; empty where the prompt has none.

    Args:
        config: names the sink.
        token_ids: the prompt.
        bos_id: the target's BOS token; its leading run is the ``bos`` sink.
        system: the system-prompt span, for the ``system`` sink.
    """
    if config.sink == "first4":
        return (0, min(4, len(token_ids)))
    if config.sink == "bos":
        run = 0
        while run < len(token_ids) and token_ids[run] == bos_id:
            run += 1
        return (0, run)
    if config.sink == "system" and system is not None:
        return system
    return (0, 0)


class _Chains:
    """State of one ``run_chains``: step-1 keys of all rows, own keys of the chains that are still going."""

    def __init__(
        self, model: ChainModel, packed: Packed, rows: Tensor, probe: Probe | None, backend: str
    ) -> None:
        self.model, self.packed, self.probe, self.backend = model, packed, probe, backend
        self.rows = rows
        self.prefix: list[tuple[Tensor, Tensor]] = []
        self.own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(model.config.num_layers)]
        self.seen: dict[str, Tensor] = {}
        # [N] position just after the sink, to place re-packed queries
        self.sink_end: Tensor | None = None
        if packed.sink is not None and model.config.positions == "repacked":
            sizes = packed.cu_seqlens.diff()
            self.sink_end = torch.repeat_interleave(packed.sink[:, 1] - packed.cu_seqlens[:-1], sizes)

    def attend(self, layer: ChainLayer, z: Tensor, rows: Tensor) -> Tensor:
        """Return the attention output [R, Hq, D] of queries that hang on ``rows`` behind their own keys."""
        config, packed, own = self.model.config, self.packed, self.own[layer.index]
        window = config.window(layer.index)
        position = packed.positions[rows] + len(own)
        raw = layer.self_attn.queries(z)
        q = rotate(raw, self.model.rope.tables(position, z.dtype))
        q_sink = None
        if window is not None and self.sink_end is not None:
            near = torch.minimum(self.sink_end[rows] + window - 1, position)
            q_sink = rotate(raw, self.model.rope.tables(near, z.dtype))
        k, v = self.prefix[layer.index]
        own_k = torch.stack([k for k, _ in own], dim=1) if own else None
        own_v = torch.stack([v for _, v in own], dim=1) if own else None
        sink = packed.sink if window is not None else None
        if self.probe is not None and self.probe.regions is not None and layer.index == 0:
            labels, count = self.probe.regions
            recents = self.probe.recents if isinstance(self.probe, RecentProbe) else ()
            out, mass, entropy, near = chain_attention_shares(
                q, k, v, own_k, own_v, rows, packed.cu_seqlens, labels, count, recents,
                window=window, sink=sink, q_sink=q_sink,
            )  # fmt: skip
            self.seen |= {"mass": mass, "entropy": entropy, "recent": near}
            return out
        return chain_attention(
            q, k, v, own_k, own_v, rows, packed.cu_seqlens,
            window=window, sink=sink, q_sink=q_sink, backend=self.backend,
        )  # fmt: skip

    def first(self, perturb: Perturb | None, block_rows: int | None) -> Tensor:
        """Run step 1 and return the raw residual [R, H] at ``rows``.

        Keys and values are made for every row; queries and MLP only where something reads them.
        """
        model, packed, rows = self.model, self.packed, self.rows
        num_rows = packed.inputs.shape[0]
        everything = torch.arange(num_rows, device=rows.device)
        hidden: Tensor | None = None
        for index in range(model.config.num_layers):
            layer: ChainLayer = model.layers[index]
            queries = rows if index == model.config.num_layers - 1 else everything
            z, residual = self._first_inputs(layer, hidden, queries, perturb, block_rows or num_rows)
            out = self.attend(layer, z, queries)
            if index == 0 and queries is not rows and "mass" in self.seen:
                names = ("mass", "entropy", "recent")
                self.seen |= {name: self.seen[name][rows] for name in names if name in self.seen}
            hidden = layer.leave(z, residual, out)
        assert hidden is not None
        return hidden

    def _first_inputs(
        self,
        layer: ChainLayer,
        hidden: Tensor | None,
        queries: Tensor,
        perturb: Perturb | None,
        block_rows: int,
    ) -> tuple[Tensor, Tensor]:
        """Fill the layer's keys and values for all rows; return (z, residual) at ``queries``."""
        model, packed = self.model, self.packed
        if packed.shared is not None:
            return self._shared_inputs(layer, queries, packed.shared, block_rows)
        num_rows = packed.inputs.shape[0]
        starts = list(range(0, num_rows, block_rows))
        cuts = torch.searchsorted(queries, torch.tensor([*starts, num_rows], device=queries.device)).tolist()
        keys, values, zs, residuals, inputs = [], [], [], [], []
        for i, start in enumerate(starts):
            block = slice(start, min(start + block_rows, num_rows))
            embeds = hidden_in = None
            if hidden is None:
                hidden_in = (
                    model.fuse([t[block] for t in packed.taps])
                    if packed.fused is None
                    else packed.fused[block]
                )
                embeds = model.embed(packed.inputs[block], packed.positions[block])
                if perturb is not None:
                    which = torch.arange(block.start, block.stop, device=queries.device)
                    hidden_in, embeds = perturb(1, which, hidden_in, embeds)
                z, residual = layer.enter(hidden_in, embeds)
            else:
                z, residual = layer.enter(hidden[block], hidden[block])
            tables = model.rope.tables(packed.positions[block], z.dtype)
            k, v = layer.self_attn.keys_values(z, tables)
            keys.append(k)
            values.append(v)
            if self.probe is not None and hidden_in is not None and embeds is not None:
                inside = self.rows[(self.rows >= block.start) & (self.rows < block.stop)] - start
                inputs.append((hidden_in[inside], embeds[inside]))
            picked = queries[cuts[i] : cuts[i + 1]] - start
            whole = len(picked) == block.stop - block.start
            zs.append(z if whole else z[picked])
            residuals.append(residual if whole else residual[picked])
        self.prefix.append((_join(keys), _join(values)))
        if inputs:
            self.seen |= {"hidden": _join([h for h, _ in inputs]), "embeds": _join([e for _, e in inputs])}
        return _join(zs), _join(residuals)

    def _shared_inputs(
        self, layer: ChainLayer, queries: Tensor, shared: SharedRows, block_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Do the same with what several rows read made once; ``run_chains`` says when that is right."""
        model, packed = self.model, self.packed
        wanted = shared.reads[queries]
        keys, values, zs, residuals, places = [], [], [], [], []
        for start in range(0, len(shared.stands), block_rows):
            rows = shared.stands[start : start + block_rows]
            block = slice(start, start + len(rows))
            embeds = model.embed(packed.inputs[rows], packed.positions[rows])
            z, residual = layer.enter(model.fuse([t[block] for t in packed.taps]), embeds)
            k, v = layer.self_attn.keys_values(z, model.rope.tables(packed.positions[rows], z.dtype))
            keys.append(k)
            values.append(v)
            here = ((wanted >= start) & (wanted < block.stop)).nonzero().flatten()
            places.append(here)
            zs.append(z[wanted[here] - start])
            residuals.append(residual[wanted[here] - start])
        self.prefix.append((_join(keys)[shared.reads], _join(values)[shared.reads]))
        order = _join(places).argsort()
        return _join(zs)[order], _join(residuals)[order]

    def later(self, step: int, state: Tensor, perturb: Perturb | None) -> Tensor:
        """Run step ``step`` >= 2 from the fed-back ``state`` [R, H] and return the raw residual [R, H]."""
        model, packed = self.model, self.packed
        position = packed.positions[self.rows] + step - 1
        hidden, embeds = state, model.embed(packed.inputs[self.rows + step - 1], position)
        if perturb is not None:
            hidden, embeds = perturb(step, self.rows, hidden, embeds)
        if self.probe is not None:
            self.seen |= {"hidden": hidden, "embeds": embeds}
        tables = model.rope.tables(position, hidden.dtype)
        for layer in model.layers:
            z, residual = layer.enter(hidden, embeds)
            self.own[layer.index].append(layer.self_attn.keys_values(z, tables))
            hidden = layer.leave(z, residual, self.attend(layer, z, self.rows))
        return hidden

    def keep(self, which: Tensor) -> None:
        """Drop all chains but those at indices ``which``."""
        self.rows = self.rows[which]
        self.own = [[(k[which], v[which]) for k, v in layer] for layer in self.own]


def run_chains(
    model: ChainModel,
    packed: Packed,
    rows: Tensor,
    depth: int,
    on_step: OnStep,
    *,
    probe: Probe | None = None,
    perturb: Perturb | None = None,
    block_rows: int | None = None,
    backend: str = "auto",
) -> None:
    """Run chains of up to ``depth`` steps that hang on ``rows``; differentiable.

    A chain ends by itself where its sequence holds no token to compare the next step with.

    Args:
        model: the drafter.
        packed: sequences.
        rows: [R] int64 packed rows, ascending, each with a following row in its sequence.
        depth: k >= 1.
        on_step: receives every step; says which chains go on.
        probe: watches, for diagnosis.
        perturb: changes what a step reads, for diagnosis.
        block_rows: rows whose inputs are made at a time in step 1, to bound memory; None: all.
        backend: of ``chain_attention``.
    """
    assert depth >= 1
    # deeper layers read what attention brings, and probes and perturbations see every row
    alone = probe is None and perturb is None and model.config.num_layers == 1
    assert packed.shared is None or alone, "rows that share inputs: one layer, no probe, no perturbation"
    if rows.numel() == 0:
        return
    chains = _Chains(model, packed, rows, probe, backend)
    active = torch.arange(rows.shape[0], device=rows.device)
    state: Tensor | None = None
    for step in range(1, depth + 1):
        residual = chains.first(perturb, block_rows) if state is None else chains.later(step, state, perturb)
        post = model.norm(residual)
        state = model.feedback(residual, post)
        if probe is not None:
            probe.on_step(step, chains.seen | {"rows": chains.rows, "residual": residual, "state": state})
        keep = on_step(step, active, post)
        if step == depth:
            return
        alive = chains.rows + step + 1 <= packed.last[chains.rows]
        which = (alive if keep is None else alive & keep).nonzero().flatten()
        if which.numel() == 0:
            return
        if which.numel() < active.numel():
            chains.keep(which)
            active, state = active[which], state[which]


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
