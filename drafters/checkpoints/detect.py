"""Telling what kind of drafter a directory holds.

Example: ``checkpoint_kind("runs/my-drafter") == "eagle3"``
"""

from __future__ import annotations

from typing import Any

from specbench.drafters.checkpoints.files import find, read_config
from specbench.errors import UserError

_SPECULATORS = {"eagle3": "eagle3", "dflash": "dflash", "mtp": "mtp"}


def checkpoint_kind(where: str) -> str:
    """Return the registered drafter name that loads the checkpoint at ``where``.

    Raises:
        UserError: there is no checkpoint, or it is of a kind nobody handles.
    """
    from specbench import registry

    config = read_config(find(where))
    if config.get("speculators_model_type") == "peagle" or config.get("parallel_drafting"):
        raise UserError(
            f"{where!r} is a P-EAGLE drafter, which drafts all tokens in one pass from mask tokens and a learnt "
            "mask_hidden state; its rows are no chain and no DFlash block, so it is not supported"
        )
    kind = _kind(config)
    if kind is None or kind not in registry.names("drafters"):
        what = (
            config.get("speculators_model_type")
            or (config.get("architectures") or ["an unnamed architecture"])[0]
        )
        raise UserError(
            f"{where!r} is {what}, which no drafter here loads; known: "
            f"{', '.join(registry.names('drafters'))}"
        )
    return kind


def _kind(config: dict[str, Any]) -> str | None:
    if "speculators_model_type" in config:
        return _SPECULATORS.get(config["speculators_model_type"])
    architectures = [str(a) for a in config.get("architectures") or ()]
    if any("DFlash" in a for a in architectures):
        return "dflash"
    if any("MTP" in a for a in architectures):
        return "mtp"
    # SafeAILab's files call themselves plain Llamas; a draft vocabulary or a single layer gives them away
    if (
        any("eagle3" in a.lower() for a in architectures)
        or "draft_vocab_size" in config
        or "eagle_config" in config
    ):
        return "eagle3"
    if any(a.endswith("ForCausalLM") for a in architectures):
        return "eagle3" if config.get("num_hidden_layers") == 1 else "draft-lm"
    return None
