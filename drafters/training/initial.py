"""Weights to start from.

``target``: the final norm is the target's, ``fc`` passes the last tap (plus a small random mix of all), and, where the
target is a Llama-like model of the drafter's sizes, the layers start from the target's last blocks. Those of a block
drafter do not: what they read begins with embeddings, and from random ones it learns faster (first-mask accuracy after
160 steps on smollm2-135m 0.135 against 0.090). ``random``: N(0, 0.02^2) throughout.

Example: ``initialise(model, target, "target", seed=0)``
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from specbench.drafters.dflash import DFlashModel
from specbench.drafters.eagle3 import Layer
from specbench.drafters.mtp import MtpLayer
from specbench.drafters.training.kinds import TrainModel
from specbench.types import TargetWeights

Init = Literal["target", "random"]
_MIX = 0.25
"""Of the random part of ``fc``, relative to ``random``'s."""


def initialise(model: TrainModel, target: TargetWeights, how: Init, seed: int) -> None:
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
        # an MTP head reads (embedding, hidden), so its last columns too are those of the target's state
        fc = model.layers[0].fc if isinstance(model.layers[0], MtpLayer) else model.fc
        if fc is not None and model.config.hidden_size == width:
            assert isinstance(fc, torch.nn.Linear)
            fc.weight.mul_(_MIX)
            fc.weight[:, -width:] += torch.eye(width, device=model.device)
        if isinstance(model, DFlashModel):
            return
        for index, layer in enumerate(model.layers):
            block = _block(target, target.info.num_layers - len(model.layers) + index)
            if block:
                _copy_block(layer, block, model.config.hidden_size)


def _block(target: TargetWeights, index: int) -> dict[str, Tensor]:
    """Return one of the target's blocks by short names; empty where its files do not say."""
    from safetensors import safe_open

    if target.path is None:
        return {}
    prefix = f"layers.{index}."
    found: dict[str, Tensor] = {}
    for file in sorted(target.path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if prefix in name:
                    found[name.split(prefix)[1]] = tensors.get_tensor(name)
    return found


def _copy_block(layer: torch.nn.Module, block: dict[str, Tensor], width: int) -> None:
    """Copy attention and MLP where their shapes agree; an embedding's share of the inputs keeps its random draw."""
    assert isinstance(layer, Layer | MtpLayer)
    attention, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm
    if isinstance(layer, Layer) and layer.hidden_norm is not None:
        norm = layer.hidden_norm
    for places in (
        {
            "input_layernorm.weight": norm.weight,
            "self_attn.o_proj.weight": attention.o_proj.weight,
            **{
                f"self_attn.{x}_proj.weight": getattr(attention, f"{x}_proj").weight[:, -width:]
                for x in "qkv"
            },
        },
        {
            "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
            **{f"mlp.{x}_proj.weight": getattr(mlp, f"{x}_proj").weight for x in ("gate", "up", "down")},
        },
    ):
        if all(name in block and block[name].shape == place.shape for name, place in places.items()):
            for name, place in places.items():
                place.copy_(block[name])
