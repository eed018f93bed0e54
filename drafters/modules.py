"""Parts that every drafter with weights is made of: linear maps, norms, rotary positions, attention, MLP, and
the tensors it shares with its target.

Example:
    norm = RMSNorm(576, 1e-5, torch.float32, torch.device("cpu"))
    rope = Rope({"rope_type": "default", "rope_theta": 1e4}, head_dim=64, max_positions=2048)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.drafters.config import DrafterConfig
from specbench.errors import UserError
from specbench.types import TargetWeights


def linear(num_in: int, num_out: int, bias: bool, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """A linear map whose weights wait to be loaded or drawn: the global random generator is left alone."""
    return nn.Linear(num_in, num_out, bias=bias, device="meta", dtype=dtype).to_empty(device=device)


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset) over the last dimension, in float32 inside."""

    def __init__(
        self, width: int, eps: float, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed ``x`` [..., width]."""
        return rms_norm(x, self.weight, self.eps, self.offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return x / rms(x) * (weight + offset) [..., width].

    With an offset (Gemma's and Qwen3-Next's norms keep weight - 1) the sum is made in float32, where it is exact.
    """
    if offset == 0.0:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float() + offset, eps).to(x.dtype)


class Rope:
    """Rotary positions through transformers, with frequencies fixed at construction.

    Length-dependent scalings (``longrope``, ``dynamic``) are taken at the configured number of positions,
    whatever the sequence at hand, so that a token's key does not depend on what it is packed with. With a
    ``partial_rotary_factor`` the first dimensions of a head are rotated and the others are left alone.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        """Compute the frequencies.

        Args:
            rope: ``rope_parameters`` in transformers' terms.
            head_dim: D.
            max_positions: positions that length-dependent scalings are taken at.
        """
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        parameters = dict(rope)
        dim = int(head_dim * float(parameters.pop("partial_rotary_factor", None) or 1.0))
        hf = LlamaConfig(
            hidden_size=dim,
            num_attention_heads=1,
            head_dim=dim,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )
        kind = hf.rope_parameters["rope_type"]
        if kind == "longrope":
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, None, seq_len=max_positions)
        else:
            embedding = LlamaRotaryEmbedding(hf)
            frequencies, scale = embedding.inv_freq, embedding.attention_scaling
        self.frequencies: Tensor = frequencies.float()
        self.scale = float(scale)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [len(positions), 1, rotated dimensions]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` [n, heads, D] by ``Rope.tables``; halves are paired, as in Llama."""
    cos, sin = tables
    size = cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


class Attention(nn.Module):
    """Projections of one layer's attention; the softmax itself is the caller's."""

    def __init__(self, config: DrafterConfig, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        c, d = config, config.head_dim
        self.head_dim = d
        self.q_proj = linear(width, c.num_heads * d, c.qkv_bias, dtype, device)
        self.k_proj = linear(width, c.num_kv_heads * d, c.qkv_bias, dtype, device)
        self.v_proj = linear(width, c.num_kv_heads * d, c.qkv_bias, dtype, device)
        self.o_proj = linear(c.num_heads * d, c.hidden_size, c.o_bias, dtype, device)
        self.g_proj = linear(width, c.num_heads * d, False, dtype, device) if c.gate else None
        self.q_norm = RMSNorm(d, c.rms_norm_eps, dtype, device) if c.qk_norm else None
        self.k_norm = RMSNorm(d, c.rms_norm_eps, dtype, device) if c.qk_norm else None

    def queries(self, z: Tensor) -> Tensor:
        """Return queries [n, Hq, D] before rotation."""
        q: Tensor = self.q_proj(z).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return q

    def keys_values(self, z: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, each [n, Hkv, D]."""
        k = self.k_proj(z).unflatten(-1, (-1, self.head_dim))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(k, tables), self.v_proj(z).unflatten(-1, (-1, self.head_dim))

    def output(self, z: Tensor, attended: Tensor) -> Tensor:
        """Return the residual's update from ``attended`` [n, Hq, D], gated by ``z`` if so switched."""
        flat = attended.flatten(-2)
        if self.g_proj is not None:
            flat = flat * torch.sigmoid(self.g_proj(z))
        out: Tensor = self.o_proj(flat)
        return out


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        h, i, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = linear(h, i, bias, dtype, device)
        self.up_proj = linear(h, i, bias, dtype, device)
        self.down_proj = linear(i, h, bias, dtype, device)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Return the update [..., H]."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class DrafterModel(nn.Module):
    """Vocabulary map, embeddings and head of a drafter: its own, or its target's.

    Shared tensors are non-persistent buffers: they follow ``.to()`` and never land in ``state_dict``. Whoever
    inherits sets ``config`` and adds a final ``norm``.
    """

    config: Any
    norm: RMSNorm
    embed_table: Tensor | None
    head_table: Tensor | None
    target_ids: Tensor
    draft_ids: Tensor

    def __init__(
        self,
        config: DrafterConfig,
        target: TargetWeights,
        target_ids: Tensor | Sequence[int] | None,
        dtype: torch.dtype,
    ) -> None:
        """Lay out vocabulary map, embeddings and head.

        Args:
            config: sizes.
            target: shared tensors.
            target_ids: [draft_vocab_size] ascending target id of each draft id; None: the first ones.
            dtype: of the weights.

        Raises:
            UserError: shared tensors do not fit the drafter's sizes.
        """
        super().__init__()
        self.config = c = config
        device = target.embed.device
        check_target(config, target)
        ids = torch.arange(c.draft_vocab_size) if target_ids is None else torch.as_tensor(target_ids)
        assert ids.shape == (c.draft_vocab_size,)
        ids = ids.to(device=device, dtype=torch.int64)
        self.register_buffer("target_ids", ids, persistent=False)
        lookup = torch.full((c.vocab_size,), -1, dtype=torch.int64, device=device)
        lookup[ids] = torch.arange(c.draft_vocab_size, device=device)
        self.register_buffer("draft_ids", lookup, persistent=False)

        shared_embed = None if c.own_embed else target.embed.detach().to(dtype)
        self.register_buffer("embed_table", shared_embed, persistent=False)
        self.embed_tokens = (
            nn.Embedding(c.vocab_size, c.hidden_size, device="meta", dtype=dtype).to_empty(device=device)
            if c.own_embed
            else None
        )
        shared_head = {
            "own": None,
            "target": target.head,
            "target_rows": target.head[ids] if c.head == "target_rows" else None,
        }[c.head]
        self.register_buffer(
            "head_table", None if shared_head is None else shared_head.detach().to(dtype), persistent=False
        )
        self.lm_head = (
            linear(c.hidden_size, c.draft_vocab_size, False, dtype, device) if c.head == "own" else None
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.target_ids.device

    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Draw every matrix from N(0, std^2); norms start at 1, biases at 0.

        Args:
            generator: on the CPU; the draw does not depend on the device.
            std: standard deviation.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                    parameter.copy_(draw * std)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def embed(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return embeddings [n, H] of target token ids [n]; ``positions`` [n] of the rows that read them."""
        table = self.embed_table if self.embed_tokens is None else self.embed_tokens.weight
        assert table is not None
        return F.embedding(token_ids, table)

    def head_weight(self) -> Tensor:
        """Return the output matrix [draft_vocab_size, H]."""
        weight = self.head_table if self.lm_head is None else self.lm_head.weight
        assert weight is not None
        return weight

    def logits(self, post: Tensor) -> Tensor:
        """Return logits [n, draft_vocab_size] of final-norm outputs [n, H]."""
        logits = F.linear(post, self.head_weight())
        scale: float = self.config.logit_scale
        return logits if scale == 1.0 else logits * scale

    def contenders(self, post: Tensor, draft_ids: Tensor) -> Tensor:
        """Return the indices [m] of the rows whose best token may be ``draft_ids`` [n] (-1: none is meant).

        An eighth of the head is enough to beat most tokens that are not the best; the others take the whole head.
        """
        head = self.head_weight()
        few = F.linear(post, head[: max(1, len(head) // 8)]).amax(-1).float()
        meant = (post.float() * head[draft_ids.clamp(min=0)].float()).sum(-1)
        # beyond what rounding in the weights' dtype could turn round; NaN beats nothing
        margin = (8 * torch.finfo(post.dtype).eps + 1e-5) * (few.abs() + meant.abs())
        beaten = (few > meant + margin) | (draft_ids < 0)
        return (~beaten).nonzero().flatten()

    def fingerprint(self) -> str:
        """Return SHA-256 over configuration, vocabulary map and weights, the first 16 hex digits."""
        config = json.dumps(asdict(self.config), sort_keys=True, default=str)
        return weights_fingerprint(config, self.state_dict() | {"target_ids": self.target_ids})


def weights_fingerprint(config: str, tensors: Mapping[str, Tensor]) -> str:
    """Return SHA-256 over a configuration's text and named tensors, the first 16 hex digits."""
    digest = hashlib.sha256(config.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def check_target(config: DrafterConfig, target: TargetWeights) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        UserError: widths, vocabularies or taps differ.
    """
    info = target.info
    if config.target_hidden_size != info.hidden_size:
        raise UserError(
            f"the drafter expects a target of width {config.target_hidden_size}, but {info.name} has "
            f"{info.hidden_size}; it was trained for another target"
        )
    if config.vocab_size != info.vocab_size:
        raise UserError(
            f"the drafter expects a target with {config.vocab_size} tokens, but {info.name} has "
            f"{info.vocab_size}; it was trained for another tokenizer"
        )
    outside = [t for t in config.taps if not 0 <= t <= info.num_layers]
    if outside:
        raise UserError(f"tap {outside[0]} does not exist: {info.name} has taps 0..{info.num_layers}")
    shares_embed = not config.own_embed
    if (shares_embed or config.head != "own") and config.hidden_size != info.hidden_size:
        what = "embeddings" if shares_embed else "head"
        raise UserError(
            f"the drafter's width {config.hidden_size} differs from {info.name}'s {info.hidden_size}, so it "
            f"cannot share the target's {what}; the checkpoint must hold its own"
        )
