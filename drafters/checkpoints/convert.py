"""From one published layout to another that can hold the same drafter, bit for bit and without the target.

| kind | layouts |
|---|---|
| EAGLE-3 | ``vllm``, ``specforge``, ``speculators``, ``modelopt`` (``layers.0.``), ``nemo`` (``model.`` prefix) |
| DFlash | ``dflash`` (z-lab, vLLM), ``speculators`` |
| MTP, Qwen3-Next family | ``target`` (``mtp.*`` beside the block's configuration), ``speculators`` |

Example: ``convert("runs/my-drafter", "nemo", Path("out"))``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.checkpoints.detect import checkpoint_kind
from specbench.drafters.checkpoints.dflash import load_dflash, save_dflash
from specbench.drafters.checkpoints.files import find, read_config, read_tensors
from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.mtp import publish, read_mtp
from specbench.drafters.checkpoints.save import export_model
from specbench.drafters.checkpoints.write import write_checkpoint
from specbench.errors import UserError, unknown_name
from specbench.types import TargetInfo, TargetWeights

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "eagle3": ("vllm", "specforge", "speculators", "modelopt", "nemo"),
    "dflash": ("dflash", "speculators"),
    "mtp": ("target", "speculators"),
}


def convert(where: str, layout: str, out: Path, verifier: str | None = None) -> str:
    """Write the checkpoint at ``where`` in another layout.

    Args:
        where: directory or Hugging Face repository.
        layout: see ``LAYOUTS``.
        out: a directory, made if need be.
        verifier: the target's name for speculators' files; None: the one the file names.

    Returns:
        The drafter's kind.

    Raises:
        UserError: the checkpoint does not load, the layout cannot hold it, or a tensor would lose bits.
    """
    directory = find(where)
    config = read_config(directory)
    # a target's own files say what the target is; that they hold a head is known from being asked for it
    kind = "mtp" if layout in ("target",) or _is_target_with_head(config) else checkpoint_kind(where)
    if kind not in LAYOUTS:
        raise UserError(f"{where!r} is a {kind} checkpoint, which has one layout only")
    if layout not in LAYOUTS[kind]:
        raise unknown_name(f"{kind} layout", layout, LAYOUTS[kind])
    write: Callable[..., None] = {"eagle3": _eagle3, "dflash": _dflash, "mtp": _mtp}[kind]
    write(directory, config, layout, out, verifier or _verifier(config))
    return kind


def _is_target_with_head(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    counts = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return "speculators_model_type" not in config and any(text.get(key) for key in counts)


def _verifier(config: Mapping[str, Any]) -> str:
    named = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return str(named or "")


def _stand_in(directory: Path, config: Mapping[str, Any], num_layers: int, verifier: str) -> TargetWeights:
    """Return a target of the right sizes without numbers, in the one dtype of the file.

    Raises:
        UserError: the file mixes number formats, so no single one keeps every bit.
    """
    dtypes = {t.dtype for t in read_tensors(directory).values() if t.is_floating_point()}
    if len(dtypes) != 1:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UserError(
            f"{directory} mixes number formats ({names}); convert keeps every bit and needs a single one"
        )
    (dtype,) = dtypes
    sizes = config.get("transformer_layer_config") or config
    width = int(config.get("target_hidden_size") or sizes.get("target_hidden_size") or sizes["hidden_size"])
    vocab = int(sizes["vocab_size"])
    info = TargetInfo(
        name=verifier or "unknown",
        fingerprint="",
        hidden_size=width,
        num_layers=num_layers,
        vocab_size=vocab,
        max_positions=int(sizes.get("max_position_embeddings") or 2048),
        dtype=str(dtype).removeprefix("torch."),
    )
    nothing = torch.zeros(1, 1, dtype=dtype).expand(vocab, width)
    return TargetWeights(info=info, embed=nothing, head=nothing)


def _eagle3(directory: Path, config: Mapping[str, Any], layout: str, out: Path, verifier: str) -> None:
    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    if not ids and nested.get("use_aux_hidden_state", True):
        raise UserError(
            f"{directory} names no taps; write eagle_aux_hidden_state_layer_ids, (2, n/2, n-3) in most cases, into its "
            "config.json"
        )
    target = _stand_in(directory, config, 1 + max(ids or [0]), verifier)
    model = load_checkpoint(str(directory), target).model
    if model.config.head == "target_rows":
        raise UserError("its head is rows of its target's, which are not in the file; use specbench export")
    if layout in ("vllm", "specforge", "speculators"):
        export_model(model, layout, out, target)
        return
    # both read vLLM's keys; what these engines cannot do is what vLLM cannot
    export_model(model, "vllm", out, target)
    written = read_tensors(out)
    if layout == "modelopt":
        tensors = {re.sub(r"^midlayer\.", "layers.0.", n): t for n, t in written.items() if n != "t2d"}
    else:
        plain = ("lm_head.weight", "d2t", "t2d")
        names = {n: n if n in plain else "model." + re.sub(r"^midlayer\.", "layers.0.", n) for n in written}
        tensors = {names[n]: t for n, t in written.items()}
    write_checkpoint(out, read_config(out), tensors)


def _dflash(directory: Path, config: Mapping[str, Any], layout: str, out: Path, verifier: str) -> None:
    own = config.get("dflash_config") or {}
    ids = own.get("target_layer_ids") or config.get("target_layer_ids")
    taps = config.get("aux_hidden_state_layer_ids") or [i + 1 for i in ids or ()]
    declared = config.get("num_target_layers") or own.get("num_target_layers")
    if not taps and not declared:
        raise UserError(f"{directory} names neither target_layer_ids nor num_target_layers; write one")
    target = _stand_in(directory, config, int(declared or max(taps)), verifier)
    model = load_dflash(str(directory), target).model
    if model.config.head == "target_rows":
        raise UserError("its head is rows of its target's, which are not in the file; use specbench export")
    save_dflash(model, out, "speculators" if layout == "speculators" else "dflash", target)


def _mtp(directory: Path, config: Mapping[str, Any], layout: str, out: Path, verifier: str) -> None:
    file = read_mtp(directory)
    facts = file.facts
    if facts.own or file.maps:
        raise UserError(
            "a head with a draft vocabulary of its own fits neither layout: both use the target's head"
        )
    dense = facts.family == "dense"
    if facts.family not in ("qwen", "dense") or (layout == "target" and dense):
        raise UserError(f"a head of the {facts.family} family cannot be held by the {layout} layout")
    weights: dict[str, Tensor] = dict(file.weights)
    tensors = publish(weights, "qwen" if layout == "target" else "speculators")
    sizes = dict(facts.sizes)
    if layout == "target":
        count = (
            "num_nextn_predict_layers" if sizes.get("model_type") == "qwen3_next" else "mtp_num_hidden_layers"
        )
        write_checkpoint(out, sizes | {count: 1}, tensors)
        return
    depth = facts.trained_depth or 3
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0
    }  # fmt: skip
    written = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": sizes,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
    write_checkpoint(out, written, tensors)
