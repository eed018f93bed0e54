"""MTP heads as drafters: the chains of EAGLE-3 with another step, and the factory behind ``mtp`` and ``mtp=PATH``.

Example:
    drafter = create(None, {}, target)              # the head in the target's own files
    scores = drafter.score(traces, ScoreRequest(depth=4))
"""

from __future__ import annotations

from collections.abc import Mapping

from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.errors import UserError
from specbench.types import TargetWeights


class MtpDrafter(Eagle3Drafter):
    """An ``MtpModel`` with its target's facts; implements ``Drafter``."""

    kind = "mtp"


def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> MtpDrafter:
    """Load the head at ``argument``, or the one in the target's own files.

    Args:
        argument: a directory or a Hugging Face repository; None: where the target was loaded from.
        options: ``final_norm=skip`` feeds the target's state before its final norm.
        target: whose tensors it shares.

    Raises:
        UserError: there is no head, it does not load, does not fit the target, or an option is unknown.
    """
    from specbench.drafters.checkpoints.mtp import load_mtp

    if argument is None and target.path is None:
        raise UserError(f"the files of {target.info.name} are not at hand; name a checkpoint: mtp=PATH")
    loaded = load_mtp(argument, target, options)
    name = "mtp" if argument is None else f"mtp={argument}"
    return MtpDrafter(loaded.model, target.info, name, loaded.notes)
