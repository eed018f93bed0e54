"""What the configuration of every drafter with weights holds, named our way.

Example: ``Eagle3Config``, ``MtpConfig`` and ``DFlashConfig`` add their own sizes and switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specbench.errors import UserError
from specbench.types import TargetInfo

Head = Literal["own", "target", "target_rows"]

DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Sizes and switches that all families share; what it says of the target comes first."""

    target_hidden_size: int
    vocab_size: int
    """Of the target."""
    taps: tuple[int, ...]
    """``hidden_states`` indices of the target that the drafter reads (0 = embeddings, i = entering block i)."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    gate: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    own_embed: bool = False
    head: Head = "target"
    """``target_rows``: the target's head rows at the draft vocabulary's ids, frozen and not in the file."""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    logit_scale: float = 1.0
    rope: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    """``rope_parameters`` in transformers' terms."""
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if len(set(self.taps)) != len(self.taps):
            raise UserError(f"taps {self.taps} hold a duplicate; name distinct ones")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"a draft vocabulary of {self.draft_vocab_size} does not fit the target's {self.vocab_size}"
            )
        if self.head == "target" and self.draft_vocab_size != self.vocab_size:
            raise UserError(
                f"the target's whole head cannot serve a draft vocabulary of {self.draft_vocab_size} of "
                f"{self.vocab_size} tokens; the file must hold lm_head.weight"
            )


def target_facts(info: TargetInfo, taps: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a configuration that follow from the target: widths, vocabulary, taps, RoPE, positions."""
    return {
        "hidden_size": info.hidden_size,
        "target_hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "draft_vocab_size": info.vocab_size,
        "taps": taps,
        "rope": dict(info.rope_parameters) or dict(DEFAULT_ROPE),
        "max_positions": info.max_positions,
    }
