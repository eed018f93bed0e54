"""Reading a checkpoint's directory: config.json, and tensors from safetensors or a PyTorch file.

Example: ``tensors = read_tensors(find("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"))``
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from specbench.errors import UserError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def find(where: str) -> Path:
    """Return the directory of a checkpoint named by path or, failing that, by Hugging Face repository.

    Raises:
        UserError: it is neither.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{where!r} is a file; give the directory that holds config.json and the weights")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", where):
        raise UserError(f"no checkpoint at {where!r}; give the directory that holds its config.json")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(where, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except Exception as error:
        raise UserError(
            f"{where!r} is no directory here and could not be had from the Hugging Face hub: "
            f"{_first_line(error)}"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"{directory} holds no config.json, so it is no checkpoint")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold a JSON object")
    return config


def read_tensors(directory: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, on the CPU. PyTorch files are read as data only, never as code.

    Args:
        directory: of the checkpoint.
        wanted: says which tensors to read by name, perhaps none; with an index, shards that hold none of them
            stay closed and need not be there. None: all, and there must be some.

    Raises:
        UserError: no weights, a missing shard, or an unreadable file.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory, wanted):
        for name, tensor in _read_file(file, wanted).items():
            if name in tensors:
                raise UserError(f"{directory} holds {name} in two files; keep one")
            tensors[name] = tensor
    if not tensors and wanted is None:
        raise UserError(f"{directory} holds no tensors")
    return tensors


def _weight_files(directory: Path, wanted: Callable[[str], bool] | None) -> list[Path]:
    for name in _INDEXES:
        index = directory / name
        if index.is_file():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted({file for name, file in places.items() if wanted is None or wanted(name)})
            missing = [s for s in shards if not (directory / s).is_file()]
            if missing:
                raise UserError(
                    f"{directory} lacks the shard {missing[0]} that {name} names; download it again"
                )
            return [directory / s for s in shards]
    for pattern in ("*.safetensors", "*.bin"):
        found = sorted(
            p for p in directory.glob(pattern) if p.name not in ("training_args.bin", "optimizer.bin")
        )
        if found:
            return found
    raise UserError(f"{directory} holds neither safetensors nor a pytorch_model.bin")


def _read_file(file: Path, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    import torch
    from safetensors import safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                chosen = [n for n in tensors.keys() if wanted is None or wanted(n)]  # noqa: SIM118 - not a mapping
                return {name: tensors.get_tensor(name) for name in chosen}
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{file} cannot be read as weights: {_first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"{file} is no flat dictionary of tensors")
    return {name: tensor for name, tensor in content.items() if wanted is None or wanted(name)}


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
