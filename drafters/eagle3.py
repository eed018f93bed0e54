"""The EAGLE-3 family as one module with orthogonal switches.

``eagle3.1`` is ``feedback="post", norm_per_tap=True``; ``eagle3-gated`` is ``gate=True, norm_per_tap=True``;
any other combination is as good. The module holds the parts of a step; ``chains.run_chains`` puts them
together, for scoring and for training alike.

Example:
    config = Eagle3Config(hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
                          vocab_size=49152, draft_vocab_size=4096, target_hidden_size=576, taps=(2, 15, 27),
                          rope={"rope_type": "default", "rope_theta": 1e5}, max_positions=8192,
                          feedback="post")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specbench.drafters.config import DrafterConfig, Head, target_facts
from specbench.drafters.modules import MLP, Attention, DrafterModel, RMSNorm, Rope, linear
from specbench.errors import UserError
from specbench.types import TargetInfo, TargetWeights

Feedback = Literal["pre", "post"]
Sink = Literal["none", "bos", "first4", "system"]
Positions = Literal["absolute", "repacked"]


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the taps (2, n // 2, n - 3) that published EAGLE-3 code uses where a checkpoint names none.

    Raises:
        UserError: the target is so shallow that two of them fall together.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if len(set(taps)) < 3 or min(taps) < 0 or sorted(taps) != list(taps):
        raise UserError(
            f"the default taps (2, n//2, n-3) are {taps} for a target of {num_layers} layers, which are not "
            "three ascending ones; name the taps in eagle_aux_hidden_state_layer_ids"
        )
    return taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """Sizes and switches of one drafter, named our way; ``checkpoints`` translates published keys."""

    num_layers: int = 1
    """Only layer 0 sees the token's embedding."""
    feedback: Feedback = "pre"
    """What the next step receives: the raw residual, or the final norm's output (which gives the logits)."""
    norm_per_tap: bool = False
    """One RMSNorm per tap before ``fc`` (``fc_norm``)."""
    norm_joint: bool = False
    """One RMSNorm over all taps before ``fc`` (``norm_before_fc``); applied first where both are set."""
    norm_before_residual: bool = False
    """The residual starts from the normed hidden state."""
    gate: bool = False
    """Attention output *= sigmoid(Wg z), elementwise, before ``o_proj``; z is the layer's input."""
    fc: bool = True
    """False: the single tap is the hidden state itself."""
    fc_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """Per layer: keys a query sees, its own included; None or no entry: all."""
    sink: Sink = "none"
    """Positions that stay visible in spite of the window."""
    positions: Positions = "absolute"
    """``repacked``: a sink outside the window is seen as if it directly preceded the window."""
    head: Head = "own"
    rms_norm_eps: float = 1e-5
    trained_depth: int | None = None

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if not self.fc and (len(self.taps) != 1 or self.target_hidden_size != self.hidden_size):
            raise UserError("without fc a drafter takes exactly one tap of its own width")
        if self.sink != "none" and not any(self.windows):
            raise UserError(f"sink={self.sink} has no effect without a window; add window=N")
        if self.positions == "repacked" and self.sink == "none":
            raise UserError("positions=repacked has no effect without a sink; add sink=bos, first4 or system")
        if any(w is not None and w < 1 for w in self.windows):
            raise UserError(f"window must be at least 1, not {self.windows}")

    @classmethod
    def for_target(
        cls, info: TargetInfo, *, taps: tuple[int, ...] | None = None, **sizes: Any
    ) -> Eagle3Config:
        """Return a configuration whose target-side facts (width, vocabulary, taps, RoPE) come from it.

        Args:
            info: the target.
            taps: default: ``default_taps``.
            **sizes: every other field; num_heads, num_kv_heads, head_dim and intermediate_size are needed.
        """
        taps = taps if taps is not None else default_taps(info.num_layers)
        return cls(**(target_facts(info, taps) | sizes))

    def window(self, layer: int) -> int | None:
        """Return layer ``layer``'s window, or None for full attention."""
        return self.windows[layer] if layer < len(self.windows) else None

    @property
    def input_norm(self) -> str:
        """The input normalisation, spelled out."""
        return (
            "+".join(n for n, on in (("joint", self.norm_joint), ("per_tap", self.norm_per_tap)) if on)
            or "none"
        )

    def settings(self) -> dict[str, str]:
        """Return the switches, spelled out for the result rows."""
        window = ",".join("full" if w is None else str(w) for w in self.windows) or "full"
        return {
            "feedback": self.feedback,
            "input_norm": self.input_norm,
            "norm_before_residual": str(self.norm_before_residual).lower(),
            "gate": "sigmoid" if self.gate else "none",
            "window": window,
            "sink": self.sink,
            "positions": self.positions,
            "layers": str(self.num_layers),
            "qk_norm": str(self.qk_norm).lower(),
            "draft_vocab": str(self.draft_vocab_size),
            "taps": ",".join(map(str, self.taps)),
        }


class Layer(nn.Module):
    """One decoder layer. Layer 0 reads cat(norm(embedding), norm(hidden)); later ones read norm(hidden)."""

    def __init__(self, config: Eagle3Config, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(h, eps, dtype, device)
        self.hidden_norm = RMSNorm(h, eps, dtype, device) if index == 0 else None
        self.post_attention_layernorm = RMSNorm(h, eps, dtype, device)
        self.self_attn = Attention(config, 2 * h if index == 0 else h, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def enter(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (z, residual): what attention reads, and what its output is added to."""
        if self.hidden_norm is None:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        z = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        return z, normed if self.norm_before_residual else hidden

    def leave(self, z: Tensor, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after attention output and MLP, [n, H]."""
        residual = residual + self.self_attn.output(z, attended)
        update: Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + update


class Eagle3Model(DrafterModel):
    """A drafter's weights, and the target's tensors that it shares."""

    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        target: TargetWeights,
        target_ids: Tensor | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Lay out the module; its weights wait for ``load_state_dict`` or ``init_weights``.

        Args:
            config: sizes and switches.
            target: shared embeddings and head.
            target_ids: [draft_vocab_size] ascending target id of each draft id; None: the first ones.
            dtype: of the weights; default: the target's.

        Raises:
            UserError: shared tensors do not fit the drafter's sizes.
        """
        dtype, device = dtype or target.embed.dtype, target.embed.device
        super().__init__(config, target, target_ids, dtype)
        c = config
        if float(c.rope.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UserError("partial_rotary_factor other than 1 is not supported for EAGLE-3 drafters")
        width = len(c.taps) * c.target_hidden_size
        self.fc = linear(width, c.hidden_size, c.fc_bias, dtype, device) if c.fc else None
        self.input_norm = RMSNorm(width, c.rms_norm_eps, dtype, device) if c.norm_joint else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps, dtype, device) for _ in c.taps)
            if c.norm_per_tap
            else None
        )
        self.layers = nn.ModuleList(Layer(c, i, dtype, device) for i in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, device)
        self.rope = Rope(c.rope, c.head_dim, c.max_positions)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Return the hidden input [n, H] of step 1 from the taps, each [n, H_target]."""
        parts = [tap.to(self.dtype) for tap in taps]
        if self.input_norm is not None:
            parts = list(self.input_norm(torch.cat(parts, dim=-1)).chunk(len(parts), dim=-1))
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        x = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        if self.fc is not None:
            x = self.fc(x)
        return x

    def feedback(self, pre: Tensor, post: Tensor) -> Tensor:
        """Return what the next step receives as its hidden input."""
        return post if self.config.feedback == "post" else pre
