"""Batched forward passes of a Hugging Face causal LM over preallocated key-value slots.

All sequences of a pass lie back to back in one row of tokens (no padding), whatever their lengths; attention is the
only operation that must know where one ends, so the engine replaces the model's attention function by one that
writes keys and values into slots and attends per sequence. A prefill, a decode step of many sequences and the
verification of draft tokens are then the same call.

Sequences that begin alike may share a :class:`Prefix`: its keys, values and taps are computed and held once, and the
slots hold only what follows it.

Example:
    engine = Engine(model, num_slots=2, max_length=256, taps=(2, 4))
    out = engine.forward([Segment(slot=0, start=0, ids=[1, 15, 27])], logits_at=[2])
    out.logits.shape, out.taps[2].shape   # (1, V), (3, H)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.errors import UserError

ATTENTION_NAME = "specbench_slots"
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


class UnsupportedModelError(Exception):
    """The model's layers hold state that key-value slots cannot express; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """New tokens of one sequence: they take positions ``start .. start + len(ids) - 1`` of ``slot``."""

    slot: int
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What one pass gives, in the order of the packed tokens."""

    logits: Tensor
    """[len(logits_at), V] float32."""
    taps: dict[int, Tensor]
    """tap index -> [total tokens, H]."""


@dataclass(slots=True)
class _Rows:
    """Rows of a single-token batch whose sequences share a prefix, or have none."""

    prefix: Prefix | None
    rows: slice | Tensor
    """Their places in the batch, as a slice where they are all."""
    slots: slice | Tensor
    """Their slots, as a slice where they are 0..n-1."""
    positions: Tensor
    longest: int
    """Positions that the longest of them fills in its slot."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[n, prefix + longest] bool: which keys each row sees."""
        if window not in self.masks:
            before = 0 if self.prefix is None else self.prefix.length
            self.masks[window] = _visible(self.positions, before + self.longest, window)
        return self.masks[window]


@dataclass(slots=True)
class _Batch:
    """Where each packed token belongs, for the attention function."""

    engine: Engine
    segments: Sequence[Segment]
    slots: Tensor
    positions: Tensor
    """[total] position of each packed token in its own sequence."""
    places: Tensor
    """[total] the same, counted from the start of the slot."""
    groups: Sequence[_Rows]
    """Where every segment brings exactly one token: batched attention calls serve all. Else empty."""


_ACTIVE: _Batch | None = None


def _visible(query_positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """[len(query_positions), num_keys] bool: causal, limited to the last ``window`` positions."""
    keys = torch.arange(num_keys, device=query_positions.device)
    distance = query_positions[:, None] - keys[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over slots. query [1, Hq, T, D]; key, value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    batch = _ACTIVE
    assert batch is not None, "the slot attention runs inside Engine.forward only"
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"its attention uses {name!r}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    keys, values = batch.engine.layer_cache(layer, key)
    num_kv = key.shape[1]
    group = query.shape[1] // num_kv
    keys[batch.slots, :, batch.places] = key[0].transpose(0, 1)
    values[batch.slots, :, batch.places] = value[0].transpose(0, 1)
    if batch.groups:
        total, dim = query.shape[2], query.shape[3]
        # the query heads of a group are rows of one matrix product with their shared key head: nothing is repeated
        rows = query[0].transpose(0, 1).reshape(total, num_kv, group, dim)
        if len(batch.groups) == 1:
            out = _attend_rows(batch.groups[0], layer, rows, keys, values, scaling, sliding_window)
        else:
            out = torch.empty_like(rows)
            for some in batch.groups:
                out[some.rows] = _attend_rows(
                    some, layer, rows[some.rows], keys, values, scaling, sliding_window
                )
        return out.reshape(1, total, num_kv * group, dim), None
    out = torch.empty_like(query)
    offset = 0
    for segment in batch.segments:
        size = len(segment.ids)
        here = slice(offset, offset + size)
        length = segment.start + size
        prefix = batch.engine.prefix_of(segment.slot)
        own = length if prefix is None else length - prefix.length
        seen_k = keys[segment.slot, None, :, :own]
        seen_v = values[segment.slot, None, :, :own]
        if prefix is not None:
            first_k, first_v = prefix.layer(layer)
            seen_k = torch.cat([first_k, seen_k], dim=2)
            seen_v = torch.cat([first_v, seen_v], dim=2)
        plain = segment.start == 0 and (sliding_window is None or length <= sliding_window)
        mask = None if plain else _visible(batch.positions[here], length, sliding_window)
        out[:, :, here] = F.scaled_dot_product_attention(
            query[:, :, here], seen_k, seen_v, attn_mask=mask, is_causal=plain, scale=scaling,
            enable_gqa=group > 1,
        )  # fmt: skip
        offset += size
    return out.transpose(1, 2), None


def _attend_rows(
    some: _Rows,
    layer: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of one token per sequence. query [n, Hkv, group, D] -> the same shape."""
    own_k = keys[some.slots, :, : some.longest]
    own_v = values[some.slots, :, : some.longest]
    mask = some.mask(window)
    if some.prefix is None:
        return F.scaled_dot_product_attention(
            query, own_k, own_v, attn_mask=mask[:, None, None, :], scale=scaling
        )
    first_k, first_v = (tensor[0].float() for tensor in some.prefix.layer(layer))
    n, num_kv, group, dim = query.shape
    # every row meets the shared keys in one product and its own in another; one softmax runs over both. In float32
    # throughout, as fused attention accumulates
    rows = query.float() * (dim**-0.5 if scaling is None else scaling)
    far = rows.transpose(0, 1).reshape(num_kv, n * group, dim) @ first_k.transpose(1, 2)
    if window is not None:
        hidden = ~mask[:, : some.prefix.length].repeat_interleave(group, dim=0)
        far = far.masked_fill(hidden, -torch.inf)
    near = rows @ own_k.float().transpose(2, 3)
    near = near.masked_fill(~mask[:, None, None, some.prefix.length :], -torch.inf)
    near = near.transpose(0, 1).reshape(num_kv, n * group, some.longest)
    weights = torch.cat([far, near], dim=-1).softmax(dim=-1)
    shared = (weights[..., : some.prefix.length] @ first_v).view(num_kv, n, group, dim)
    own = weights[..., some.prefix.length :].reshape(num_kv, n, group, some.longest)
    out: Tensor = shared.transpose(0, 1) + own.transpose(0, 1) @ own_v.float()
    return out.to(query.dtype)


def decoder_layers(model: Any) -> tuple[torch.nn.ModuleList, torch.nn.Module]:
    """Return the model's block list and the norm behind it.

    Raises:
        UserError: the model does not expose them where Hugging Face decoders do.
    """
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers:
            parent = model.get_submodule(name.rpartition(".")[0])
            for norm_name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
                if hasattr(parent, norm_name):
                    return module, getattr(parent, norm_name)
    raise UserError(
        f"no list of {config.num_hidden_layers} decoder blocks with a final norm in {type(model).__name__}"
    )


class TapRecorder:
    """Hooks that keep ``hidden_states[i]`` for the chosen indices and for nothing else.

    Index i < n is the residual stream entering block i (0: the embeddings); index n is the stream leaving the last
    block, before the final norm, as serving engines number it.
    """

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        layers, norm = decoder_layers(model)
        for tap in taps:
            if not 0 <= tap <= len(layers):
                raise UserError(f"tap {tap} does not exist: the target has hidden states 0 to {len(layers)}")
        self.states: dict[int, Tensor] = {}
        self._handles = [
            (layers[tap] if tap < len(layers) else norm).register_forward_pre_hook(
                self._hook(tap), with_kwargs=True
            )
            for tap in taps
        ]

    def _hook(self, tap: int) -> Any:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states[tap] = args[0] if args else kwargs["hidden_states"]

        return keep

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class Engine:
    """Runs a model over ``num_slots`` sequences of up to ``max_length`` tokens each.

    Raises:
        UnsupportedModelError: the model has layers that key-value slots cannot express (recurrent state, ...).
    """

    def __init__(self, model: Any, *, num_slots: int, max_length: int, taps: Sequence[int] = ()) -> None:
        config = model.config.get_text_config()
        odd = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
        if odd:
            raise UnsupportedModelError(f"it has {', '.join(sorted(odd))} layers")
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _slot_attention)
        self.model = model
        self.num_slots = num_slots
        self.max_length = max_length
        self.taps = tuple(taps)
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._taps: dict[int, Tensor] = {}
        self._prefixes: dict[int, Prefix] = {}

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Say what the slot's next sequence begins with; its own tokens start behind that."""
        self._prefixes.pop(slot, None)
        if prefix is not None:
            self._prefixes[slot] = prefix

    def prefix_of(self, slot: int) -> Prefix | None:
        """What the slot's sequence shares with others."""
        return self._prefixes.get(slot)

    def _own(self, slot: int, length: int) -> int:
        """Of a sequence's first ``length`` positions, those that lie in the slot itself."""
        prefix = self._prefixes.get(slot)
        return length if prefix is None else length - prefix.length

    def layer_cache(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, Hkv, max_length, D]; made on first use on the layer's own device."""
        if layer not in self._cache:
            shape = (self.num_slots, like.shape[1], self.max_length, like.shape[3])
            # zeros and not empty: a masked garbage NaN would still poison a weighted sum
            self._cache[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._cache[layer]

    @torch.no_grad()
    def forward(self, segments: Sequence[Segment], *, logits_at: Sequence[int] | Tensor) -> ForwardOutput:
        """Run one pass over the segments' tokens, back to back.

        Args:
            segments: new tokens per sequence; earlier positions of a slot must be filled, later ones are overwritten.
            logits_at: indices into the packed tokens whose next-token logits are wanted.
        """
        global _ACTIVE
        device = self.model.get_input_embeddings().weight.device
        ids = torch.tensor([i for s in segments for i in s.ids], device=device)
        positions = torch.cat([torch.arange(s.start, s.start + len(s.ids), device=device) for s in segments])
        starts = [self._own(s.slot, s.start) for s in segments]
        assert min(starts) >= 0, "a sequence's own tokens start behind its prefix"
        ends = [start + len(s.ids) for start, s in zip(starts, segments, strict=True)]
        assert max(ends) <= self.max_length, "a sequence outgrew its slot"
        places = torch.cat([torch.arange(a, b, device=device) for a, b in zip(starts, ends, strict=True)])
        lengths = torch.tensor([len(s.ids) for s in segments], device=device)
        slots = torch.tensor([s.slot for s in segments], device=device).repeat_interleave(lengths)
        single = all(len(s.ids) == 1 for s in segments)
        batch = _Batch(
            engine=self,
            segments=segments,
            slots=slots,
            positions=positions,
            places=places,
            groups=self._groups(segments, slots, positions, ends) if single else (),
        )
        recorder = TapRecorder(self.model, self.taps)
        previous = self.model.config._attn_implementation
        self.model.config._attn_implementation = ATTENTION_NAME
        _ACTIVE = batch
        try:
            keep = torch.as_tensor(logits_at, device=device, dtype=torch.long)
            out = self.model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep
            )
        finally:
            _ACTIVE = None
            self.model.config._attn_implementation = previous
            recorder.close()
        taps = {tap: state[0] for tap, state in recorder.states.items()}
        for tap, state in taps.items():
            self._tap_cache(tap, state)[slots.to(state.device), places.to(state.device)] = state
        return ForwardOutput(logits=out.logits[0].float(), taps=taps)

    def _groups(
        self, segments: Sequence[Segment], slots: Tensor, positions: Tensor, ends: Sequence[int]
    ) -> list[_Rows]:
        """Sort the rows of a single-token batch by what their sequences begin with."""
        members: dict[Prefix | None, list[int]] = {}
        for row, segment in enumerate(segments):
            members.setdefault(self._prefixes.get(segment.slot), []).append(row)
        groups = []
        for prefix, rows in members.items():
            everything = len(rows) == len(segments)
            index = torch.tensor(rows, device=slots.device)
            in_order = everything and all(s.slot == i for i, s in enumerate(segments))
            groups.append(
                _Rows(
                    prefix=prefix,
                    rows=slice(None) if everything else index,
                    slots=slice(0, len(rows)) if in_order else slots[index],
                    positions=positions[index],
                    longest=max(ends[row] for row in rows),
                )
            )
        return groups

    def _tap_cache(self, tap: int, like: Tensor) -> Tensor:
        if tap not in self._taps:
            self._taps[tap] = like.new_zeros(self.num_slots, self.max_length, like.shape[-1])
        return self._taps[tap]

    def slot_taps(self, slot: int, length: int) -> dict[int, Tensor]:
        """Copies of a sequence's taps at positions 0..length-1: tap index -> [length, H]."""
        own = self._own(slot, length)
        prefix = self._prefixes.get(slot)
        if prefix is None:
            return {tap: states[slot, :own].clone() for tap, states in self._taps.items()}
        return {tap: torch.cat([prefix.taps[tap], states[slot, :own]]) for tap, states in self._taps.items()}

    def move(self, source: int, to: int, length: int) -> None:
        """Move a sequence of ``length`` positions over another slot, so that busy slots stay contiguous."""
        own = self._own(source, length)
        for keys, values in self._cache.values():
            keys[to, :, :own] = keys[source, :, :own]
            values[to, :, :own] = values[source, :, :own]
        for states in self._taps.values():
            states[to, :own] = states[source, :own]
        self.begin(to, self._prefixes.pop(source, None))


class Prefix:
    """Tokens that several sequences begin with; computed on creation, never changed.

    Example: ``engine.begin(3, Prefix(model, ids, taps=engine.taps))``, then segments of slot 3 from ``len(ids)`` on.
    """

    def __init__(
        self, model: Any, ids: Sequence[int], *, taps: Sequence[int] = (), chunk: int = 2048
    ) -> None:
        """Run the tokens.

        Args:
            model: that of the engine which uses the prefix.
            ids: at least one token.
            taps: those of the engine which uses the prefix.
            chunk: tokens of a pass, at most.
        """
        self.length = len(ids)
        self._engine = Engine(model, num_slots=1, max_length=self.length, taps=taps)
        for start in range(0, self.length, chunk):
            piece = ids[start : start + chunk]
            self._engine.forward([Segment(slot=0, start=start, ids=piece)], logits_at=[len(piece) - 1])

    @property
    def taps(self) -> dict[int, Tensor]:
        """Views of what the taps hold: tap index -> [length, H]."""
        return {tap: states[0] for tap, states in self._engine._taps.items()}

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [1, Hkv, length, D]."""
        return self._engine._cache[layer]
