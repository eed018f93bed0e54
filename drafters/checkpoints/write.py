"""What every layout writes alike: one transformer layer's keys, and the two files.

Example: ``write_checkpoint(Path("out"), {"architectures": ["DFlashDraftModel"]}, model.state_dict())``
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specbench.drafters.dflash import DFlashConfig
from specbench.drafters.eagle3 import Eagle3Config
from specbench.drafters.mtp import MtpConfig
from specbench.errors import UserError


def layer_config(c: Eagle3Config | DFlashConfig | MtpConfig) -> dict[str, Any]:
    """Return the keys of one transformer layer, shared by all layouts.

    Raises:
        UserError: the layers' windows differ.
    """
    layer: dict[str, Any] = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": c.num_layers,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "max_position_embeddings": c.max_positions,
        "attention_bias": c.qkv_bias or c.o_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": False,
        "rope_parameters": dict(c.rope),
        "rope_theta": c.rope["rope_theta"],
    }
    if c.o_bias and not c.qkv_bias:
        layer["qkv_bias"] = False
    if c.rope["rope_type"] != "default":
        layer["rope_scaling"] = dict(c.rope)
    windows = [c.window(i) for i in range(c.num_layers)]
    if any(windows):
        sizes = {w for w in windows if w is not None}
        if len(sizes) > 1:
            raise UserError(
                f"the layers' windows {windows} differ, which config.json cannot say; use one window"
            )
        layer["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
        layer["sliding_window"] = sizes.pop()
    return layer


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        path: a directory, made if need be.
        config: plain values.
        tensors: by published name, on any device.

    Raises:
        UserError: the directory cannot be written.
    """
    from safetensors.torch import save_file

    try:
        path.mkdir(parents=True, exist_ok=True)
        ready = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
        save_file(ready, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the drafter to {path}: {error.strerror or error}") from error
