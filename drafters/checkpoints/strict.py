"""Checks that every loader makes: names and shapes of tensors, the vocabulary map, rotary parameters.

Example: ``check_weights(weights, needed=model.state_dict(), hint=lambda name: None)``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from specbench.drafters.checkpoints.layouts import Notes
from specbench.drafters.config import DEFAULT_ROPE, Head
from specbench.errors import UserError
from specbench.types import TargetWeights


def whole(config: Mapping[str, Any], key: str) -> int:
    """Return a key of config.json that must be a whole number.

    Raises:
        UserError: it is missing or something else.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"config.json: {key} must be a whole number, not {value!r}")
    return value


def rope_parameters(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` from either generation of keys."""
    found = dict(sizes.get("rope_scaling") or sizes.get("rope_parameters") or {})
    found["rope_type"] = found.pop("type", None) or found.get("rope_type") or "default"
    theta = found.get("rope_theta") or sizes.get("rope_theta") or DEFAULT_ROPE["rope_theta"]
    return found | {"rope_theta": float(theta)}


def target_ids(size: int, vocab: int, maps: Mapping[str, Tensor], notes: Notes) -> Tensor:
    """Return the target id of each draft id, checked against every invariant of d2t and t2d.

    Args:
        size: of the draft vocabulary.
        vocab: of the target's.
        maps: ``d2t`` and ``t2d``, where the checkpoint has them.
        notes: receives what is odd.

    Raises:
        UserError: the maps contradict each other, the vocabulary or the order.
    """
    identity = torch.arange(size)
    offsets, mask = maps.get("d2t"), maps.get("t2d")
    if offsets is None:
        if size < vocab:
            raise UserError(
                f"d2t is missing, so the {size} draft tokens cannot be told; the checkpoint is incomplete "
                "(@vocab_map=identity takes the first ones)"
            )
        return identity
    if offsets.shape != (size,):
        raise UserError(f"d2t has shape {tuple(offsets.shape)}, but the draft vocabulary has {size} tokens")
    ids = identity + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(
            f"d2t points at token {int(ids.max())}, outside the target's {vocab}; it holds offsets, not ids"
        )
    if not bool((ids.diff() > 0).all()):
        raise UserError("d2t does not give ascending target ids; it must hold offsets (target id - draft id)")
    if mask is not None and (mask.shape != (vocab,) or not torch.equal(mask.nonzero().flatten(), ids)):
        raise UserError("t2d and d2t name different tokens; the vocabulary maps were not saved together")
    if size < vocab and not bool(offsets.any()):
        notes.warn(
            f"d2t is all zeros with {size} of {vocab} tokens: the vocabulary map was probably never filled "
            "in. "
            "Train or export again; @vocab_map=identity says that it is meant"
        )
    return ids


def which_head(declared: Any, weights: Mapping[str, Tensor], draft_vocab: int, vocab: int) -> Head:
    """Return whose output rows a drafter uses: its own, the target's, or those of the target's it keeps.

    Args:
        declared: ``specbench.head`` of config.json; None where it says nothing.
        weights: of the checkpoint, under our names.
        draft_vocab: ids the drafter can draft.
        vocab: ids of the target.

    Raises:
        UserError: the declaration is unknown or contradicts the file, or no head fits the draft vocabulary.
    """
    if declared is not None and declared not in get_args(Head):
        known = ", ".join(get_args(Head))
        raise UserError(f"config.json: specbench.head = {declared!r} is unknown; known: {known}")
    if "lm_head.weight" in weights:
        if declared not in (None, "own"):
            raise UserError(
                f"config.json says specbench.head = {declared!r}, but the file holds lm_head.weight; drop one"
            )
        return "own"
    if declared == "target_rows":
        return "target_rows"
    if draft_vocab != vocab:
        raise UserError(
            "lm_head.weight is missing, and the target's head cannot stand in for a draft vocabulary of "
            f"{draft_vocab}; the checkpoint is incomplete"
        )
    return "target"


def check_weights(
    weights: Mapping[str, Tensor], needed: Mapping[str, Tensor], hint: Callable[[str], str | None]
) -> None:
    """Compare names and shapes with what the configuration needs.

    Args:
        weights: from the file, under our names.
        needed: the module's state dict, perhaps on the meta device.
        hint: what to do about an unused tensor, where there is something to say.

    Raises:
        UserError: naming the first tensor that is missing, unused, of another shape, or not of floats.
    """
    for name in sorted(set(weights) - set(needed)):
        raise UserError(
            f"the checkpoint holds {name}, which config.json gives no use for; {hint(name) or 'take it out'}"
        )
    for name in sorted(set(needed) - set(weights)):
        raise UserError(f"the checkpoint lacks {name}, which config.json asks for; the file is incomplete")
    for name, tensor in weights.items():
        if tensor.shape != needed[name].shape:
            raise UserError(
                f"{name} has shape {list(tensor.shape)}, but config.json asks for {list(needed[name].shape)}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise UserError(f"{name} is {tensor.dtype}: quantized weights are not supported")


def on_meta(target: TargetWeights) -> TargetWeights:
    """Return the target without its numbers: enough to lay out a module and look at its shapes."""
    return TargetWeights(info=target.info, embed=target.embed.to("meta"), head=target.head.to("meta"))


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether a checkpoint's tensor is its target's."""
    return ours.shape == theirs.shape and torch.equal(ours.to(theirs.dtype), theirs.cpu())
