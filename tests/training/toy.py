"""A toy target and answers with random states: training needs only numbers."""

from __future__ import annotations

from typing import Any

import torch

from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.drafters.training.data import Example, Features
from specbench.types import TargetInfo, TargetWeights

VOCAB, WIDTH, TAPS = 23, 16, (2, 4, 5)
HALF = tuple(range(1, VOCAB, 2))
SIZES: dict[str, Any] = {
    "taps": TAPS,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
}


def make_target(dtype: torch.dtype = torch.float32) -> TargetWeights:
    g = torch.Generator().manual_seed(0)
    info = TargetInfo(
        name="toy",
        fingerprint="0" * 16,
        hidden_size=WIDTH,
        num_layers=8,
        vocab_size=VOCAB,
        max_positions=64,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    return TargetWeights(
        info=info,
        embed=torch.randn(VOCAB, WIDTH, generator=g, dtype=dtype),
        head=torch.randn(VOCAB, WIDTH, generator=g, dtype=dtype),
        norm=torch.rand(WIDTH, generator=g, dtype=dtype) + 0.5,
    )


def make_example(prompt: int, answer: int, seed: int) -> Example:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (prompt + answer,), generator=g).tolist()
    return Example(id=f"toy/{seed}", prompt_ids=tuple(ids[:prompt]), answer_ids=tuple(ids[prompt:]))


class Memory:
    """Random states, the same for the same tokens; the target's most probable token is the answer's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def read(self, example: Example) -> Features:
        g = torch.Generator().manual_seed(sum(i * t for i, t in enumerate(example.ids, start=1)))
        draw = [
            torch.randn(example.num_rows, WIDTH, generator=g, dtype=torch.float64)
            for _ in range(len(TAPS) + 1)
        ]
        *taps, final = (x.to(self.dtype) for x in draw)
        top = torch.tensor(example.ids[1:])
        top[: len(example.prompt_ids) - 1] = -1
        return Features(taps=tuple(taps), final=final, top=top)


def make_config(target: TargetWeights, **switches: Any) -> Eagle3Config:
    settings = {"head": "target_rows", "draft_vocab_size": len(HALF), **SIZES, **switches}
    return Eagle3Config.for_target(target.info, **settings)


def make_model(target: TargetWeights, seed: int = 0, **switches: Any) -> Eagle3Model:
    """A random drafter, sharp enough that ties do not happen."""
    model = Eagle3Model(make_config(target, **switches), target, HALF)
    g = torch.Generator().manual_seed(seed)
    model.init_weights(g, 0.4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=g) + 0.5)
    return model
