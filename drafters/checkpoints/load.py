"""Loading an EAGLE-3 checkpoint of any published layout, strictly: every tensor used, every flag honoured.

Example: ``loaded = load_checkpoint("runs/my-drafter", target, {"window": "1024", "sink": "bos"})``
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from specbench.drafters.checkpoints.files import find, read_config, read_tensors
from specbench.drafters.checkpoints.layouts import Facts, Notes, read_layout
from specbench.drafters.checkpoints.strict import (
    check_weights,
    on_meta,
    rope_parameters,
    same,
    target_ids,
    which_head,
)
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model, Feedback, Positions, Sink, default_taps
from specbench.drafters.modules import check_target
from specbench.drafters.resolve import check_options
from specbench.errors import UserError, unknown_name
from specbench.types import TargetWeights

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "window": (),
    "sink": get_args(Sink),
    "positions": get_args(Positions),
    "feedback": get_args(Feedback),
    "taps_offset": ("-1", "0", "1"),
    "input_norm": ("declared", "bypass"),
    "vocab_map": ("declared", "identity"),
}
"""Option -> its values; ``window`` takes a whole number or ``none``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A drafter from a file."""

    model: Eagle3Model
    notes: tuple[str, ...]
    """Everything found odd, and every option that departs from the file."""


def load_checkpoint(where: str, target: TargetWeights, options: Mapping[str, str] | None = None) -> Loaded:
    """Load the checkpoint at ``where``.

    Args:
        where: directory, or Hugging Face repository.
        target: whose tensors it shares; the weights take its precision and device.
        options: departures from the file; see ``OPTIONS``.

    Raises:
        UserError: a tensor is missing, unused or of the wrong shape; a flag is unknown or unsupported; the
            drafter does not fit the target; an option is unknown.
    """
    options = dict(options or {})
    _check_options(options)
    directory = find(where)
    notes = Notes()
    facts = read_layout(read_config(directory), notes)
    weights, maps = _normalise(read_tensors(directory), notes)
    _refuse_eagle1(facts, weights, maps)
    if options.get("input_norm") == "bypass":
        weights = {n: t for n, t in weights.items() if not n.startswith(("fc_norm.", "input_norm."))}
    embed = weights.get("embed_tokens.weight")
    if embed is not None and same(embed, target.embed):
        del weights["embed_tokens.weight"]
    config = _config(facts, weights, target, options, notes)
    check_target(config, target)
    if options.get("vocab_map") == "identity":
        ids = torch.arange(config.draft_vocab_size)
    else:
        ids = target_ids(config.draft_vocab_size, config.vocab_size, maps, notes)
    # the layout alone, on no device: shapes are all that is wanted
    with torch.device("meta"):
        needed = Eagle3Model(config, on_meta(target)).state_dict()
    check_weights(weights, needed, _hint)
    model = Eagle3Model(config, target, ids)
    model.load_state_dict({n: t.to(model.dtype) for n, t in weights.items()}, strict=True)
    for name, value in options.items():
        notes.add(f"option {name}={value}")
    return Loaded(model=model.eval(), notes=tuple(notes.lines))


def _check_options(options: Mapping[str, str]) -> None:
    check_options("eagle3", options, OPTIONS)
    for name, value in options.items():
        if OPTIONS[name] and value not in OPTIONS[name]:
            raise unknown_name(f"value of {name}", value, OPTIONS[name])
        if name == "window" and value != "none" and not (value.isdecimal() and int(value) > 0):
            raise UserError(f"option window must be a positive whole number or none, not {value!r}")


def _normalise(tensors: Mapping[str, Tensor], notes: Notes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights under our module's names, and the vocabulary maps d2t and t2d."""
    weights: dict[str, Tensor] = {}
    maps: dict[str, Tensor] = {}
    for published, tensor in tensors.items():
        name = re.sub(r"^midlayer\.", "layers.0.", published.removeprefix("model."))
        if name in ("d2t", "t2d"):
            maps[name] = tensor
        elif name.endswith("rotary_emb.inv_freq"):
            continue
        elif re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name):
            notes.add(f"{published} is not used: only layer 0 reads the target's hidden state")
        elif name in weights:
            raise UserError(f"the checkpoint holds {published} twice under two names; keep one")
        else:
            weights[name] = tensor
    return weights, maps


def _refuse_eagle1(facts: Facts, weights: Mapping[str, Tensor], maps: Mapping[str, Tensor]) -> None:
    fc, width = weights.get("fc.weight"), facts.sizes.get("hidden_size")
    if fc is not None and width and fc.shape[1] == 2 * width and "norm.weight" not in weights and not maps:
        raise UserError(
            "this is an EAGLE-1 or EAGLE-2 head (fc reads embedding and hidden state, no final norm, no "
            "draft "
            "vocabulary), whose computation differs; specbench loads EAGLE-3 heads"
        )


def _config(
    facts: Facts,
    weights: Mapping[str, Tensor],
    target: TargetWeights,
    options: Mapping[str, str],
    notes: Notes,
) -> Eagle3Config:
    sizes = facts.sizes
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(sizes.get(key), int):
            raise UserError(f"config.json: {key} must be a whole number, not {sizes.get(key)!r}")
    hidden, heads = int(sizes["hidden_size"]), int(sizes["num_attention_heads"])
    num_layers = int(sizes.get("num_hidden_layers") or 1)
    draft_vocab = int(sizes.get("draft_vocab_size") or sizes["vocab_size"])
    bypass = options.get("input_norm") == "bypass"
    biases = _biases(facts, weights)
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=int(sizes["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(sizes.get("num_key_value_heads") or heads),
        head_dim=int(sizes.get("head_dim") or hidden // heads),
        vocab_size=int(sizes["vocab_size"]),
        draft_vocab_size=draft_vocab,
        target_hidden_size=int(sizes.get("target_hidden_size") or hidden),
        taps=_taps(facts, weights, target, int(options.get("taps_offset", "0")), notes),
        num_layers=num_layers,
        feedback=_feedback(facts, options),
        norm_per_tap=facts.flags["fc_norm"] and not bypass,
        norm_joint=facts.flags["norm_before_fc"] and not bypass,
        norm_before_residual=facts.flags["norm_before_residual"],
        gate=facts.flags["attn_output_gate"],
        qk_norm="layers.0.self_attn.q_norm.weight" in weights,
        fc=facts.use_aux,
        windows=_windows(facts, options, num_layers, notes),
        own_embed="embed_tokens.weight" in weights,
        head=which_head(facts.own.get("head"), weights, draft_vocab, int(sizes["vocab_size"])),
        rms_norm_eps=float(sizes.get("rms_norm_eps") or 1e-6),
        hidden_act=str(sizes.get("hidden_act") or "silu"),
        logit_scale=float(sizes.get("logit_scale") or 1.0),
        rope=rope_parameters(sizes),
        max_positions=int(sizes.get("max_position_embeddings") or 2048),
        trained_depth=facts.trained_depth,
        **biases,
        **_attention(facts, options),
    )


def _feedback(facts: Facts, options: Mapping[str, str]) -> Feedback:
    declared: Feedback = "post" if facts.flags["norm_output"] else "pre"
    return {"pre": "pre", "post": "post"}.get(options.get("feedback", declared), declared)  # type: ignore[return-value]


def _attention(facts: Facts, options: Mapping[str, str]) -> dict[str, Any]:
    """Sink and positions; a window switched off takes them along."""
    sink = options.get("sink", facts.own.get("sink", "none"))
    positions = options.get("positions", facts.own.get("positions", "absolute"))
    if options.get("window") == "none":
        sink, positions = options.get("sink", "none"), options.get("positions", "absolute")
    elif options.get("sink") == "none":
        positions = options.get("positions", "absolute")
    if sink not in get_args(Sink) or positions not in get_args(Positions):
        raise UserError(
            f"config.json: specbench block names sink {sink!r} and positions {positions!r}, unknown here"
        )
    return {"sink": sink, "positions": positions}


def _windows(
    facts: Facts, options: Mapping[str, str], num_layers: int, notes: Notes
) -> tuple[int | None, ...]:
    if "window" in options:
        value = options["window"]
        return () if value == "none" else (int(value),) * num_layers
    kinds, window = facts.sizes.get("layer_types"), facts.sizes.get("sliding_window")
    if not kinds:
        if window:
            notes.warn(
                f"config.json sets sliding_window = {window} without layer_types, which vLLM ignores: full "
                "attention "
                f"is used. Add layer_types, or @window={window}"
            )
        return ()
    if len(kinds) < num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UserError(
            f"config.json: layer_types {kinds!r} must say sliding_attention or full_attention per layer"
        )
    if "sliding_attention" in kinds[:num_layers] and not window:
        raise UserError("config.json: layer_types asks for sliding_attention but sliding_window is not set")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])
    return windows if any(windows) else ()


def _taps(
    facts: Facts, weights: Mapping[str, Tensor], target: TargetWeights, offset: int, notes: Notes
) -> tuple[int, ...]:
    depth = target.info.num_layers
    count = facts.sizes.get("num_aux_hidden_states")
    if not facts.use_aux:
        return (depth,)
    taps = facts.taps or default_taps(depth)
    if list(taps) != sorted(set(taps)):
        if len(set(taps)) < len(taps):
            raise UserError(
                f"config.json names taps {list(taps)} with a duplicate, which vLLM drops; name distinct ones"
            )
        notes.warn(f"config.json names taps {list(taps)} out of order; they are sorted, as in vLLM")
        taps = tuple(sorted(taps))
    if facts.taps and taps[0] == 1:
        notes.warn(
            f"config.json names taps {list(taps)}: vLLM reads them as they stand, as is done here, while "
            "SGLang adds 1 "
            "to ids that begin with 1; if acceptance is low, compare with @taps_offset=1"
        )
    if count is not None and count != len(taps):
        raise UserError(
            f"config.json: num_aux_hidden_states = {count}, but {len(taps)} taps {list(taps)} are in use"
        )
    fc = weights.get("fc.weight")
    width = int(facts.sizes.get("target_hidden_size") or facts.sizes["hidden_size"])
    if fc is not None and fc.shape[1] != len(taps) * width:
        raise UserError(
            f"fc.weight reads {fc.shape[1]} numbers, but {len(taps)} taps {list(taps)} of width {width} give "
            f"{len(taps) * width}; set eagle_aux_hidden_state_layer_ids and target_hidden_size in config.json"
        )
    taps = tuple(t + offset for t in taps)
    if taps[-1] == depth:
        notes.warn(
            f"tap {depth} is the target's last hidden state: specbench takes it behind the final norm, as "
            "transformers "
            "gives it, vLLM before it; choose a lower tap"
        )
    return taps


def _biases(facts: Facts, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Biases are used where the file holds them, which it may only if config.json says so."""
    sizes = facts.sizes
    declared = {
        "qkv_bias": sizes.get("qkv_bias", sizes.get("attention_bias")) or sizes.get("bias"),
        "o_bias": sizes.get("attention_bias") or sizes.get("bias"),
        "mlp_bias": sizes.get("mlp_bias"),
        "fc_bias": sizes.get("bias"),
    }
    tensors = {
        "qkv_bias": "layers.0.self_attn.q_proj.bias",
        "o_bias": "layers.0.self_attn.o_proj.bias",
        "mlp_bias": "layers.0.mlp.gate_proj.bias",
        "fc_bias": "fc.bias",
    }
    keys = {
        "qkv_bias": "attention_bias",
        "o_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "fc_bias": "bias",
    }
    for name, tensor in tensors.items():
        if tensor in weights and not declared[name]:
            raise UserError(
                f"the file holds {tensor}, but config.json does not set {keys[name]}: set it to true"
            )
    if declared["qkv_bias"] and not sizes.get("bias") and tensors["qkv_bias"] not in weights:
        raise UserError(f"config.json sets attention_bias, but the file lacks {tensors['qkv_bias']}")
    if declared["mlp_bias"] and tensors["mlp_bias"] not in weights:
        raise UserError(f"config.json sets mlp_bias, but the file lacks {tensors['mlp_bias']}")
    return {name: tensor in weights for name, tensor in tensors.items()}


_HINTS: Mapping[str, str] = {
    "fc_norm.": "set fc_norm to true in config.json, or take the tensors out",
    "input_norm.": "set norm_before_fc to true in config.json, or take the tensors out",
    "mask_hidden": "it belongs to parallel drafting (P-EAGLE), which is not supported",
}


def _hint(name: str) -> str | None:
    if "g_proj" in name:
        return "set attn_output_gate to true in config.json, or take the tensor out"
    return next((h for prefix, h in _HINTS.items() if name.startswith(prefix)), None)
