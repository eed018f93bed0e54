"""A second EAGLE-3, written from the engines' semantics: one position at a time, plain lists, no shared code.

Used by the tests as the judge of ``chains`` and of the session. Takes weights by name from a state dict.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate one head's vector: component i is paired with i + D/2."""
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[0])
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


class Naive:
    """``config`` is read by attribute; ``w`` maps names to float64 tensors."""

    def __init__(
        self,
        config: Any,
        w: dict[str, torch.Tensor],
        embed: torch.Tensor,
        head: torch.Tensor,
        sink: tuple[int, int],
    ):
        self.c, self.w, self.sink = config, w, sink
        self.embed, self.head = embed, head
        self.cache: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = [
            [] for _ in range(config.num_layers)
        ]

    def fuse(self, taps: list[torch.Tensor]) -> torch.Tensor:
        c, w = self.c, self.w
        x = torch.cat(taps)
        if c.norm_joint:
            x = rms(x, w["input_norm.weight"], c.rms_norm_eps)
        if c.norm_per_tap:
            n = c.target_hidden_size
            x = torch.cat(
                [
                    rms(x[i * n : (i + 1) * n], w[f"fc_norm.{i}.weight"], c.rms_norm_eps)
                    for i in range(len(taps))
                ]
            )
        if c.fc:
            x = w["fc.weight"] @ x
            if c.fc_bias:
                x = x + w["fc.bias"]
        return x

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def heads(self, layer: int, which: str, x: torch.Tensor) -> list[torch.Tensor]:
        name = f"layers.{layer}.self_attn.{which}"
        parts = list(self.linear(f"{name}_proj", x).split(self.c.head_dim))
        if self.c.qk_norm and which in "qk":
            parts = [rms(p, self.w[f"{name}_norm.weight"], self.c.rms_norm_eps) for p in parts]
        return parts

    def forward(self, token: int, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One row through all layers; its keys stay in the cache. Returns (pre, post)."""
        c, w = self.c, self.w
        theta = float(c.rope["rope_theta"])
        h = hidden
        for layer in range(c.num_layers):
            prefix = f"layers.{layer}."
            if layer == 0:
                hn = rms(h, w[prefix + "hidden_norm.weight"], c.rms_norm_eps)
                z = torch.cat(
                    [rms(self.embed[token], w[prefix + "input_layernorm.weight"], c.rms_norm_eps), hn]
                )
                res = hn if c.norm_before_residual else h
            else:
                z, res = rms(h, w[prefix + "input_layernorm.weight"], c.rms_norm_eps), h
            keys = torch.stack([turn(k, position, theta) for k in self.heads(layer, "k", z)])
            values = torch.stack(self.heads(layer, "v", z))
            self.cache[layer].append((position, keys, values))
            window = c.windows[layer] if layer < len(c.windows) else None
            group = c.num_heads // c.num_kv_heads
            outs = []
            for i, q in enumerate(self.heads(layer, "q", z)):
                scores, seen = [], []
                for p, k, v in self.cache[layer]:
                    near = window is None or p > position - window
                    if not near and not self.sink[0] <= p < self.sink[1]:
                        continue
                    at = position
                    if not near and c.positions == "repacked":
                        # the visible sinks directly precede the window: slot of this key and of the query
                        slots = [
                            x
                            for x in range(position + 1)
                            if x > position - window or self.sink[0] <= x < self.sink[1]
                        ]
                        at = p + slots.index(position) - slots.index(p)
                    scores.append(torch.dot(turn(q, at, theta), k[i // group]) / math.sqrt(c.head_dim))
                    seen.append(v[i // group])
                outs.append((torch.softmax(torch.stack(scores), 0)[:, None] * torch.stack(seen)).sum(0))
            out = torch.cat(outs)
            if c.gate:
                out = out * torch.sigmoid(self.linear(prefix + "self_attn.g_proj", z))
            res = res + self.linear(prefix + "self_attn.o_proj", out)
            x = rms(res, w[prefix + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate = self.linear(prefix + "mlp.gate_proj", x)
            h = res + self.linear(
                prefix + "mlp.down_proj", gate * torch.sigmoid(gate) * self.linear(prefix + "mlp.up_proj", x)
            )
        return h, rms(h, w["norm.weight"], c.rms_norm_eps)

    def logits(self, post: torch.Tensor) -> torch.Tensor:
        return (self.head @ post) * self.c.logit_scale

    def chain(
        self,
        ids: list[int],
        taps: list[torch.Tensor],
        n: int,
        depth: int,
        feed: list[int] | None,
        target_ids: list[int],
    ) -> list[torch.Tensor]:
        """Logits [Vd] of every step of the round whose newest token is ids[n].

        ``taps[i][p]``; steps after the first read ``feed`` (teacher) or their own best token (None).
        """
        self.cache = [[] for _ in range(self.c.num_layers)]
        for p in range(n):
            pre, post = self.forward(ids[p + 1], self.fuse([t[p] for t in taps]), p)
        steps = [self.logits(post)]
        for j in range(2, depth + 1):
            if feed is not None and j - 2 >= len(feed):
                break
            token = feed[j - 2] if feed is not None else target_ids[int(steps[-1].argmax())]
            state = post if self.c.feedback == "post" else pre
            pre, post = self.forward(token, state, n - 1 + (j - 1))
            steps.append(self.logits(post))
        return steps
