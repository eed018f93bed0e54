"""A second DFlash, written from the engine's semantics: one position at a time, plain lists, no shared code.

Used by the tests as the judge of the packed computation, of the session and of the checkpoint layout: it reads
config.json and tensors under their published names.
"""

from __future__ import annotations

from typing import Any

import torch

from .eagle3_reference import rms, turn


class NaiveDFlash:
    """``config`` is a published config.json; ``w`` maps published names to float64 tensors."""

    def __init__(
        self, config: dict[str, Any], w: dict[str, torch.Tensor], embed: torch.Tensor, head: torch.Tensor
    ) -> None:
        self.c, self.w, self.embed, self.head = config, w, embed, head
        self.eps = config["rms_norm_eps"]
        self.dim = config["head_dim"]
        self.own = config["dflash_config"]
        self.defect = False

    def project(self, layer: int, which: str, x: torch.Tensor) -> list[torch.Tensor]:
        name = f"layers.{layer}.self_attn.{which}_proj"
        y = self.w[f"{name}.weight"] @ x
        if f"{name}.bias" in self.w:
            y = y + self.w[f"{name}.bias"]
        return list(y.split(self.dim))

    def key(self, layer: int, x: torch.Tensor, position: int, norm_layer: int) -> list[torch.Tensor]:
        weight = self.w[f"layers.{norm_layer}.self_attn.k_norm.weight"]
        theta = self.c["rope_theta"]
        return [turn(rms(h, weight, self.eps), position, theta) for h in self.project(layer, "k", x)]

    def value(self, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        return [h * self.own.get("attention_value_scale", 1.0) for h in self.project(layer, "v", x)]

    def visible(self, layer: int, query: int, key: int) -> bool:
        kinds = self.c.get("layer_types")
        sliding = kinds is not None and kinds[layer] == "sliding_attention"
        causal = self.own.get("causal", sliding)
        if causal and key > query:
            return False
        return not sliding or key > query - self.c["sliding_window"]

    def attend(self, layer: int, query: int, q: list[torch.Tensor], keys: Any, values: Any) -> torch.Tensor:
        group = len(q) // len(keys[0][1])
        out = []
        for h, vector in enumerate(q):
            seen = [(i, k[h // group]) for i, (p, k) in enumerate(keys) if self.visible(layer, query, p)]
            scores = torch.stack([vector @ k * self.dim**-0.5 for _, k in seen])
            law = scores.softmax(0)
            out.append(sum(w * values[i][h // group] for w, (i, _) in zip(law, seen, strict=True)))
        y: torch.Tensor = self.w[f"layers.{layer}.self_attn.o_proj.weight"] @ torch.cat(out)  # type: ignore[arg-type]
        bias = self.w.get(f"layers.{layer}.self_attn.o_proj.bias")
        return y if bias is None else y + bias

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.w[f"layers.{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        out: torch.Tensor = down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
        return out

    def block(self, taps: list[list[torch.Tensor]], newest: int, masks: int) -> torch.Tensor:
        """Logits [masks, Vd] of one block; ``taps[p]`` are the states of verified position p, shallow first."""
        n = len(taps)
        context = [
            rms(self.w["fc.weight"] @ torch.cat(t), self.w["hidden_norm.weight"], self.eps) for t in taps
        ]
        rows = [self.embed[newest]] + [self.embed[self.own["mask_token_id"]]] * masks
        for layer in range(self.c["num_hidden_layers"]):
            norm_layer = 0 if self.defect else layer
            keys = [(p, self.key(layer, x, p, norm_layer)) for p, x in enumerate(context)]
            values = [self.value(layer, x) for x in context]
            name = f"layers.{layer}"
            zs = [rms(x, self.w[f"{name}.input_layernorm.weight"], self.eps) for x in rows]
            keys += [(n + i, self.key(layer, z, n + i, layer)) for i, z in enumerate(zs)]
            values += [self.value(layer, z) for z in zs]
            new = []
            for i, (x, z) in enumerate(zip(rows, zs, strict=True)):
                weight = self.w[f"{name}.self_attn.q_norm.weight"]
                q = [
                    turn(rms(h, weight, self.eps), n + i, self.c["rope_theta"])
                    for h in self.project(layer, "q", z)
                ]
                x = x + self.attend(layer, n + i, q, keys, values)
                new.append(
                    x + self.mlp(layer, rms(x, self.w[f"{name}.post_attention_layernorm.weight"], self.eps))
                )
            rows = new
        posts = [rms(x, self.w["norm.weight"], self.eps) for x in rows[1:]]
        return torch.stack([self.head @ p for p in posts])
