"""Attention and expert blocks of published multi-token-prediction heads.

Each attention gives queries, keys and values as the shared chain attention wants them: one head size, the rotated
dimensions first, halves paired, scores scaled by head_dim ** -0.5.

Example: ``attention = LatentAttention(config, torch.float32, torch.device("cpu"))``
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.drafters.modules import MLP, Attention, RMSNorm, linear, rotate

if TYPE_CHECKING:
    from specbench.drafters.mtp import MtpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2 and later)."""

    q_lora_rank: int | None
    """None: queries are projected at once."""
    kv_lora_rank: int
    nope_dim: int
    """Dimensions of a head that are not rotated."""
    rope_dim: int
    v_dim: int
    interleaved: bool = True
    """Rotary pairs are neighbours in the file."""
    eps: float = 1e-6
    """Of the norms of the latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """A mixture of experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int
    """Width of the shared expert; 0: none."""
    scoring: Literal["softmax", "sigmoid"]
    """``softmax``: Qwen; ``sigmoid``: DeepSeek-V3, with a selection bias and groups."""
    normalise: bool = True
    """Weights of the chosen experts sum to 1."""
    shared_gate: bool = False
    """The shared expert's output is gated by a sigmoid (Qwen)."""
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    """Of the routed experts' output."""


class GatedAttention(Attention):
    """Qwen3-Next's: ``q_proj`` also gives a sigmoid gate on the attention output, head by head."""

    def __init__(self, config: MtpConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, config.hidden_size, dtype, device)
        c, d = config, config.head_dim
        self.q_proj = linear(c.hidden_size, 2 * c.num_heads * d, c.qkv_bias, dtype, device)
        self.q_norm = RMSNorm(d, c.rms_norm_eps, dtype, device, c.norm_offset)
        self.k_norm = RMSNorm(d, c.rms_norm_eps, dtype, device, c.norm_offset)

    def _both(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and gate, each [n, Hq, D]."""
        both: Tensor = self.q_proj(z)
        q, gate = both.reshape(len(z), -1, 2 * self.head_dim).chunk(2, dim=-1)
        return q, gate

    def queries(self, z: Tensor) -> Tensor:
        """Return queries [n, Hq, D] before rotation."""
        assert self.q_norm is not None
        q: Tensor = self.q_norm(self._both(z)[0])
        return q

    def output(self, z: Tensor, attended: Tensor) -> Tensor:
        """Return the residual's update from ``attended`` [n, Hq, D], gated by ``z``."""
        out: Tensor = self.o_proj((attended * torch.sigmoid(self._both(z)[1])).flatten(-2))
        return out


class LatentAttention(nn.Module):
    """DeepSeek's: keys and values unfolded from a latent, one rotated key part for all heads.

    Values are padded with zeros to the keys' size.
    """

    def __init__(self, config: MtpConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.latent is not None
        c, s = config, config.latent
        self.sizes, self.num_heads, self.head_dim = s, c.num_heads, c.head_dim
        width, q_out = c.hidden_size, c.num_heads * c.head_dim
        if s.q_lora_rank is None:
            self.q_proj = linear(width, q_out, False, dtype, device)
        else:
            self.q_a_proj = linear(width, s.q_lora_rank, c.qkv_bias, dtype, device)
            self.q_a_layernorm = RMSNorm(s.q_lora_rank, s.eps, dtype, device)
            self.q_b_proj = linear(s.q_lora_rank, q_out, False, dtype, device)
        self.kv_a_proj_with_mqa = linear(width, s.kv_lora_rank + s.rope_dim, c.qkv_bias, dtype, device)
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, s.eps, dtype, device)
        self.kv_b_proj = linear(s.kv_lora_rank, c.num_heads * (s.nope_dim + s.v_dim), False, dtype, device)
        self.o_proj = linear(c.num_heads * s.v_dim, width, c.o_bias, dtype, device)
        self.factor = _score_factor(c.rope)

    def _rotary_first(self, nope: Tensor, rope: Tensor) -> Tensor:
        """Return [..., rope_dim + nope_dim], pairs a half apart; the same for queries and keys changes no score."""
        if self.sizes.interleaved:
            rope = torch.cat((rope[..., 0::2], rope[..., 1::2]), dim=-1)
        return torch.cat((rope, nope), dim=-1)

    def queries(self, z: Tensor) -> Tensor:
        """Return queries [n, H, D] before rotation."""
        q = (
            self.q_proj(z)
            if self.sizes.q_lora_rank is None
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(z)))
        )
        nope, rope = q.reshape(len(z), self.num_heads, -1).split(
            (self.sizes.nope_dim, self.sizes.rope_dim), dim=-1
        )
        q = self._rotary_first(nope, rope)
        return q if self.factor == 1.0 else q * self.factor

    def keys_values(self, z: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and padded values, each [n, H, D]."""
        s = self.sizes
        latent, rope = self.kv_a_proj_with_mqa(z).split((s.kv_lora_rank, s.rope_dim), dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).reshape(len(z), self.num_heads, -1)
        nope, v = both.split((s.nope_dim, s.v_dim), dim=-1)
        k = self._rotary_first(nope, rope[:, None].expand(-1, self.num_heads, -1))
        return rotate(k, tables), F.pad(v, (0, self.head_dim - s.v_dim))

    def output(self, z: Tensor, attended: Tensor) -> Tensor:
        """Return the residual's update from ``attended`` [n, H, D]."""
        out: Tensor = self.o_proj(attended[..., : self.sizes.v_dim].flatten(-2))
        return out


def _score_factor(rope: Mapping[str, Any]) -> float:
    """Return what YaRN's ``mscale_all_dim`` multiplies the scores by (DeepSeek-V3's modelling code)."""
    scale, weight = float(rope.get("factor") or 1.0), float(rope.get("mscale_all_dim") or 0.0)
    if rope["rope_type"] == "default" or not weight or scale <= 1.0:
        return 1.0
    return float((0.1 * weight * math.log(scale) + 1.0) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Width:
    """A configuration with another MLP width."""

    hidden_size: int
    intermediate_size: int
    hidden_act: str
    mlp_bias: bool = False


class Experts(nn.Module):
    """A mixture of experts with, perhaps, a shared one."""

    def __init__(self, config: MtpConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        assert config.experts is not None
        self.sizes = e = config.experts
        h = config.hidden_size

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.gate = nn.Module()
        self.gate.weight = empty(e.num_experts, h)
        if e.scoring == "sigmoid":
            # in float32 whatever the rest is: it decides between near-equal experts
            bias = torch.zeros(e.num_experts, dtype=torch.float32, device=device)
            self.gate.register_buffer("e_score_correction_bias", bias)
        self.gate_up_proj = empty(e.num_experts, 2 * e.intermediate_size, h)
        self.down_proj = empty(e.num_experts, h, e.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.shared: MLP | None = None
        if e.shared_size:
            width: Any = _Width(hidden_size=h, intermediate_size=e.shared_size, hidden_act=config.hidden_act)
            self.shared = MLP(width, dtype, device)
        self.shared_gate = linear(h, 1, False, dtype, device) if e.shared_gate else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices [n, top_k] of the experts of ``x`` [n, H]."""
        e, weight = self.sizes, self.gate.weight
        assert isinstance(weight, Tensor)
        if e.scoring == "softmax":
            scores = F.linear(x, weight).softmax(dim=-1, dtype=torch.float32)
            weights, chosen = scores.topk(e.top_k, dim=-1)
        else:
            scores = F.linear(x.float(), weight.float()).sigmoid()
            choice = self._within_groups(scores + self.gate.e_score_correction_bias)  # type: ignore[operator]
            chosen = choice.topk(e.top_k, dim=-1).indices
            weights = scores.gather(1, chosen)
        if e.normalise:
            weights = weights / (
                weights.sum(dim=-1, keepdim=True) + (1e-20 if e.scoring == "sigmoid" else 0.0)
            )
        return weights * e.scale, chosen

    def _within_groups(self, choice: Tensor) -> Tensor:
        """Leave only the experts of the best groups, a group being as good as its two best experts together."""
        e = self.sizes
        if e.num_groups == 1:
            return choice
        grouped = choice.reshape(len(choice), e.num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(e.top_groups, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update [n, H]."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, (y * weights[rows, place, None]).to(x.dtype))
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
        return out
