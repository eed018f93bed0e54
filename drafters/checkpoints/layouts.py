"""What each published layout's config.json declares, as one set of facts under plain-layout names.

Two layouts: plain (SafeAILab, SpecForge, vLLM, ModelOpt: one flat dictionary, perhaps with an
``eagle_config`` block) and speculators (``transformer_layer_config`` nested, switches beside it). A key that
could change the computation and that we do not know is never passed over in silence.

Example: ``read_layout({"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True, ...},
notes).flags["norm_output"]``
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench.errors import SpecbenchWarning, UserError


def words(text: str) -> frozenset[str]:
    """Return the words of ``text``."""
    return frozenset(text.split())


FLAGS = ("norm_output", "fc_norm", "norm_before_fc", "norm_before_residual", "attn_output_gate")
"""Switches of the computation; all default to false in the plain layout."""

_SIZES = words(
    """
    hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers
    vocab_size draft_vocab_size target_hidden_size rms_norm_eps hidden_act rope_theta rope_scaling
    rope_parameters max_position_embeddings attention_bias qkv_bias bias mlp_bias
    num_aux_hidden_states layer_types sliding_window use_sliding_window logit_scale
    eagle_aux_hidden_state_layer_ids
    """
)
HARMLESS = words(
    """
    _name_or_path architectures model_type auto_map torch_dtype dtype transformers_version use_cache
    initializer_range attention_dropout pretraining_tp tie_word_embeddings bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id unk_token_id max_window_layers num_target_layers
    target_model_type target_model_name_or_path base_model_name_or_path num_lookahead_tokens
    ttt_length eagle_version target_layer_count hidden_dropout original_max_position_embeddings
    """
)
_BLOCKS = frozenset({"eagle_config", "specbench"})
_NEUTRAL: Mapping[str, tuple[Any, str]] = {
    # key: (the only value we compute, what any other value would mean)
    "is_causal": (True, "attention in both directions"),
    "is_neox_style": (True, "interleaved rotary pairs"),
    "partial_rotary_factor": (1.0, "partial rotary positions"),
    "quantization_config": (None, "quantized weights"),
    "compression_config": (None, "quantized weights"),
    "parallel_drafting": (False, "parallel drafting (P-EAGLE)"),
    "pard_token": (None, "parallel drafting (P-EAGLE)"),
    "mask_token_id": (None, "parallel drafting (P-EAGLE)"),
    "q_lora_rank": (None, "multi-head latent attention"),
    "kv_lora_rank": (None, "multi-head latent attention"),
    "num_experts": (None, "a mixture of experts"),
    "num_local_experts": (None, "a mixture of experts"),
    "attn_logit_softcapping": (None, "soft-capped attention"),
    "final_logit_softcapping": (None, "soft-capped logits"),
    "query_pre_attn_scalar": (None, "another attention scale"),
    "attention_multiplier": (None, "another attention scale"),
    "residual_multiplier": (1.0, "a scaled residual"),
    "embedding_multiplier": (1.0, "scaled embeddings"),
}
_EAGLE_NEUTRAL: Mapping[str, tuple[Any, str]] = {
    "use_last_layernorm": (True, "a head without the final norm"),
    "use_input_layernorm_in_first_layer": (True, "un-normed embeddings"),
    "use_mtp_layernorm": (False, "MTP norms"),
    "next_layer_regular": (True, "later layers that also read embeddings"),
    "parallel_draft_step": (1, "parallel drafting"),
}
_SPECBENCH_KEYS = frozenset({"head", "sink", "positions", "trained_depth"})
_SPECULATORS_KEYS = words(
    """
    speculators_model_type speculators_version speculators_config transformer_layer_config
    draft_vocab_size target_hidden_size norm_before_residual norm_before_fc fc_norm norm_output
    embed_requires_grad eagle_aux_hidden_state_layer_ids has_no_defaults_at_init
    """
)


class Notes:
    """Oddities found while loading: warned about at once, and kept for the result rows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        """Say ``line`` to the user and keep it."""
        self.lines.append(line)
        warnings.warn(line, SpecbenchWarning, stacklevel=2)

    def add(self, line: str) -> None:
        """Keep ``line`` without a warning."""
        self.lines.append(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a config.json declares."""

    layout: str
    """``plain`` or ``speculators``."""
    sizes: Mapping[str, Any]
    """Plain keys that ``load`` reads: widths, counts, RoPE, biases, windows."""
    flags: Mapping[str, bool]
    taps: tuple[int, ...] | None
    """As written; None where the file names none."""
    use_aux: bool = True
    """False: the last hidden state is the input, without fc."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The ``specbench`` block."""
    trained_depth: int | None = None


def read_layout(config: Mapping[str, Any], notes: Notes) -> Facts:
    """Return the facts of a config.json of any known layout.

    Raises:
        UserError: a key asks for a computation we do not do, or has the wrong type.
    """
    if "speculators_model_type" in config:
        return _read_speculators(config, notes)
    return _read_plain(config, notes)


def _read_plain(config: Mapping[str, Any], notes: Notes) -> Facts:
    eagle = config.get("eagle_config") or {}
    own = config.get("specbench") or {}
    _check_neutral(config, _NEUTRAL)
    _check_neutral(eagle, _EAGLE_NEUTRAL, "eagle_config.")
    known = _SIZES | _BLOCKS | set(FLAGS) | set(_NEUTRAL)
    warn_unknown(config, known, "", notes)
    known_eagle = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"} | set(
        _EAGLE_NEUTRAL
    )
    warn_unknown(eagle, known_eagle, "eagle_config.", notes)
    _check_own(own)
    flags = {name: _flag(config, name) for name in FLAGS}
    if "norm_before_fc" in eagle:
        flags["norm_before_fc"] = _flag(eagle, "norm_before_fc")
    top, nested = (
        config.get("eagle_aux_hidden_state_layer_ids"),
        eagle.get("eagle_aux_hidden_state_layer_ids"),
    )
    if top and nested and list(top) != list(nested):
        notes.warn(
            f"config.json names taps {list(top)} at the top and {list(nested)} in eagle_config; the top ones "
            "are used, "
            "as in vLLM: remove one"
        )
    if flags["norm_output"] and not flags["fc_norm"] and not own:
        notes.warn(
            "config.json sets norm_output without fc_norm: SpecForge of June to September 2026 wrote that "
            "for drafters "
            "that feed back the raw state; if acceptance is low, compare with @feedback=pre"
        )
    return Facts(
        layout="plain",
        sizes={k: v for k, v in config.items() if k in _SIZES},
        flags=flags,
        taps=_ids(top or nested),
        use_aux=_flag(eagle, "use_aux_hidden_state", True),
        own=own,
        trained_depth=own.get("trained_depth"),
    )


def _read_speculators(config: Mapping[str, Any], notes: Notes) -> Facts:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise UserError(f"this speculators checkpoint is of type {kind!r}; eagle3 loads only type 'eagle3'")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("this speculators config.json lacks transformer_layer_config")
    _check_neutral(layer, _NEUTRAL, "transformer_layer_config.")
    known = _SIZES | set(_NEUTRAL)
    warn_unknown(layer, known, "transformer_layer_config.", notes)
    warn_unknown(config, _SPECULATORS_KEYS, "", notes)
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise UserError(
            f"transformer_layer_config.model_type {layer['model_type']!r} is neither llama nor qwen3"
        )
    depth = check_lossless(config)
    flags = {name: _flag(config, name) for name in FLAGS}
    if "norm_before_residual" not in config:
        flags["norm_before_residual"] = True
        notes.warn(
            "config.json lacks norm_before_residual: vLLM takes true, the speculators library false; true "
            "is used "
            "here. Write the key into config.json"
        )
    sizes = {k: v for k, v in layer.items() if k in _SIZES}
    sizes |= {k: config[k] for k in ("draft_vocab_size", "target_hidden_size") if config.get(k) is not None}
    return Facts(
        layout="speculators",
        sizes=sizes,
        flags=flags,
        taps=_ids(config.get("eagle_aux_hidden_state_layer_ids")),
        trained_depth=depth,
    )


def check_lossless(config: Mapping[str, Any]) -> int | None:
    """Return the draft tokens that a speculators config.json proposes; None where it does not say.

    Raises:
        UserError: it asks for lossy acceptance.
    """
    proposal = config.get("speculators_config") or {}
    depth = None
    for method in proposal.get("proposal_methods") or ():
        depth = depth or method.get("speculative_tokens")
        if (method.get("verifier_accept_k") or 1) > 1 or (method.get("accept_tolerance") or 0) > 0:
            raise UserError(
                "speculators_config asks for lossy acceptance (verifier_accept_k above 1 or "
                "accept_tolerance above 0); "
                "specbench measures lossless decoding only: set them to 1 and 0"
            )
    return depth


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"config.json: {name} must be true or false, not {value!r}")
    return value


def _ids(value: Any) -> tuple[int, ...] | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise UserError(
            f"config.json: eagle_aux_hidden_state_layer_ids must be a list of whole numbers, not {value!r}"
        )
    return tuple(value)


def _check_neutral(config: Mapping[str, Any], table: Mapping[str, tuple[Any, str]], prefix: str = "") -> None:
    for key, (value, meaning) in table.items():
        if config.get(key) is not None and config[key] != value:
            raise UserError(
                f"config.json: {prefix}{key} = {config[key]!r} means {meaning}, which is not supported"
            )


def warn_unknown(config: Mapping[str, Any], known: Iterable[str], prefix: str, notes: Notes) -> None:
    """Warn of every key that nobody reads and that is not known to be harmless."""
    for key in sorted(set(config) - set(known) - HARMLESS - _generation_keys()):
        notes.warn(
            f"config.json: {prefix}{key} is not known here and has no effect; if it changes the computation, "
            "the "
            "acceptance measured here is too low. Remove the key to silence this"
        )


def _check_own(own: Mapping[str, Any]) -> None:
    for key in sorted(set(own) - _SPECBENCH_KEYS):
        raise UserError(f"config.json: specbench.{key} is unknown; the file was written by a newer specbench")


def _generation_keys() -> set[str]:
    """Keys that transformers writes into every configuration and that concern generation or bookkeeping."""
    from transformers import PretrainedConfig

    return set(PretrainedConfig().to_dict())
