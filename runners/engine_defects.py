"""What known engine versions get wrong, so that no number of ours rests on it.

A run that would hit a defect is refused, or repaired in this process by a workaround that the user names and that
``run.json`` records.

Example:
    check("0.32.0", "cpu", Use(sampled=True, speculative=True), workarounds=("expand-batch",))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.errors import UserError, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a run asks of an engine."""

    method: str = "none"
    """vLLM's name: eagle3, ngram, draft_model, dflash, custom_class; "none" without speculation."""
    sampled: bool = False
    synthetic: bool = False
    """Acceptance chosen, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One defect of one engine on one kind of device."""

    name: str
    engine: str
    versions: tuple[str, ...]
    device: str
    """``cpu`` or ``cuda``."""
    effect: str
    hits: Callable[[Use], bool]
    workaround: Callable[[], None] | None = None
    """Repairs the imported engine in this process."""
    lowers_acceptance_only: bool = False
    """Answers stay right: worth a note, no reason to refuse."""


def _expand_batch(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """``x`` [batch] -> [num_tokens]: each entry as often as its request has tokens, ``replace_from`` replaced."""
    import torch

    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    replaced = x.masked_fill(x == replace_from, replace_to) if replace_from != replace_to else x
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def _repair_expand_batch() -> None:
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expand_batch


DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="expand-batch",
        engine="vllm",
        versions=("0.32.0",),
        device="cpu",
        effect="temperature, top-k and top-p reach its rejection sampler as uninitialised memory, so sampled "
        "speculation accepts next to nothing and draws from no defined law",
        hits=lambda use: use.sampled and use.method != "none",
        workaround=_repair_expand_batch,
    ),
    Defect(
        name="dflash-k-norm",
        engine="vllm",
        versions=("0.32.0",),
        device="cpu",
        effect="DFlash's context keys are normed with layer 0's k_norm in every layer, which lowers acceptance where "
        "the layers' k_norm differ",
        hits=lambda use: use.method == "dflash",
        lowers_acceptance_only=True,
    ),
    Defect(
        name="synthetic-acceptance",
        engine="vllm",
        versions=("0.32.0",),
        device="cpu",
        effect="its synthetic rejection mode stops with an assertion on a CPU",
        hits=lambda use: use.synthetic,
    ),
)


def known(version: str, device: str, use: Use, *, engine: str = "vllm") -> list[Defect]:
    """Return the defects that a run would hit.

    Args:
        version: of the engine; a local part ("+cpu") is ignored.
        device: cpu or cuda.
        use: what the run asks for.
        engine: whose version it is.
    """
    plain = version.partition("+")[0]
    return [
        d
        for d in DEFECTS
        if d.engine == engine and plain in d.versions and d.device == device and d.hits(use)
    ]


def check(version: str, device: str, use: Use, workarounds: Sequence[str]) -> Mapping[str, str]:
    """Refuse what would measure a defect; return what is to be recorded, by defect name.

    Args:
        version: of the engine.
        device: cpu or cuda.
        use: what the run asks for.
        workarounds: named by the user.

    Raises:
        UserError: a defect would be hit and is not worked round, or a workaround is unknown.
    """
    able = {d.name for d in DEFECTS if d.workaround is not None}
    for name in workarounds:
        if name not in able:
            raise unknown_name("workaround", name, able)
    recorded: dict[str, str] = {}
    for defect in known(version, device, use):
        if defect.name in workarounds:
            recorded[defect.name] = "worked round"
        elif defect.lowers_acceptance_only:
            recorded[defect.name] = f"present: {defect.effect}"
        else:
            mend = (
                f"use --engine workaround={defect.name} (recorded in run.json), or --runner decode"
                if defect.workaround is not None
                else "use --runner decode or replay, or another version or device"
            )
            raise UserError(f"vLLM {version} on {device}: {defect.effect}; {mend}")
    return recorded


def repair(recorded: Mapping[str, str]) -> None:
    """Apply the workarounds of :func:`check` to the imported engine."""
    for defect in DEFECTS:
        if recorded.get(defect.name) == "worked round":
            assert defect.workaround is not None
            defect.workaround()
