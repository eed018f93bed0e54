"""Weights to start from.

``target``: the final norm is the target's, ``fc`` passes the last tap (plus a small random mix of all), and, where the
target is a Llama-like model of the drafter's sizes, the layer starts from the target's last block. ``random``: N(0,
0.02^2) throughout.

Example: ``initialise(model, target, "target", seed=0)``
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from specbench.drafters.eagle3 import Eagle3Model, Layer
from specbench.types import TargetWeights

Init = Literal["target", "random"]
_MIX = 0.25
"""Of the random part of ``fc``, relative to ``random``'s."""


def initialise(model: Eagle3Model, target: TargetWeights, how: Init, seed: int) -> None:
    """Draw or copy every weight.

    Args:
        model: the drafter, float32.
        target: whose final norm and last block may be taken.
        how: see the module.
        seed: of the draw.
    """
    model.init_weights(torch.Generator().manual_seed(seed))
    if how == "random":
        return
    with torch.no_grad():
        width = model.config.target_hidden_size
        if target.norm is not None and model.norm.weight.shape == target.norm.shape:
            model.norm.weight.copy_(target.norm)
        if model.fc is not None and model.config.hidden_size == width:
            model.fc.weight.mul_(_MIX)
            model.fc.weight[:, -width:] += torch.eye(width, device=model.device)
        block = _last_block(target)
        if block:
            _copy_block(model, block)


def _last_block(target: TargetWeights) -> dict[str, Tensor]:
    """Return the target's last block by short names; empty where its files do not say."""
    from safetensors import safe_open

    if target.path is None:
        return {}
    prefix = f"layers.{target.info.num_layers - 1}."
    found: dict[str, Tensor] = {}
    for file in sorted(target.path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if prefix in name:
                    found[name.split(prefix)[1]] = tensors.get_tensor(name)
    return found


def _copy_block(model: Eagle3Model, block: dict[str, Tensor]) -> None:
    """Copy what has the same shape; the embedding half of layer 0's inputs keeps its random draw."""
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    assert layer.hidden_norm is not None
    width = model.config.hidden_size
    places = {
        "input_layernorm.weight": layer.hidden_norm.weight,
        "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
        "self_attn.o_proj.weight": layer.self_attn.o_proj.weight,
        **{
            f"self_attn.{x}_proj.weight": getattr(layer.self_attn, f"{x}_proj").weight[:, width:]
            for x in "qkv"
        },
        **{f"mlp.{x}_proj.weight": getattr(layer.mlp, f"{x}_proj").weight for x in ("gate", "up", "down")},
    }
    if all(name in block and block[name].shape == place.shape for name, place in places.items()):
        for name, place in places.items():
            place.copy_(block[name])
