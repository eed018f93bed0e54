"""Multi-token-prediction heads: the extra block that Qwen3-Next, Qwen3.5, DeepSeek-V3 and their kin ship.

A step norms the token's embedding and the hidden state, projects both to one vector, runs one ordinary decoder
block over it and a final norm, whose output gives the logits and is fed back. One block serves all steps, as
engines run it. Step 1's hidden state is the target's last one *behind* its final norm: that is what vLLM's
Qwen3-Next and DeepSeek models return and hand to the head; the tap lies before that norm, which is applied here.

Example:
    config = MtpConfig.for_target(info, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536)
    model = MtpModel(config, target)
    run_chains(model, packed, rows, depth=4, on_step=on_step)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specbench.drafters.config import DrafterConfig, target_facts
from specbench.drafters.modules import (
    MLP,
    Attention,
    DrafterModel,
    RMSNorm,
    Rope,
    linear,
    rms_norm,
)
from specbench.drafters.mtp_parts import Experts, ExpertSizes, GatedAttention, LatentAttention, LatentSizes
from specbench.errors import UserError
from specbench.types import TargetInfo, TargetWeights

AttentionKind = Literal["plain", "gated", "latent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """Sizes and switches of one head, named our way; ``checkpoints.mtp`` translates published keys.

    The one tap is the target's last state, before its final norm.
    """

    attention: AttentionKind = "plain"
    latent: LatentSizes | None = None
    experts: ExpertSizes | None = None
    """None: a dense MLP."""
    norm_offset: float = 0.0
    """Added to the weights of all norms, the target's final one included: 1 in the Qwen3-Next family."""
    hidden_first: bool = False
    """``fc`` reads (hidden, embedding) and not (embedding, hidden)."""
    mask_first: bool = False
    """The row at position 0 reads zeros for its embedding, as vLLM runs DeepSeek's heads."""
    trained_depth: int | None = None
    # what the chain computation asks of every drafter, and no head has
    num_layers: int = 1
    sink: Literal["none"] = "none"
    positions: Literal["absolute"] = "absolute"
    feedback: Literal["post"] = "post"

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if len(self.taps) != 1:
            raise UserError(f"an MTP head reads one state of the target, not {len(self.taps)}: {self.taps}")
        if (self.attention == "latent") != (self.latent is not None):
            raise UserError("latent attention and its sizes go together")
        if self.latent is not None and self.latent.v_dim > self.head_dim:
            raise UserError(
                f"values of {self.latent.v_dim} dimensions behind keys of {self.head_dim} are not supported"
            )

    @classmethod
    def for_target(cls, info: TargetInfo, **sizes: Any) -> MtpConfig:
        """Return a configuration whose target-side facts (width, vocabulary, RoPE) come from it.

        Args:
            info: the target.
            **sizes: every other field; num_heads, num_kv_heads, head_dim and intermediate_size are needed.
        """
        return cls(**(target_facts(info, (info.num_layers,)) | sizes))

    def window(self, layer: int) -> None:
        """No head has a window."""
        return None

    def settings(self) -> dict[str, str]:
        """Return the switches, spelled out, for the result rows."""
        e = self.experts
        return {
            "feedback": self.feedback,
            "attention": self.attention,
            "block": "dense" if e is None else f"{e.top_k} of {e.num_experts} experts",
            "reads": "hidden, embedding" if self.hidden_first else "embedding, hidden",
            "draft_vocab": str(self.draft_vocab_size),
            "taps": ",".join(map(str, self.taps)),
        }


class MtpLayer(nn.Module):
    """The head's block with what leads into it."""

    def __init__(self, config: MtpConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        c, h = config, config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(h, c.rms_norm_eps, dtype, device, c.norm_offset)

        self.index = 0
        self.hidden_first = c.hidden_first
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.fc = linear(2 * h, h, False, dtype, device)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn: Attention | LatentAttention
        if c.attention == "latent":
            self.self_attn = LatentAttention(c, dtype, device)
        elif c.attention == "gated":
            self.self_attn = GatedAttention(c, dtype, device)
        else:
            self.self_attn = Attention(c, h, dtype, device)
        self.mlp = MLP(c, dtype, device) if c.experts is None else Experts(c, dtype, device)

    def enter(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (z, residual): what attention reads, and what its output is added to."""
        parts = (self.embedding_norm(embeds), self.hidden_norm(hidden))
        x = self.fc(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.input_layernorm(x), x

    def leave(self, z: Tensor, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after attention output and MLP, [n, H]."""
        residual = residual + self.self_attn.output(z, attended)
        update: Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + update


class MtpModel(DrafterModel):
    """A head's weights, and the target's tensors that it shares, its final norm among them."""

    config: MtpConfig
    final_norm: Tensor | None

    def __init__(
        self,
        config: MtpConfig,
        target: TargetWeights,
        target_ids: Tensor | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        reads_normed: bool = False,
    ) -> None:
        """Lay out the module; its weights wait for ``load_state_dict`` or ``init_weights``.

        Args:
            config: sizes and switches.
            target: shared embeddings, head and final norm.
            target_ids: [draft_vocab_size] ascending target id of each draft id; None: the first ones.
            dtype: of the weights; default: the target's.
            reads_normed: the states it is given are behind the target's final norm already, as training keeps them.

        Raises:
            UserError: shared tensors do not fit the head's sizes, or the target's final norm is unknown.
        """
        dtype, device = dtype or target.embed.dtype, target.embed.device
        super().__init__(config, target, target_ids, dtype)
        c = config
        if target.norm is None and not reads_normed:
            raise UserError(
                f"{target.info.name} shows no final norm, behind which MTP heads read its state; "
                "use a drafter that reads earlier states"
            )
        final = None if reads_normed or target.norm is None else target.norm.detach().to(dtype)
        self.register_buffer("final_norm", final, persistent=False)
        self.layers = nn.ModuleList([MtpLayer(c, dtype, device)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, device, c.norm_offset)
        rope_dim = c.head_dim if c.latent is None else c.latent.rope_dim
        self.rope = Rope(c.rope, rope_dim, c.max_positions)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Return the hidden input [n, H] of step 1: the target's last state behind its final norm."""
        (state,) = taps
        state = state.to(self.dtype)
        if self.final_norm is None:
            return state
        return rms_norm(state, self.final_norm, self.config.rms_norm_eps, self.config.norm_offset)

    def embed(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return embeddings [n, H] of target token ids [n]; ``positions`` [n] of the rows that read them."""
        embeds = super().embed(token_ids)
        if self.config.mask_first and positions is not None:
            embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
        return embeds

    def feedback(self, pre: Tensor, post: Tensor) -> Tensor:
        """Return what the next step receives as its hidden input: the final norm's output."""
        return post
