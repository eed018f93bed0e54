"""A drafter of ours as an engine is told of it: vLLM's speculative configuration, and files where it needs some.

Example:
    spec = engine_spec(drafter, target.weights(), Path("cache"))
    spec.config   # {"method": "eagle3", "model": "cache/5f0c.../"}
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.errors import UserError
from specbench.types import Drafter, TargetWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How an engine runs one drafter."""

    method: str
    """vLLM's name of the method."""
    config: Mapping[str, Any]
    """Of ``speculative_config``, depth and sampling methods apart."""
    proposes_always: bool = True
    """Whether every round has draft tokens; prompt lookup often finds none."""
    probabilistic: bool = True
    """Whether it has a law to draw drafts from; else drafts are one-hot at any temperature."""


METHODS = {"ngram": "ngram", "draft-lm": "draft_model", "eagle3": "eagle3", "dflash": "dflash"}
"""Kind of drafter -> vLLM's method."""


def engine_spec(drafter: Drafter, target: TargetWeights, cache: Path) -> EngineSpec:
    """Return what vLLM must be told to run a drafter.

    Args:
        drafter: any of ours.
        target: the drafter's target.
        cache: where exported checkpoints are kept, one directory a fingerprint.

    Raises:
        UserError: vLLM cannot express the drafter; the sentence names the switch.
    """
    kind = drafter.info.kind
    make = {"ngram": _ngram, "draft-lm": _draft_lm, "eagle3": _eagle3, "dflash": _dflash}.get(kind)
    if make is None:
        why = (
            "vLLM reads MTP heads from the target's own files only"
            if kind == "mtp"
            else f"there is no way to hand one of kind {kind!r} to vLLM"
        )
        raise UserError(f"drafter {drafter.info.name!r}: {why}; use --runner replay or decode")
    try:
        return make(drafter, target, cache)
    except UserError as error:
        raise UserError(f"drafter {drafter.info.name!r} cannot run in vLLM: {error}") from error


def _ngram(drafter: Any, target: TargetWeights, cache: Path) -> EngineSpec:
    config = {"method": "ngram", "prompt_lookup_min": drafter.min_n, "prompt_lookup_max": drafter.max_n}
    return EngineSpec(method="ngram", config=config, proposes_always=False, probabilistic=False)


def _draft_lm(drafter: Any, target: TargetWeights, cache: Path) -> EngineSpec:
    model = drafter.model
    where = Path(str(getattr(model, "name_or_path", "") or ""))
    if not (where / "config.json").is_file():
        where = _kept(cache, drafter.info.fingerprint, model.save_pretrained)
    return EngineSpec(method="draft_model", config={"method": "draft_model", "model": str(where)})


def _eagle3(drafter: Any, target: TargetWeights, cache: Path) -> EngineSpec:
    from specbench.drafters.checkpoints.save import export_model

    where = _kept(
        cache, drafter.info.fingerprint, lambda path: export_model(drafter.model, "vllm", path, target)
    )
    return EngineSpec(method="eagle3", config={"method": "eagle3", "model": str(where)})


def _dflash(drafter: Any, target: TargetWeights, cache: Path) -> EngineSpec:
    from specbench.drafters.checkpoints.dflash import save_dflash
    from specbench.drafters.dflash import DFlashModel

    def write(path: Path) -> None:
        model = drafter.model
        if model.config.context_norm != "own":
            # what the engine does by itself is in no file
            model = DFlashModel(replace(model.config, context_norm="own"), target, model.target_ids.cpu())
            model.load_state_dict(drafter.model.state_dict())
        save_dflash(model, path, "dflash", target)

    where = _kept(cache, drafter.info.fingerprint, write)
    return EngineSpec(method="dflash", config={"method": "dflash", "model": str(where)})


def check_block(drafter: Any, depth: int, known_defects: Collection[str]) -> None:
    """Refuse a DFlash drafter that vLLM would run otherwise than it is declared.

    Args:
        drafter: any; others pass.
        depth: k.
        known_defects: of the engine, by name.

    Raises:
        UserError: vLLM's blocks would be of another size, or the drafter models a defect that the engine has not.
    """
    if drafter.info.kind != "dflash":
        return
    config = drafter.model.config
    causal = all(config.is_causal(i) for i in range(config.num_layers))
    if config.block_size != depth + 1 and not causal:
        raise UserError(
            f"drafter {drafter.info.name!r} has blocks of {config.block_size} positions, vLLM runs depth + 1 = "
            f"{depth + 1}; give --depth {config.block_size - 1}, or the drafter @block={depth + 1}"
        )
    if config.context_norm != "own" and "dflash-k-norm" not in known_defects:
        raise UserError(
            f"drafter {drafter.info.name!r}: this engine norms context keys as the checkpoint says; leave "
            "context_norm=layer0 out"
        )


def _kept(cache: Path, fingerprint: str, write: Any) -> Path:
    """Return the directory of one checkpoint, written whole or not at all."""
    assert fingerprint, "a checkpoint without a fingerprint cannot be told from another"
    path = cache / fingerprint
    if (path / "config.json").is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=cache, prefix=".writing-"))
    try:
        write(work)
        if path.exists():
            shutil.rmtree(path)
        work.rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path
