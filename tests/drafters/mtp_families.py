"""Random MTP heads in the published layouts, with transformers' own decoder blocks as the judge.

``make(name, path)`` writes a target directory (configuration and tensors) and returns a ``Reference`` that computes
a chain by running the block over the whole history of inputs, once a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specbench.types import TargetInfo, TargetWeights

VOCAB, WIDTH, LAYERS, EPS = 23, 32, 4, 1e-6

QWEN: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40, "rms_norm_eps": EPS,
    "max_position_embeddings": 512, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 40, "rms_norm_eps": EPS, "max_position_embeddings": 512,
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
    "first_k_dense_replace": 1, "rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
DENSE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "rms_norm_eps": EPS,
    "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip


@dataclass(kw_only=True)
class Reference:
    """A head computed by transformers' modules."""

    target: TargetWeights
    norms: dict[str, Any]
    """embedding, hidden, final, target."""
    fc: Any
    block: Any
    rotary: Any
    hidden_first: bool = False
    mask_first: bool = False

    @torch.no_grad()
    def chain(self, tap: torch.Tensor, ids: list[int], row: int, depth: int) -> torch.Tensor:
        """Logits [depth, V] of the chain that hangs on ``row`` and is fed the sequence's own tokens."""
        hidden = list(self.norms["target"](tap[: row + 1]))
        embeds = [self.target.embed[ids[p + 1]] for p in range(row + 1)]
        if self.mask_first:
            embeds[0] = torch.zeros_like(embeds[0])
        logits = []
        for step in range(1, depth + 1):
            post = self.forward(torch.stack(hidden), torch.stack(embeds))[-1]
            logits.append(self.target.head @ post)
            hidden.append(post)
            if step < depth:
                embeds.append(self.target.embed[ids[row + step + 1]])
        return torch.stack(logits)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        parts = [self.norms["embedding"](embeds), self.norms["hidden"](hidden)]
        x = self.fc(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))[None]
        size = x.shape[1]
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        tables = self.rotary(x, torch.arange(size)[None])
        out = self.block(
            x, position_embeddings=tables, attention_mask=mask, position_ids=torch.arange(size)[None]
        )
        out = out[0] if isinstance(out, tuple) else out
        result: torch.Tensor = self.norms["final"](out[0])
        return result


def make_target(path: Path, seed: int = 0) -> TargetWeights:
    g = torch.Generator().manual_seed(seed)
    info = TargetInfo(
        name="toy", fingerprint="0" * 16, hidden_size=WIDTH, num_layers=LAYERS, vocab_size=VOCAB,
        max_positions=512, dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 100.0}, bos_id=1,
    )  # fmt: skip
    return TargetWeights(
        info=info,
        embed=torch.randn(VOCAB, WIDTH, generator=g),
        head=torch.randn(VOCAB, WIDTH, generator=g),
        norm=torch.rand(WIDTH, generator=g) + 0.5,
        path=path,
    )


def shake(module: torch.nn.Module, seed: int) -> None:
    """Draw every weight and buffer that a file holds."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            draw = torch.randn(tensor.shape, generator=g)
            tensor.copy_(draw * 0.3 if tensor.dim() > 1 or "bias" in name else draw * 0.3 + 0.8)


def parts(norm: Any, block: Any, target: TargetWeights) -> dict[str, Any]:
    """Norms, projection and block, all drawn at random; the target's norm takes its weight."""
    norms = {name: norm() for name in ("embedding", "hidden", "final", "target")}
    fc = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
    for seed, module in enumerate([*norms.values(), fc, block]):
        shake(module, seed)
    with torch.no_grad():
        norms["target"].weight.copy_(target.norm)
    return {"norms": norms, "fc": fc, "block": block.eval()}


def unfused(state: dict[str, torch.Tensor], shared: str) -> dict[str, torch.Tensor]:
    """One tensor an expert, as published files have them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name == "mlp.experts.gate_up_proj":
            for i, both in enumerate(tensor):
                out[f"mlp.experts.{i}.gate_proj.weight"], out[f"mlp.experts.{i}.up_proj.weight"] = both.chunk(
                    2
                )
        elif name == "mlp.experts.down_proj":
            out |= {f"mlp.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            out[name] = tensor
    assert not any(n.startswith("mlp.shared") and shared not in n for n in out)
    return out


def write(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, path / "model.safetensors")


def qwen_next(path: Path, experts: int) -> Reference:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as m

    target = make_target(path)
    given = QWEN | {"num_experts": experts}
    config = Qwen3NextConfig(**given, attn_implementation="eager")
    pieces = parts(lambda: m.Qwen3NextRMSNorm(WIDTH, EPS), m.Qwen3NextDecoderLayer(config, 3), target)
    tensors = qwen_tensors(pieces, unfused(pieces["block"].state_dict(), "shared_expert"))
    write(path, given | {"model_type": "qwen3_next", "num_nextn_predict_layers": 1}, tensors)
    return Reference(target=target, rotary=m.Qwen3NextRotaryEmbedding(config), **pieces)


def qwen_tensors(pieces: dict[str, Any], block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    norms = pieces["norms"]
    return {
        "mtp.fc.weight": pieces["fc"].weight,
        "mtp.norm.weight": norms["final"].weight,
        "mtp.pre_fc_norm_hidden.weight": norms["hidden"].weight,
        "mtp.pre_fc_norm_embedding.weight": norms["embedding"].weight,
        "model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2),
        **{f"mtp.layers.0.{n}": t for n, t in block.items()},
    }


def qwen_35(path: Path, experts: int) -> Reference:
    given = QWEN | ({"num_experts": experts} if experts else {})
    target = make_target(path)
    m: Any
    if experts:
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as m
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig as Config

        names = ("Qwen3_5MoeRMSNorm", "Qwen3_5MoeDecoderLayer", "Qwen3_5MoeTextRotaryEmbedding")
    else:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as m
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig as Config

        names = ("Qwen3_5RMSNorm", "Qwen3_5DecoderLayer", "Qwen3_5TextRotaryEmbedding")
    norm, layer, rotary = (getattr(m, n) for n in names)
    rope = given["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = Config(**(given | {"rope_parameters": rope}), attn_implementation="eager")
    pieces = parts(lambda: norm(WIDTH, EPS), layer(config, 3), target)
    # the mixture of Qwen3.5 is published with its experts joined
    tensors = qwen_tensors(pieces, dict(pieces["block"].state_dict()))
    text = given | {"rope_parameters": rope, "model_type": config.model_type, "mtp_num_hidden_layers": 1}
    write(path, {"model_type": "qwen3_5", "text_config": text}, tensors)
    return Reference(target=target, rotary=rotary(config), **pieces)


def deepseek(path: Path, **changes: Any) -> Reference:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    target = make_target(path)
    given = DEEPSEEK | changes
    config = DeepseekV3Config(**given, attn_implementation="eager")
    pieces = parts(lambda: m.DeepseekV3RMSNorm(WIDTH, EPS), m.DeepseekV3DecoderLayer(config, LAYERS), target)
    norms, block = pieces["norms"], f"model.layers.{LAYERS}"
    tensors = {
        f"{block}.eh_proj.weight": pieces["fc"].weight,
        f"{block}.enorm.weight": norms["embedding"].weight,
        f"{block}.hnorm.weight": norms["hidden"].weight,
        f"{block}.shared_head.norm.weight": norms["final"].weight,
        f"{block}.shared_head.head.weight": target.head,
        f"{block}.embed_tokens.weight": target.embed,
        "model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2),
        **{f"{block}.{n}": t for n, t in unfused(pieces["block"].state_dict(), "shared_experts").items()},
    }
    write(path, given | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, tensors)
    return Reference(target=target, rotary=m.DeepseekV3RotaryEmbedding(config), mask_first=True, **pieces)


def mimo(path: Path) -> Reference:
    from transformers import Qwen2Config
    from transformers.models.qwen2 import modeling_qwen2 as m

    target = make_target(path)
    config = Qwen2Config(**DENSE, attn_implementation="eager")
    pieces = parts(lambda: m.Qwen2RMSNorm(WIDTH, EPS), m.Qwen2DecoderLayer(config, 0), target)
    norms, block = pieces["norms"], "model.mtp_layers.0"
    tensors = {
        f"{block}.input_proj.weight": pieces["fc"].weight,
        f"{block}.token_layernorm.weight": norms["embedding"].weight,
        f"{block}.hidden_layernorm.weight": norms["hidden"].weight,
        f"{block}.final_layernorm.weight": norms["final"].weight,
        **{f"{block}.{n}": t for n, t in pieces["block"].state_dict().items()},
    }
    write(path, DENSE | {"model_type": "mimo", "num_nextn_predict_layers": 1}, tensors)
    rotary = m.Qwen2RotaryEmbedding(config)
    return Reference(target=target, rotary=rotary, mask_first=True, hidden_first=True, **pieces)


def speculators_dense(path: Path) -> Reference:
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as m

    target = make_target(path)
    config = Qwen3Config(**DENSE, attn_implementation="eager")
    pieces = parts(lambda: m.Qwen3RMSNorm(WIDTH, EPS), m.Qwen3DecoderLayer(config, 0), target)
    norms, block = pieces["norms"], "mtp_layers.0"
    tensors = {
        f"{block}.input_proj.weight": pieces["fc"].weight,
        f"{block}.token_layernorm.weight": norms["embedding"].weight,
        f"{block}.hidden_layernorm.weight": norms["hidden"].weight,
        f"{block}.final_layernorm.weight": norms["final"].weight,
        **{f"{block}.{n}": t for n, t in pieces["block"].state_dict().items()},
    }
    layer = DENSE | {"model_type": "qwen3"}
    written = {
        "speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": layer,
        "architectures": ["MTPDraftModel"],
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
    }  # fmt: skip
    write(path, written, tensors)
    return Reference(target=target, rotary=m.Qwen3RotaryEmbedding(config), **pieces)


FAMILIES: dict[str, Callable[[Path], Reference]] = {
    "qwen3-next": lambda path: qwen_next(path, 6),
    "qwen3-next-dense": lambda path: qwen_next(path, 0),
    "qwen3.5": lambda path: qwen_35(path, 0),
    "qwen3.5-moe": lambda path: qwen_35(path, 6),
    "deepseek": deepseek,
    "deepseek-dense": lambda path: deepseek(path, first_k_dense_replace=9),
    "deepseek-plain-queries": lambda path: deepseek(path, q_lora_rank=None, rope_interleave=False),
    "deepseek-yarn": lambda path: deepseek(path, rope_parameters=YARN),
    "mimo": mimo,
    "speculators": speculators_dense,
}
