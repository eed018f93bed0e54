"""Reading a checkpoint's directory: config.json, and tensors from safetensors or a PyTorch file.

Example: ``tensors = read_tensors(find("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"))``
"""

from __future__ import annotations

import json
import re
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


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, on the CPU. PyTorch files are read as data only, never as code.

    Raises:
        UserError: no weights, a missing shard, or an unreadable file.
    """
    files = _weight_files(directory)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise UserError(f"{directory} holds {name} in two files; keep one")
            tensors[name] = tensor
    if not tensors:
        raise UserError(f"{directory} holds no tensors")
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    for name in _INDEXES:
        index = directory / name
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
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


def _read_file(file: Path) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            loaded: dict[str, Tensor] = load_file(file)
            return loaded
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{file} cannot be read as weights: {_first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"{file} is no flat dictionary of tensors")
    return content


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
