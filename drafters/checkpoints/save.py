"""Writing drafters: our own format, which is the SpecForge/vLLM layout plus a ``specbench`` block, and
exports.

Example: ``save_drafter(model, Path("runs/my-drafter"))``; ``export("runs/my-drafter", "vllm", Path("out"),
target)``
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.write import layer_config, write_checkpoint
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.errors import UserError, unknown_name
from specbench.types import TargetWeights

Format = Literal["vllm", "specforge", "speculators"]


def save_drafter(model: Eagle3Model, path: Path, *, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``; loading them gives the same weights bit for bit.

    Args:
        model: the drafter, in the precision it is to be stored in.
        path: a directory, made if need be.
        extra: tensors to add, for exports.

    Raises:
        UserError: the directory cannot be written.
    """
    config = plain_config(model.config, model.dtype)
    own = _own_block(model.config)
    if own:
        config["specbench"] = own
    write_checkpoint(path, config, _tensors(model) | dict(extra or {}))


def export(where: str, format: str, out: Path, target: TargetWeights) -> None:
    """Write the checkpoint at ``where`` in a published layout.

    Args:
        where: directory or Hugging Face repository.
        format: ``vllm``, ``specforge`` or ``speculators``.
        out: a directory, made if need be.
        target: the drafter's target; a head made of its rows is written out.

    Raises:
        UserError: the format is unknown or cannot express the drafter.
    """
    if format not in get_args(Format):
        raise unknown_name("export format", format, get_args(Format))
    export_model(load_checkpoint(where, target).model, format, out, target)


def export_model(model: Eagle3Model, format: str, out: Path, target: TargetWeights) -> None:
    """Write a drafter in memory in a published layout; see ``export``.

    Raises:
        UserError: the format is unknown or cannot express the drafter.
    """
    if format not in get_args(Format):
        raise unknown_name("export format", format, get_args(Format))
    _refuse(model.config, format)
    extra = {}
    if model.config.head == "target_rows":
        extra["lm_head.weight"] = model.head_weight()
    if format == "speculators":
        tensors = {re.sub(r"^midlayer\.", "layers.0.", n): t for n, t in (_tensors(model) | extra).items()}
        write_checkpoint(out, _speculators_config(model, target), tensors)
        return
    write_checkpoint(out, plain_config(model.config, model.dtype), _tensors(model) | extra)


def plain_config(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json in the SpecForge/vLLM layout, without what that layout cannot say."""
    c = config
    published: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if c.qk_norm else "llama",
        **layer_config(c),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_output": c.feedback == "post",
        "fc_norm": c.norm_per_tap,
        "norm_before_fc": c.norm_joint,
        "norm_before_residual": c.norm_before_residual,
        "dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": c.fc},
    }
    if c.fc:
        published["eagle_aux_hidden_state_layer_ids"] = list(c.taps)
        published["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(c.taps)
        published["num_aux_hidden_states"] = len(c.taps)
    if c.norm_joint:
        published["eagle_config"]["norm_before_fc"] = True
    if c.logit_scale != 1.0:
        published["logit_scale"] = c.logit_scale
    if c.fc_bias:
        published["bias"] = True
    if c.gate:
        published["attn_output_gate"] = True
    return published


def _own_block(config: Eagle3Config) -> dict[str, Any]:
    block: dict[str, Any] = {"head": config.head}
    if config.sink != "none":
        block |= {"sink": config.sink, "positions": config.positions}
    if config.trained_depth is not None:
        block["trained_depth"] = config.trained_depth
    return block


def _tensors(model: Eagle3Model) -> dict[str, Tensor]:
    """Return weights under published names, and the vocabulary maps where they say something."""
    only = model.config.num_layers == 1
    tensors = {
        re.sub(r"^layers\.0\.", "midlayer.", n) if only else n: t for n, t in model.state_dict().items()
    }
    size, vocab = model.config.draft_vocab_size, model.config.vocab_size
    if size < vocab:
        ids = model.target_ids
        tensors["d2t"] = ids - torch.arange(size, device=ids.device)
        tensors["t2d"] = model.draft_ids >= 0
    return tensors


def _speculators_config(model: Eagle3Model, target: TargetWeights) -> dict[str, Any]:
    c = model.config
    depth = c.trained_depth or 3
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_joint,
        "fc_norm": c.norm_per_tap,
        "norm_output": c.feedback == "post",
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "transformer_layer_config": {"model_type": "qwen3" if c.qk_norm else "llama", **layer_config(c)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": depth,
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


def _refuse(c: Eagle3Config, format: str) -> None:
    """Refuse what the layout's engines would silently compute otherwise.

    Raises:
        UserError: naming the switch.
    """
    if c.gate:
        raise UserError(
            f"a gated drafter cannot be exported to {format}: no engine that reads it has the gate"
        )
    if c.sink != "none":
        raise UserError(
            f"a drafter with sinks (sink={c.sink}) cannot be exported to {format}: its engines keep no sink "
            "tokens; "
            "export it without the window"
        )
    if any(c.windows) and format == "specforge":
        raise UserError(
            "a window cannot be exported to specforge: SGLang takes it from its command line, not the file"
        )
    if not c.fc and format != "vllm":
        raise UserError(f"a drafter without fc cannot be exported to {format}; use vllm")
    if (c.norm_joint or c.norm_before_residual) and format == "specforge":
        switch = "norm_before_fc" if c.norm_joint else "norm_before_residual"
        raise UserError(
            f"{switch} cannot be exported to specforge: its layout has no such key; use vllm or speculators"
        )
    if (c.fc_bias or c.logit_scale != 1.0 or c.o_bias != c.qkv_bias) and format != "vllm":
        raise UserError(
            f"fc bias, logit scale or half of the attention biases cannot be exported to {format}; use vllm"
        )
    if c.norm_joint and c.norm_per_tap and format == "speculators":
        raise UserError(
            "norm_before_fc beside fc_norm cannot be exported to speculators, which takes one; use vllm"
        )
    if c.fc_bias:
        raise UserError("an fc bias cannot be exported: no engine reads one")
