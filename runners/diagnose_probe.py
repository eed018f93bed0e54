"""What is read off a drafter's chains while they run: sizes of states, where attention goes, what is fed back.

Regions of the keys a query sees, which together hold all of its attention:

* ``sink``: the position that prefill queries look at most;
* ``system``, ``markup``, ``user``, ``context``: by the prompt's spans (BOS and the generation prompt are markup);
* ``answer``: tokens of this and earlier answers;
* ``own``: positions the chain itself has made, but for the query's own;
* ``self``: the query's own position.

``recent_w`` is the last w positions, ``self`` included; it overlaps the others.

Example:
    watch = Watch(trace, taps=(2, 15, 27), sink=0, depth=8, num_layers=1)
    drafter.score([trace], ScoreRequest(depth=16, full_chains=True), probe=watch)
    watch.attention[1]["sink"].mean()        # share of the sink at step 1, [chains, heads]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench.types import RenderedPrompt, Trace

PREFIX_REGIONS = ("sink", "system", "markup", "user", "context", "answer")
REGIONS = (*PREFIX_REGIONS, "own", "self")
RECENT = (1, 4, 8)
ENTROPY = "entropy"
_KIND_REGION = {
    "bos": "markup",
    "generation": "markup",
    "markup": "markup",
    "system": "system",
    "user": "user",
    "context": "context",
    "assistant": "answer",
}
SINK_SEARCH = 64
"""Positions among which a sink is looked for, one by one."""
SINK_FLOOR = 0.05
"""Mean share below which no position is called a sink."""
_SINK_TIMES = 3.0
"""And how many times the share of a uniform query it must have."""


def rms(x: Tensor) -> Tensor:
    """||x||_2 / sqrt(d) over the last dimension, in float32."""
    return x.float().pow(2).mean(-1).sqrt()


def region_labels(prompt: RenderedPrompt, num_rows: int, sink: int) -> Tensor:
    """Return the number in ``PREFIX_REGIONS`` of each of the first ``num_rows`` positions, [num_rows] int64."""
    labels = torch.full((num_rows,), PREFIX_REGIONS.index("answer"), dtype=torch.int64)
    for span in prompt.spans:
        labels[span.start : span.end] = PREFIX_REGIONS.index(_KIND_REGION[span.kind])
    if sink < num_rows:
        labels[sink] = 0
    return labels


@dataclass(slots=True, kw_only=True)
class SinkSearch:
    """Finds the position that prefill queries look at most, over several prompts; itself a probe."""

    mass: Tensor = field(default_factory=lambda: torch.zeros(SINK_SEARCH, dtype=torch.float64))
    """[SINK_SEARCH] summed shares, head means."""
    uniform: Tensor = field(default_factory=lambda: torch.zeros(SINK_SEARCH, dtype=torch.float64))
    """[SINK_SEARCH] what uniform queries would have given."""
    count: int = 0
    labels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def regions(self) -> tuple[Tensor, int]:
        """One region for each of the first positions, one for all others."""
        return self.labels, SINK_SEARCH + 1

    def prepare(self, trace: Trace) -> None:
        """Take the next trace; it is then scored alone, to depth 1."""
        self.labels = torch.arange(len(trace.ids) - 1).clamp(max=SINK_SEARCH)

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Add the step-1 queries, which are those of a prefill over prompt and answer."""
        if step > 1:
            return
        rows = tensors["rows"].cpu()
        self.mass += tensors["mass"].double().mean(1).sum(0)[:SINK_SEARCH].cpu()
        seen = torch.arange(SINK_SEARCH) <= rows[:, None]
        self.uniform += (seen / (rows[:, None] + 1.0)).sum(0)
        self.count += len(rows)

    @property
    def position(self) -> int:
        """The position with the largest mean share."""
        return int(self.mass.argmax())

    @property
    def share(self) -> float:
        """Its mean share of prefill attention."""
        return float(self.mass.max()) / max(1, self.count)

    @property
    def found(self) -> bool:
        """Whether it stands out enough to be called a sink."""
        even = float(self.uniform[self.position]) / max(1, self.count)
        return self.share >= SINK_FLOOR and self.share >= _SINK_TIMES * even


class Watch:
    """Keeps sizes and attention of every step of one trace's chains; a probe, for one trace at a time.

    ``sizes[quantity]``: per step [R_j] RMS in float32, for ``tap_i`` and ``fused`` at step 1 only, ``raw`` (the
    residual before the final norm) and ``fed_back`` (what the next step reads) at every step.
    ``attention[step][name]``: [R_j, Hq] share of every region, ``recent_w`` and ``entropy`` (nats).
    """

    def __init__(self, trace: Trace, *, taps: Sequence[int], sink: int, depth: int) -> None:
        """Prepare for one trace.

        Args:
            trace: whose chains run.
            taps: ``hidden_states`` indices of the drafter.
            sink: position of the sink.
            depth: steps whose attention is kept.
        """
        self.trace, self.taps, self.depth = trace, tuple(taps), depth
        self.labels = region_labels(trace.prompt, len(trace.ids) - 1, sink)
        self.sizes: dict[str, dict[int, Tensor]] = {}
        self.attention: dict[int, dict[str, Tensor]] = {}
        self.control: dict[int, dict[str, Tensor]] = {}
        self.deviation = 0.0
        """Largest distance of a query's shares from summing to 1."""
        self._near: Tensor | None = None
        self._step = 0

    @property
    def regions(self) -> tuple[Tensor, int] | None:
        """Labels of the prefix, for the steps whose attention is kept."""
        return (self.labels, len(PREFIX_REGIONS)) if self._step < self.depth else None

    @property
    def recents(self) -> tuple[int, ...]:
        """At step 1 every width that some later step is compared with; then what reaches beyond the own keys."""
        step = self._step + 1
        if step == 1:
            return tuple(range(1, max(*RECENT, self.depth - 1) + 1))
        return tuple(w for w in RECENT if w > step - 1)

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Take in one step."""
        if step == 1:
            rows = tensors["rows"].cpu()
            for tap in self.taps:
                self._size(f"tap_{tap}", 1, self.trace.taps[tap][rows])
            self._size("fused", 1, tensors["hidden"])
        self._size("raw", step, tensors["residual"])
        self._size("fed_back", step, tensors["state"])
        if step <= self.depth:
            self._attend(step, tensors)
        self._step = step

    def _size(self, name: str, step: int, x: Tensor) -> None:
        self.sizes.setdefault(name, {})[step] = rms(x).cpu()

    def _attend(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        mass = tensors["mass"].float().cpu()
        recents = self.recents
        near = tensors["recent"].float().cpu() if recents else mass.new_zeros((*mass.shape[:2], 0))
        prefix, own = mass[..., : len(PREFIX_REGIONS)].clone(), mass[..., len(PREFIX_REGIONS) :]
        if step == 1:
            rows = tensors["rows"].cpu()
            self_share = near[..., 0]
            index = self.labels[rows][:, None, None].expand(-1, mass.shape[1], 1)
            prefix.scatter_add_(2, index, -self_share[..., None])
            prefix.clamp_(min=0)
            self._near = near
        else:
            self_share = own[..., -1]
        shares = dict(zip(PREFIX_REGIONS, prefix.unbind(-1), strict=True))
        shares |= {
            "own": own[..., :-1].sum(-1) if step > 1 else torch.zeros_like(self_share),
            "self": self_share,
        }
        total = sum(shares.values())
        assert isinstance(total, Tensor)
        self.deviation = max(self.deviation, float((total - 1).abs().max()))
        for w in RECENT:
            shares[f"recent_{w}"] = own[..., -w:].sum(-1) if step > 1 else torch.zeros_like(self_share)
            if w in recents:
                shares[f"recent_{w}"] = shares[f"recent_{w}"] + near[..., recents.index(w)]
        shares[ENTROPY] = tensors["entropy"].float().cpu()
        self.attention[step] = shares
        self.control[step] = self._control(step)

    def _control(self, step: int) -> dict[str, Tensor]:
        """Shares of step-1 queries at the positions where this step's queries stand, [R_j, Hq].

        A step-1 query sees the same number of positions, all of them made from the target's states; its last
        step-1 ones stand where the chain's own would.
        """
        assert self._near is not None
        here = slice(step - 1, None)
        first, near = self.attention[1], self._near[here]
        made = near[..., step - 2] if step > 1 else torch.zeros_like(near[..., 0])
        found = {"sink": first["sink"][here], "self": near[..., 0]}
        found["own"] = (made - near[..., 0]).clamp(min=0) if step > 1 else torch.zeros_like(near[..., 0])
        found |= {f"recent_{w}": near[..., w - 1] for w in RECENT}
        found[ENTROPY] = first[ENTROPY][here]
        return found


class Pin:
    """Rescales what is fed back to the RMS that the fused input had on the same row; a perturbation (no retraining)."""

    def __init__(self, num_rows: int) -> None:
        self.base = torch.zeros(num_rows)

    def __call__(self, step: int, rows: Tensor, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, embeds) [n, H]."""
        size = rms(hidden)
        if step == 1:
            self.base[rows.cpu()] = size.cpu()
            return hidden, embeds
        scale = self.base[rows.cpu()].to(size.device) / size.clamp(min=1e-12)
        return (hidden.float() * scale[:, None]).to(hidden.dtype), embeds


class OwnTokens:
    """Feeds every chain its own draft tokens instead of the target's: probe and perturbation of the same chains."""

    regions = None

    def __init__(self, model: Any, num_rows: int) -> None:
        """Prepare.

        Args:
            model: an ``Eagle3Model`` or what has the same ``target_ids`` and ``embed``.
            num_rows: packed rows of the traces that are scored.
        """
        self.model = model
        self.tokens = torch.zeros(num_rows, dtype=torch.int64)
        """The newest draft token of the chain that hangs on each row."""

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """See nothing: what counts is drafted after it."""

    def on_drafts(self, rows: Tensor, draft_ids: Tensor) -> None:
        """Keep what each chain proposes."""
        self.tokens[rows.cpu()] = self.model.target_ids[draft_ids].cpu()

    def __call__(self, step: int, rows: Tensor, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, embeds) with the embeddings of the chains' own tokens from step 2 on."""
        if step == 1:
            return hidden, embeds
        return hidden, self.model.embed(self.tokens[rows.cpu()].to(embeds.device)).to(embeds.dtype)


class Chain:
    """Keeps where one chain's queries look, position by position; a probe for one trace."""

    def __init__(self, trace: Trace, row: int, depth: int) -> None:
        """Prepare.

        Args:
            trace: whose chains run.
            row: the position that the chain hangs on.
            depth: steps to keep.
        """
        self.row, self.depth = row, depth
        self.labels = torch.arange(len(trace.ids) - 1)
        self.mass: list[Tensor] = []
        """Per step [row + step] head-mean shares of positions 0 .. row + step - 1."""
        self._step = 0

    @property
    def regions(self) -> tuple[Tensor, int] | None:
        """A region for every position."""
        return (self.labels, len(self.labels)) if self._step < self.depth else None

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the chain's row."""
        self._step = step
        where = (tensors["rows"].cpu() == self.row).nonzero().flatten()
        if step > self.depth or not len(where):
            return
        mass = tensors["mass"][int(where[0])].float().mean(0).cpu()
        own = mass[len(self.labels) :]
        self.mass.append(torch.cat((mass[: self.row + 1], own)))
