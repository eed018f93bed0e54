"""DFlash checkpoints: z-lab's layout, which vLLM reads, and the speculators library's.

The published ``target_layer_ids`` count the layers a state has left, so tap = id + 1; speculators'
``aux_hidden_state_layer_ids`` are taps as they stand.

Example: ``loaded = load_dflash("z-lab/Qwen3-8B-DFlash-b16", target)``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from specbench.drafters.checkpoints.files import find, read_config, read_tensors
from specbench.drafters.checkpoints.layouts import Notes, check_lossless, warn_unknown, words
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
from specbench.drafters.dflash import ContextNorm, DFlashConfig, DFlashModel, default_target_layers
from specbench.drafters.modules import check_target
from specbench.drafters.resolve import check_options
from specbench.errors import UserError, unknown_name
from specbench.types import TargetWeights

Layout = Literal["dflash", "speculators"]

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "block": (),
    "context_norm": get_args(ContextNorm),
    "taps_offset": ("-1", "0", "1"),
    "vocab_map": ("declared", "identity"),
}
"""Option -> its values; ``block`` takes a whole number."""

MASK_FILE = "mask_embedding.pt"

_REFUSED: Mapping[str, tuple[Any, str]] = {
    # key: (the only value computed here, what any other value would mean)
    "sample_from_anchor": (False, "a block whose first slot is drafted too"),
    "attention_sink_bias": (False, "learned attention sinks"),
    "add_swa_attention_sink_bias": (False, "learned attention sinks"),
    "use_aux_hidden_state": (True, "a context of the last state alone"),
    "is_neox_style": (True, "interleaved rotary pairs"),
    "quantization_config": (None, "quantized weights"),
    "conv_kernel_size": (None, "a DFlash2 convolution"),
    "selector_rank": (None, "a DFlash2 selector"),
    "markov_rank": (None, "a DSpark Markov head"),
}

_KNOWN = words(
    """
    hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers vocab_size
    draft_vocab_size target_hidden_size rms_norm_eps hidden_act rope_theta rope_scaling rope_parameters
    max_position_embeddings attention_bias mlp_bias layer_types sliding_window use_sliding_window logit_scale
    block_size mask_token_id target_layer_ids taps causal is_causal use_swa swa_window_size attention_value_scale
    has_own_lm_head specbench speculators_model_type speculators_version speculators_config
    aux_hidden_state_layer_ids sliding_window_non_causal embed_requires_grad
    """
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedDFlash:
    """A drafter from a file."""

    model: DFlashModel
    notes: tuple[str, ...]
    """Everything found odd, and every option that departs from the file."""


def load_dflash(where: str, target: TargetWeights, options: Mapping[str, str] | None = None) -> LoadedDFlash:
    """Load the checkpoint at ``where``.

    Args:
        where: directory, or Hugging Face repository.
        target: whose tensors it shares; the weights take its precision and device.
        options: ``block`` (positions of a block), ``context_norm=layer0`` (the CPU engine's defect),
            ``taps_offset``, ``vocab_map``.

    Raises:
        UserError: a tensor is missing, unused or of the wrong shape; a key is missing or unsupported; the drafter
            does not fit the target; an option is unknown.
    """
    options = dict(options or {})
    _check_options(options)
    directory = find(where)
    notes = Notes()
    facts = _flatten(read_config(directory))
    _refuse(facts)
    warn_unknown(facts, _KNOWN | set(_REFUSED), "", notes)
    weights, maps = _split(read_tensors(directory), notes)
    mask = _mask_embedding(directory, facts)
    if mask is not None:
        weights["mask_embedding"] = mask
    for name, table in (("embed_tokens.weight", target.embed), ("lm_head.weight", target.head)):
        if name in weights and same(weights[name], table):
            del weights[name]
    config = _config(facts, weights, target, options, notes)
    check_target(config, target)
    if options.get("vocab_map") == "identity":
        ids = torch.arange(config.draft_vocab_size)
    else:
        ids = target_ids(config.draft_vocab_size, config.vocab_size, maps, notes)
    # the layout alone, on no device: shapes are all that is wanted
    with torch.device("meta"):
        needed = DFlashModel(config, on_meta(target)).state_dict()
    check_weights(weights, needed, _hint)
    model = DFlashModel(config, target, ids)
    model.load_state_dict({n: t.to(model.dtype) for n, t in weights.items()}, strict=True)
    for name, value in options.items():
        notes.add(f"option {name}={value}")
    return LoadedDFlash(model=model.eval(), notes=tuple(notes.lines))


def _check_options(options: Mapping[str, str]) -> None:
    check_options("dflash", options, OPTIONS)
    for name, value in options.items():
        if OPTIONS[name] and value not in OPTIONS[name]:
            raise unknown_name(f"value of {name}", value, OPTIONS[name])
        if name == "block" and not (value.isdecimal() and int(value) > 1):
            raise UserError(f"option block must be a whole number of at least 2, not {value!r}")


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return one flat dictionary under z-lab's names, ``taps`` among them where the file names any.

    Raises:
        UserError: the checkpoint is of another type, or lacks what it must say.
    """
    if "speculators_model_type" not in config:
        own = dict(config.get("dflash_config") or {})
        facts = {k: v for k, v in config.items() if k != "dflash_config"} | own
        ids = facts.get("target_layer_ids")
        facts["taps"] = None if ids is None else [int(i) + 1 for i in ids]
        return facts
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise UserError(f"this speculators checkpoint is of type {kind!r}; dflash loads only type 'dflash'")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("this speculators config.json lacks transformer_layer_config")
    check_lossless(config)
    facts = {
        **layer,
        **{k: v for k, v in config.items() if k != "transformer_layer_config" and v is not None},
    }
    if not facts.get("aux_hidden_state_layer_ids"):
        raise UserError(
            "config.json lacks aux_hidden_state_layer_ids: which states the drafter reads is unknown"
        )
    facts["taps"] = [int(i) for i in facts["aux_hidden_state_layer_ids"]]
    facts["causal"] = not facts.get("sliding_window_non_causal", True)
    return facts


def _refuse(facts: Mapping[str, Any]) -> None:
    for key, (value, meaning) in _REFUSED.items():
        if facts.get(key) is not None and facts[key] != value:
            raise UserError(f"config.json: {key} = {facts[key]!r} means {meaning}, which is not supported")


def _split(tensors: Mapping[str, Tensor], notes: Notes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights under our module's names, and the vocabulary maps d2t and t2d."""
    weights: dict[str, Tensor] = {}
    maps: dict[str, Tensor] = {}
    for published, tensor in tensors.items():
        name = published.removeprefix("model.")
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
        if name in ("d2t", "t2d"):
            maps[name] = tensor
        elif name == "mask_hidden":
            raise UserError(
                "the checkpoint holds mask_hidden, which belongs to parallel drafting with EAGLE (P-EAGLE); DFlash "
                "embeds its masks as mask_token_id"
            )
        elif name.startswith("verifier_"):
            notes.add(f"{published} is not used: it is a copy of the target's")
        elif not name.endswith("rotary_emb.inv_freq"):
            weights[name] = tensor
    return weights, maps


_PREFIXES: Mapping[str, str] = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


def _mask_embedding(directory: Path, facts: Mapping[str, Any]) -> Tensor | None:
    """Return the mask's own embedding [H] from the file beside the weights, where there is one."""
    file = directory / MASK_FILE
    if not file.is_file():
        return None
    state = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(state, dict):
        declared = facts.get("mask_token_id")
        if state.get("mask_token_id", declared) != declared:
            raise UserError(
                f"{MASK_FILE} is of token {state['mask_token_id']}, but config.json names mask_token_id {declared}"
            )
        state = state.get("embedding")
    if not isinstance(state, Tensor):
        raise UserError(f"{MASK_FILE} holds no tensor")
    return state.reshape(-1)


def _config(
    facts: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: TargetWeights,
    options: Mapping[str, str],
    notes: Notes,
) -> DFlashConfig:
    hidden, heads = whole(facts, "hidden_size"), whole(facts, "num_attention_heads")
    num_layers, vocab = whole(facts, "num_hidden_layers"), whole(facts, "vocab_size")
    if facts.get("mask_token_id") is None:
        raise UserError(
            "config.json names no mask_token_id, so what stands at the places to fill is unknown; write the one used "
            "in training into dflash_config"
        )
    block = int(options["block"]) if "block" in options else whole(facts, "block_size")
    if "block" in options and facts.get("block_size") not in (None, block):
        notes.add(f"trained with blocks of {facts['block_size']}, run with blocks of {block}")
    draft_vocab = int(facts.get("draft_vocab_size") or vocab)
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=whole(facts, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(facts.get("num_key_value_heads") or heads),
        head_dim=int(facts.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=int(facts.get("target_hidden_size") or hidden),
        taps=_taps(facts, weights, target, num_layers, int(options.get("taps_offset", "0"))),
        num_layers=num_layers,
        block_size=block,
        mask_token_id=whole(facts, "mask_token_id"),
        causal=_causal(facts, num_layers),
        windows=_windows(facts, num_layers),
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        o_bias="layers.0.self_attn.o_proj.bias" in weights,
        mlp_bias="layers.0.mlp.gate_proj.bias" in weights,
        own_embed="embed_tokens.weight" in weights,
        own_mask="mask_embedding" in weights,
        head=which_head((facts.get("specbench") or {}).get("head"), weights, draft_vocab, vocab),
        value_scale=float(facts.get("attention_value_scale") or 1.0),
        rms_norm_eps=float(facts.get("rms_norm_eps") or 1e-6),
        hidden_act=str(facts.get("hidden_act") or "silu"),
        logit_scale=float(facts.get("logit_scale") or 1.0),
        rope=rope_parameters({"rope_theta": 1_000_000.0} | {k: v for k, v in facts.items() if v is not None}),
        max_positions=int(facts.get("max_position_embeddings") or 32768),
        context_norm="layer0" if options.get("context_norm") == "layer0" else "own",
    )


def _taps(
    facts: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: TargetWeights,
    num_layers: int,
    offset: int,
) -> tuple[int, ...]:
    depth = target.info.num_layers
    declared = facts.get("num_target_layers")
    taps = tuple(facts["taps"]) if facts.get("taps") else default_target_layers(depth, num_layers)
    # z-lab's num_target_layers is the target's depth, TorchSpec's the number of states that are read
    if declared is not None and int(declared) not in (depth, len(taps)):
        raise UserError(
            f"config.json: num_target_layers = {declared}, but {target.info.name} has {depth} layers; the drafter was "
            "trained for another target"
        )
    fc = weights.get("fc.weight")
    width = int(facts.get("target_hidden_size") or facts["hidden_size"])
    if fc is not None and fc.shape[1] != len(taps) * width:
        raise UserError(
            f"fc.weight reads {fc.shape[1]} numbers, but {len(taps)} states {list(taps)} of width {width} give "
            f"{len(taps) * width}; set target_layer_ids and target_hidden_size in config.json"
        )
    return tuple(t + offset for t in taps)


def _causal(facts: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Per layer, as vLLM resolves it: is_causal, else causal, else sliding layers are and full ones are not."""
    kinds = facts.get("layer_types") or ()
    causal = tuple(kind == "sliding_attention" for kind in kinds[:num_layers])
    for key in ("is_causal", "causal"):
        if facts.get(key) is not None:
            causal = (bool(facts[key]),) * num_layers
            break
    return causal if any(causal) else ()


def _windows(facts: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    kinds, forced = facts.get("layer_types"), bool(facts.get("use_swa"))
    if kinds is not None and len(kinds) < num_layers:
        raise UserError(f"config.json: layer_types names {len(kinds)} layers of {num_layers}")
    sliding = [kind == "sliding_attention" for kind in kinds[:num_layers]] if kinds else [False] * num_layers
    if forced and not any(sliding):
        sliding = [True] * num_layers
    if not any(sliding):
        return ()
    window = facts.get("swa_window_size") or facts.get("sliding_window")
    if not window:
        raise UserError(
            "config.json asks for sliding attention but sets neither swa_window_size nor sliding_window"
        )
    return tuple(int(window) if s else None for s in sliding)


def _hint(name: str) -> str | None:
    if "attention_sink_bias" in name:
        return "learned attention sinks are not supported"
    return None


def save_dflash(
    model: DFlashModel, path: Path, layout: Layout = "dflash", target: TargetWeights | None = None
) -> None:
    """Write a drafter; loading it gives the same weights bit for bit.

    Args:
        model: the drafter, in the precision it is to be stored in.
        path: a directory, made if need be.
        layout: ``dflash`` (z-lab, vLLM) or ``speculators``.
        target: named in speculators' files. Given, head rows shared with it are written out, for engines.

    Raises:
        UserError: the directory cannot be written, or the layout cannot hold the drafter.
    """
    c = model.config
    tensors = dict(model.state_dict())
    mask = tensors.pop("mask_embedding", None)
    if c.draft_vocab_size < c.vocab_size:
        ids = model.target_ids
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = model.draft_ids >= 0
    if c.head == "target_rows" and target is not None:
        tensors["lm_head.weight"] = model.head_weight()
    config = (
        _speculators_config(model, target) if layout == "speculators" else _published_config(model, target)
    )
    write_checkpoint(path, config, tensors)
    if mask is not None:
        torch.save({"mask_token_id": c.mask_token_id, "embedding": mask.detach().cpu()}, path / MASK_FILE)


def _published_config(model: DFlashModel, target: TargetWeights | None) -> dict[str, Any]:
    c = model.config
    if c.context_norm != "own":
        raise UserError(
            "context_norm=layer0 models a defect of an engine and cannot be stored; load without it"
        )
    own: dict[str, Any] = {
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": [t - 1 for t in c.taps],
    }
    causal = {c.is_causal(i) for i in range(c.num_layers)}
    if causal != {False}:
        if len(causal) > 1 and [w is not None for w in c.windows] != list(c.causal):
            raise UserError("layers that differ in causality other than by their window cannot be stored")
        if len(causal) == 1:
            own["causal"] = True
    elif any(c.windows):
        own["causal"] = False
    if c.value_scale != 1.0:
        own["attention_value_scale"] = c.value_scale
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **layer_config(c),
        "block_size": c.block_size,
        "dflash_config": own,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if c.draft_vocab_size != c.vocab_size:
        config["draft_vocab_size"] = c.draft_vocab_size
    if c.target_hidden_size != c.hidden_size:
        config["target_hidden_size"] = c.target_hidden_size
    if c.logit_scale != 1.0:
        config["logit_scale"] = c.logit_scale
    if c.head == "target_rows" and target is None:
        config["specbench"] = {"head": "target_rows"}
    return config


def _speculators_config(model: DFlashModel, target: TargetWeights | None) -> dict[str, Any]:
    c = model.config
    if c.own_mask or c.value_scale != 1.0 or c.logit_scale != 1.0 or c.context_norm != "own":
        raise UserError(
            "the speculators layout cannot hold a mask embedding, a value scale, a logit scale or context_norm=layer0"
        )
    if target is None:
        raise UserError("the speculators layout names the target; give one")
    sliding = [w is not None for w in c.windows] or [False] * c.num_layers
    causal = [c.is_causal(i) for i in range(c.num_layers)]
    if any(causal) and not all(causal):
        raise UserError("the speculators layout cannot hold layers that differ in causality")
    if all(causal) and not all(sliding):
        raise UserError(
            "the speculators library runs full attention both ways; causal layers need a window there"
        )
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": list(c.taps),
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not all(causal),
        "transformer_layer_config": {"model_type": "qwen3", **layer_config(c)},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": c.max_depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(target.path) if target.path is not None else target.info.name,
                "architectures": [],
            },
        },
        "dtype": str(model.dtype).removeprefix("torch."),
    }
