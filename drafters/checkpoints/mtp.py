"""MTP heads: read from their target's own files, from the speculators library's, or from ours.

transformers drops these tensors when it loads or saves a target, so they are read from the files themselves, and
only they: the target's other shards stay closed.

| family | targets | tensors |
|---|---|---|
| qwen | Qwen3-Next, Qwen3.5 | ``mtp.fc``, ``mtp.norm``, ``mtp.pre_fc_norm_hidden``, ``mtp.layers.0.*`` |
| deepseek | DeepSeek-V3, R1 | ``model.layers.{n}.{enorm,hnorm,eh_proj,shared_head.*}`` beside a normal block |
| mimo | MiMo | ``model.mtp_layers.0.{input_proj,token_layernorm,hidden_layernorm,final_layernorm}`` |
| dense | ours, and speculators' over Qwen3 blocks | the qwen names without (1 + w) norms and gate |

Example: ``loaded = load_mtp(None, target)``
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specbench.drafters.checkpoints.files import find, read_config, read_tensors
from specbench.drafters.checkpoints.layouts import Notes, check_lossless
from specbench.drafters.checkpoints.strict import (
    check_weights,
    on_meta,
    rope_parameters,
    same,
    target_ids,
    which_head,
    whole,
)
from specbench.drafters.checkpoints.write import layer_config, write_checkpoint
from specbench.drafters.modules import check_target
from specbench.drafters.mtp import AttentionKind, MtpConfig, MtpModel
from specbench.drafters.mtp_parts import ExpertSizes, LatentSizes
from specbench.drafters.resolve import check_options
from specbench.errors import UserError, unknown_name
from specbench.types import TargetWeights

Family = Literal["qwen", "deepseek", "mimo", "dense"]
Names = Literal["qwen", "deepseek", "mimo", "speculators"]

OPTIONS: Mapping[str, tuple[str, ...]] = {"final_norm": ("applied", "skip")}
"""Option -> its values; ``final_norm=skip`` feeds the target's state from before its final norm."""

OWN_ARCHITECTURE = "SpecbenchMTP"

_FAMILIES: Mapping[str, Family] = {
    "qwen3_next": "qwen",
    "qwen3_5": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe": "qwen",
    "qwen3_5_moe_text": "qwen",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "mimo": "mimo",
}
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
_UNSUPPORTED: Mapping[str, str] = {
    "index_topk": "sparse attention with an indexer (DeepSeek-V3.2)",
    "quantization_config": "quantized weights",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedMtp:
    """A head from a file."""

    model: MtpModel
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFacts:
    """What a config.json says of a head."""

    family: Family
    names: Names
    sizes: Mapping[str, Any]
    """The block's keys under the target's names."""
    draft_vocab_size: int | None = None
    own: Mapping[str, Any]
    """The ``specbench`` block of our own files."""
    trained_depth: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MtpFile:
    """A head's file, checked as far as it can be without its target."""

    facts: MtpFacts
    weights: Mapping[str, Tensor]
    """Under our module's names, as stored."""
    maps: Mapping[str, Tensor]
    """d2t and t2d, where the file has them."""


def load_mtp(where: str | None, target: TargetWeights, options: Mapping[str, str] | None = None) -> LoadedMtp:
    """Load a head.

    Args:
        where: directory, or Hugging Face repository; None: the target's own directory.
        target: whose tensors it shares; the weights take its precision and device.
        options: see ``OPTIONS``.

    Raises:
        UserError: there is no head, a tensor is missing, unused or of the wrong shape, the head does not fit the
            target, or an option is unknown.
    """
    options = dict(options or {})
    check_options("mtp", options, OPTIONS)
    for name, value in options.items():
        if value not in OPTIONS[name]:
            raise unknown_name(f"value of {name}", value, OPTIONS[name])
    directory = find(where) if where is not None else target.path
    assert directory is not None, "the caller knows the target's files"
    notes = Notes()
    file = read_mtp(directory)
    weights = dict(file.weights)
    for name, table in (("embed_tokens.weight", target.embed), ("lm_head.weight", target.head)):
        if name in weights and same(weights[name], table):
            del weights[name]
    config = make_config(file.facts, weights, target.info.num_layers)
    check_target(config, target)
    if file.facts.family == "dense":
        check_final_norm(target)
    ids = target_ids(config.draft_vocab_size, config.vocab_size, file.maps, notes)
    skip = options.get("final_norm") == "skip"
    # the layout alone, on no device: shapes are all that is wanted
    with torch.device("meta"):
        needed = MtpModel(config, on_meta(target), reads_normed=True).state_dict()
    check_weights(weights, needed, lambda _name: None)
    model = MtpModel(config, target, ids, reads_normed=skip)
    model.load_state_dict({n: t.to(needed[n].dtype) for n, t in weights.items()}, strict=True)
    for name, value in options.items():
        notes.add(f"option {name}={value}")
    return LoadedMtp(model=model.eval(), notes=tuple(notes.lines))


def check_final_norm(target: TargetWeights) -> None:
    """Refuse a dense head of our own for a target whose final norm is not the plain one that it is given behind.

    Raises:
        UserError: the target's norms keep weight - 1.
    """
    if target.path is None or not (target.path / "config.json").is_file():
        return
    config = read_config(target.path)
    kind = str((config.get("text_config") or config).get("model_type"))
    if kind.startswith("gemma") or _FAMILIES.get(kind) == "qwen":
        raise UserError(
            f"{target.info.name} ({kind}) has (1 + w) norms, which an MTP-style head of the dense kind does not apply; "
            "use the head in its own files (mtp), or another drafter"
        )


def read_mtp(directory: Path) -> MtpFile:
    """Read a head's configuration and tensors, the latter under our module's names.

    Raises:
        UserError: there is no head, or it is of a kind that is not supported.
    """
    config = read_config(directory)
    facts = _facts(config)
    wanted = _prefixes(facts.names, facts.sizes)
    maps_wanted = ("d2t", "t2d")
    found = read_tensors(directory, lambda name: name in maps_wanted or name.startswith(tuple(wanted)))
    maps = {name: found.pop(name) for name in maps_wanted if name in found}
    if not found:
        _say_stripped(directory, config, facts, next(iter(wanted)))
    weights: dict[str, Tensor] = {}
    for published, tensor in found.items():
        if published.endswith(("weight_scale_inv", "weight_scale")):
            raise UserError(f"{directory} holds {published}: quantized weights are not supported")
        prefix = max((p for p in wanted if published.startswith(p)), key=len)
        name = _block_name(wanted[prefix] + published.removeprefix(prefix))
        if name is not None:
            weights[name] = tensor
    return MtpFile(facts=facts, weights=_stack_experts(weights), maps=maps)


def _facts(config: Mapping[str, Any]) -> MtpFacts:
    if "speculators_model_type" in config:
        return _speculators_facts(config)
    sizes: Mapping[str, Any] = config.get("text_config") or config
    if OWN_ARCHITECTURE in (config.get("architectures") or ()):
        own = config.get("specbench") or {}
        return MtpFacts(
            family="dense",
            names="qwen",
            sizes=sizes,
            draft_vocab_size=config.get("draft_vocab_size"),
            own=own,
            trained_depth=own.get("trained_depth"),
        )
    family = _FAMILIES.get(str(sizes.get("model_type")), None)
    if family is None:
        raise UserError(
            f"no MTP head is known for model_type {sizes.get('model_type')!r}; known: {', '.join(_FAMILIES)}"
        )
    _refuse(sizes)
    names: Names = "qwen" if family == "qwen" else "deepseek" if family == "deepseek" else "mimo"
    return MtpFacts(family=family, names=names, sizes=sizes, own={})


def _speculators_facts(config: Mapping[str, Any]) -> MtpFacts:
    kind = config["speculators_model_type"]
    if kind != "mtp":
        raise UserError(f"this speculators checkpoint is of type {kind!r}; mtp loads only type 'mtp'")
    sizes = config.get("transformer_layer_config")
    if not isinstance(sizes, dict):
        raise UserError("this speculators config.json lacks transformer_layer_config")
    _refuse(sizes | {k: config[k] for k in _COUNTS if k in config})
    depth = check_lossless(config)
    model_type = str(sizes.get("model_type"))
    family = "dense" if model_type == "qwen3" else _FAMILIES.get(model_type)
    if family not in ("dense", "qwen"):
        raise UserError(
            f"transformer_layer_config.model_type {model_type!r} is neither qwen3 nor of the Qwen3-Next family"
        )
    return MtpFacts(family=family, names="speculators", sizes=sizes, own={}, trained_depth=depth)  # type: ignore[arg-type]


def _refuse(sizes: Mapping[str, Any]) -> None:
    for key, meaning in _UNSUPPORTED.items():
        if sizes.get(key) is not None:
            raise UserError(f"config.json: {key} means {meaning}, which is not supported for MTP heads")
    for key in _COUNTS:
        if int(sizes.get(key) or 0) > 1:
            raise UserError(
                f"config.json: {key} = {sizes[key]}, but only heads with one block that serves all steps are supported"
            )


def _say_stripped(directory: Path, config: Mapping[str, Any], facts: MtpFacts, prefix: str) -> None:
    """Explain why a directory holds no head.

    Raises:
        UserError: always.
    """
    declared = [key for key in _COUNTS if config.get(key) or facts.sizes.get(key)]
    if declared:
        raise UserError(
            f"{directory} holds no {prefix}* tensors although config.json sets {declared[0]}: the head was stripped "
            "when these files were written (transformers drops it); take the published files"
        )
    raise UserError(f"{directory} holds no {prefix}* tensors: this target has no MTP head")


def _prefixes(names: Names, sizes: Mapping[str, Any]) -> dict[str, str]:
    """Return published prefix -> ours."""
    if names == "qwen":
        return {
            "mtp.": "",
            "mtp.fc.": "layers.0.fc.",
            "mtp.pre_fc_norm_hidden.": "layers.0.hidden_norm.",
            "mtp.pre_fc_norm_embedding.": "layers.0.embedding_norm.",
        }
    if names == "deepseek":
        block = f"model.layers.{whole(sizes, 'num_hidden_layers')}."
        return {
            block: "layers.0.",
            f"{block}eh_proj.": "layers.0.fc.",
            f"{block}hnorm.": "layers.0.hidden_norm.",
            f"{block}enorm.": "layers.0.embedding_norm.",
            f"{block}shared_head.norm.": "norm.",
            f"{block}shared_head.head.": "lm_head.",
            f"{block}embed_tokens.": "embed_tokens.",
        }
    block = "mtp_layers.0." if names == "speculators" else "model.mtp_layers.0."
    return {
        block: "layers.0.",
        f"{block}input_proj.": "layers.0.fc.",
        f"{block}hidden_layernorm.": "layers.0.hidden_norm.",
        f"{block}token_layernorm.": "layers.0.embedding_norm.",
        f"{block}final_layernorm.": "norm.",
    }


def _block_name(name: str) -> str | None:
    """Return our name of a tensor within the block; None: it is not needed."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    name = name.replace(".mlp.shared_expert_gate.", ".mlp.shared_gate.")
    return (
        re.sub(r"\.mlp\.shared_experts?\.", ".mlp.shared.", name)
        .replace(".mlp.experts.gate_up_proj", ".mlp.gate_up_proj")
        .replace(".mlp.experts.down_proj", ".mlp.down_proj")
    )


_EXPERT = re.compile(r"^(?P<block>.*\.mlp\.)experts\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


def _stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join one tensor an expert to one for all.

    Raises:
        UserError: an expert's tensor is missing.
    """
    single: dict[tuple[str, int, str], Tensor] = {}
    joined: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _EXPERT.match(name)
        if match is None:
            joined[name] = tensor
        else:
            single[match["block"], int(match["index"]), match["part"]] = tensor
    for block in sorted({key[0] for key in single}):
        count = 1 + max(index for b, index, _ in single if b == block)
        for index in range(count):
            for part in ("gate", "up", "down"):
                if (block, index, part) not in single:
                    raise UserError(
                        f"the checkpoint lacks {block}experts.{index}.{part}_proj.weight; the file is incomplete"
                    )
        joined[f"{block}gate_up_proj"] = torch.stack(
            [torch.cat((single[block, i, "gate"], single[block, i, "up"])) for i in range(count)]
        )
        joined[f"{block}down_proj"] = torch.stack([single[block, i, "down"] for i in range(count)])
    return joined


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``_stack_experts``, for layouts that store one tensor an expert."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        block, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for i, both in enumerate(tensor):
                out[f"{block}.experts.{i}.gate_proj.weight"], out[f"{block}.experts.{i}.up_proj.weight"] = (
                    both.chunk(2)
                )
        elif last == "down_proj" and tensor.dim() == 3:
            out |= {f"{block}.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def make_config(facts: MtpFacts, weights: Mapping[str, Tensor], num_layers: int) -> MtpConfig:
    """Return our configuration of a head.

    Args:
        facts: of the file.
        weights: under our names, without copies of the target's tables.
        num_layers: of the target: which state is its last.

    Raises:
        UserError: a key is missing or contradicts the tensors.
    """
    s = facts.sizes
    hidden, heads, vocab = whole(s, "hidden_size"), whole(s, "num_attention_heads"), whole(s, "vocab_size")
    if facts.names in ("deepseek", "mimo") and whole(s, "num_hidden_layers") != num_layers:
        raise UserError(
            f"config.json describes a target of {s['num_hidden_layers']} layers, but the target at hand has "
            f"{num_layers}; the head belongs to another target"
        )
    attention: AttentionKind = "plain"
    latent, head_dim = None, int(s.get("head_dim") or hidden // heads)
    if facts.family == "deepseek":
        attention, latent = "latent", _latent(s)
        head_dim = latent.nope_dim + latent.rope_dim
    elif facts.family == "qwen":
        attention = "gated"
    draft_vocab = int(facts.draft_vocab_size or vocab)
    first = "layers.0.self_attn."
    return MtpConfig(
        hidden_size=hidden,
        intermediate_size=int(s.get("intermediate_size") or 0),
        num_heads=heads,
        num_kv_heads=heads if latent is not None else int(s.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=hidden,
        taps=(num_layers,),
        attention=attention,
        latent=latent,
        experts=_experts(facts.family, s, weights),
        norm_offset=1.0 if facts.family == "qwen" else 0.0,
        hidden_first=facts.family == "mimo",
        mask_first=facts.family in ("deepseek", "mimo"),
        qk_norm=attention == "plain" and f"{first}q_norm.weight" in weights,
        qkv_bias=f"{first}k_proj.bias" in weights or f"{first}kv_a_proj_with_mqa.bias" in weights,
        o_bias=f"{first}o_proj.bias" in weights,
        mlp_bias="layers.0.mlp.gate_proj.bias" in weights,
        own_embed="embed_tokens.weight" in weights,
        head=which_head(facts.own.get("head"), weights, draft_vocab, vocab),
        rms_norm_eps=float(s.get("rms_norm_eps") or 1e-6),
        hidden_act=str(s.get("hidden_act") or "silu"),
        rope=_rope(facts.family, s),
        max_positions=int(s.get("max_position_embeddings") or 32768),
        trained_depth=facts.trained_depth,
    )


def _latent(s: Mapping[str, Any]) -> LatentSizes:
    return LatentSizes(
        q_lora_rank=None if s.get("q_lora_rank") is None else whole(s, "q_lora_rank"),
        kv_lora_rank=whole(s, "kv_lora_rank"),
        nope_dim=whole(s, "qk_nope_head_dim"),
        rope_dim=whole(s, "qk_rope_head_dim"),
        v_dim=whole(s, "v_head_dim"),
        interleaved=bool(s.get("rope_interleave", True)),
        eps=float(s.get("rms_norm_eps") or 1e-6),
    )


def _experts(family: Family, s: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ExpertSizes | None:
    """Return the mixture's sizes where the block is one, which its tensors tell."""
    if "layers.0.mlp.gate.weight" not in weights:
        return None
    shared = weights.get("layers.0.mlp.shared.gate_proj.weight")
    sizes: dict[str, Any] = {
        "top_k": whole(s, "num_experts_per_tok"),
        "intermediate_size": whole(s, "moe_intermediate_size"),
        "shared_size": 0 if shared is None else int(shared.shape[0]),
        "normalise": bool(s.get("norm_topk_prob", True)),
    }
    if family == "deepseek":
        return ExpertSizes(
            num_experts=whole(s, "n_routed_experts"),
            scoring="sigmoid",
            num_groups=int(s.get("n_group") or 1),
            top_groups=int(s.get("topk_group") or 1),
            scale=float(s.get("routed_scaling_factor") or 1.0),
            **sizes,
        )
    return ExpertSizes(
        num_experts=whole(s, "num_experts"),
        scoring="softmax",
        shared_gate="layers.0.mlp.shared_gate.weight" in weights,
        **sizes,
    )


def _rope(family: Family, s: Mapping[str, Any]) -> dict[str, Any]:
    rope = {k: v for k, v in rope_parameters(s).items() if not k.startswith("mrope")}
    if s.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", s["partial_rotary_factor"])
    if family == "qwen":
        rope.setdefault("partial_rotary_factor", 0.25)
    return rope


def save_mtp(model: MtpModel, path: Path) -> None:
    """Write a dense head in our own format; loading it gives the same weights bit for bit.

    Args:
        model: the head, in the precision it is to be stored in.
        path: a directory, made if need be.

    Raises:
        UserError: the directory cannot be written, or the head is of a family that its target's files hold.
    """
    c = model.config
    plain = c.attention == "plain" and c.experts is None and not c.norm_offset
    if not plain or c.hidden_first or c.mask_first or c.o_bias or c.own_embed:
        raise UserError(
            "only dense heads of our own are written here; a published head stays in its target's files"
        )
    tensors = publish(model.state_dict(), "qwen")
    if c.draft_vocab_size < c.vocab_size:
        ids = model.target_ids
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = model.draft_ids >= 0
    own: dict[str, Any] = {"head": c.head}
    if c.trained_depth is not None:
        own["trained_depth"] = c.trained_depth
    config = {
        "architectures": [OWN_ARCHITECTURE],
        "model_type": "qwen3" if c.qk_norm else "llama",
        **layer_config(c),
        "draft_vocab_size": c.draft_vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "specbench": own,
    }
    write_checkpoint(path, config, tensors)


def publish(weights: Mapping[str, Tensor], names: Literal["qwen", "speculators"]) -> dict[str, Tensor]:
    """Return tensors under published names."""
    places = {ours: published for published, ours in _prefixes(names, {}).items()}
    out: dict[str, Tensor] = {}
    for name, tensor in (split_experts(weights) if names == "qwen" else weights).items():
        prefix = max((p for p in places if name.startswith(p)), key=len)
        name = places[prefix] + name.removeprefix(prefix)
        name = name.replace(".mlp.shared.", ".mlp.shared_expert.").replace(
            ".mlp.shared_gate.", ".mlp.shared_expert_gate."
        )
        if names == "speculators":
            name = re.sub(r"\.mlp\.gate_up_proj$", ".mlp.experts.gate_up_proj", name)
            if tensor.dim() == 3:
                name = re.sub(r"\.mlp\.down_proj$", ".mlp.experts.down_proj", name)
        out[name] = tensor
    return out
