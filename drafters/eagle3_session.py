"""A chain drafter (EAGLE-3, MTP heads) following one answer online, one round at a time, with a KV cache of its own.

Deliberately independent of ``chains``: plain attention over the cache, no packing, so that each judges the
other.

Example:
    session = Eagle3Session(model, bos_id=1)
    session.observe(prompt_ids + [first], taps)          # taps of positions 0..P-1
    tokens = session.propose(depth=4).tokens
    session.observe(tokens[:2] + [bonus], taps_of_3_positions)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.chains import ChainLayer, ChainModel, sink_span
from specbench.drafters.modules import rotate
from specbench.types import Proposal


class _Cache:
    """Keys and values of one layer, in buffers that double."""

    def __init__(self) -> None:
        self.length = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> None:
        need = self.length + k.shape[0]
        if need > self.keys.shape[0]:
            size = max(256, 2 * need)
            keys, values = k.new_empty((size, *k.shape[1:])), v.new_empty((size, *v.shape[1:]))
            if self.length:
                keys[: self.length], values[: self.length] = (
                    self.keys[: self.length],
                    self.values[: self.length],
                )
            self.keys, self.values = keys, values
        self.keys[self.length : need], self.values[self.length : need] = k, v
        self.length = need


class Eagle3Session:
    """Implements ``DraftSession``: verified positions are rebuilt from taps, drafts are dropped."""

    def __init__(self, model: ChainModel, bos_id: int | None, system: tuple[int, int] | None = None) -> None:
        """Start with nothing seen.

        Args:
            model: the drafter.
            bos_id: of the target, for ``sink=bos``.
            system: the system-prompt span, for ``sink=system``.
        """
        self.model = model
        self.bos_id, self.system = bos_id, system
        self.tokens: list[int] = []
        self.pending: list[tuple[Tensor, ...]] = []
        self.num_rows = 0
        self.caches = [_Cache() for _ in range(model.config.num_layers)]
        self.sink: tuple[int, int] | None = None
        self.residual: Tensor | None = None

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """Take in committed tokens and the taps of newly verified positions; see ``DraftSession``."""
        if self.sink is None:
            prompt = list(token_ids)[:-1]
            self.sink = sink_span(self.model.config, prompt, self.bos_id, self.system)
        self.tokens += [int(i) for i in token_ids]
        self.pending.append(tuple(taps[i].to(self.model.device) for i in self.model.config.taps))

    @torch.inference_mode()
    def propose(
        self, depth: int, generator: torch.Generator | None = None, temperature: float = 0.0
    ) -> Proposal:
        """Draft ``depth`` tokens; see ``DraftSession``."""
        if self.pending:
            self._catch_up()
        assert self.residual is not None, "observe() comes before propose()"
        assert self.num_rows == len(self.tokens) - 1, "every committed token but the newest needs its taps"
        residual = self.residual
        post = self.model.norm(residual)
        lengths = [cache.length for cache in self.caches]
        tokens: list[int] = []
        laws: list[Tensor] = []
        for step in range(1, depth + 1):
            if step > 1:
                token = torch.tensor(tokens[-1:], device=self.model.device)
                state = self.model.feedback(residual, post)
                residual = self._run(state, token, self.num_rows + step - 2)[-1:]
                post = self.model.norm(residual)
            token_id, law = self._choose(self.model.logits(post)[0], generator, temperature)
            tokens.append(token_id)
            if law is not None:
                laws.append(law)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length
        return Proposal(tokens=tokens, probs=torch.stack(laws) if laws else None)

    def _choose(self, logits: Tensor, generator: Any, temperature: float) -> tuple[int, Tensor | None]:
        """Return a target token id and, where it was drawn, the law [V] it was drawn from."""
        ids = self.model.target_ids
        if generator is None or temperature == 0.0:
            return int(ids[logits.argmax()]), None
        law = torch.softmax(logits.float() / temperature, dim=-1)
        drawn = torch.multinomial(law.to(generator.device), 1, generator=generator)
        full = law.new_zeros(self.model.config.vocab_size)
        full[ids] = law
        return int(ids[drawn.to(ids.device)]), full

    def _catch_up(self) -> None:
        """Turn pending taps into cached keys, and keep the newest row's residual."""
        taps = [torch.cat(column) for column in zip(*self.pending, strict=True)]
        self.pending = []
        count = taps[0].shape[0]
        inputs = torch.tensor(
            self.tokens[self.num_rows + 1 : self.num_rows + 1 + count], device=self.model.device
        )
        assert inputs.shape[0] == count, "taps of positions whose next token is unknown"
        self.residual = self._run(self.model.fuse(taps), inputs, self.num_rows)[-1:]
        self.num_rows += count

    def _run(self, hidden: Tensor, token_ids: Tensor, start: int) -> Tensor:
        """Run all layers over rows at ``start``..; return the residual stream (at least the last row)."""
        positions = torch.arange(start, start + hidden.shape[0], device=hidden.device)
        embeds = self.model.embed(token_ids, positions)
        tables = self.model.rope.tables(positions, hidden.dtype)
        for layer in self.model.layers:
            z, residual = layer.enter(hidden, embeds)
            self.caches[layer.index].append(*layer.self_attn.keys_values(z, tables))
            if layer.index == self.model.config.num_layers - 1:
                z, residual, positions = z[-1:], residual[-1:], positions[-1:]
            hidden = layer.leave(z, residual, self._attend(layer, z, positions))
        return hidden

    def _attend(self, layer: ChainLayer, z: Tensor, positions: Tensor) -> Tensor:
        """Return attention outputs [n, Hq, D] of queries at ``positions`` over the layer's cache."""
        config, cache = self.model.config, self.caches[layer.index]
        window = config.window(layer.index)
        raw = layer.self_attn.queries(z)
        group = config.num_heads // config.num_kv_heads
        keys = cache.keys[: cache.length].repeat_interleave(group, dim=1)
        values = cache.values[: cache.length].repeat_interleave(group, dim=1)

        def scores(query_positions: Tensor) -> Tensor:
            q = rotate(raw, self.model.rope.tables(query_positions, z.dtype))
            products: Tensor = torch.einsum("qhd,khd->hqk", q, keys).float() * config.head_dim**-0.5
            return products

        where = torch.arange(cache.length, device=z.device)
        visible = where <= positions[:, None]
        logits = scores(positions)
        if window is not None:
            assert self.sink is not None
            near = where > positions[:, None] - window
            sink = (where >= self.sink[0]) & (where < self.sink[1])
            if config.positions == "repacked":
                moved = scores(
                    torch.minimum(positions, torch.full_like(positions, self.sink[1] + window - 1))
                )
                logits = torch.where(sink & ~near, moved, logits)
            visible = visible & (near | sink)
        weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1).to(values.dtype)
        out: Tensor = torch.einsum("hqk,khd->qhd", weights, values)
        return out
