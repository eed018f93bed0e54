"""Training tokens/s and peak memory, against the same step written with dense masks and autograd's own softmax.

Example:
    python perf/training.py --rows 2048 --sequences 8 --depth 4

The naive step is what one writes first: ``scaled_dot_product_attention`` over a materialised mask of all step-1 keys
and all own keys of every chain, and the KL from full logits. Both give the same loss (printed). Each runs in a process
of its own, because a process's peak memory never falls.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.drafters.chains import Packed
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model, Layer
from specbench.drafters.modules import rotate
from specbench.drafters.training.data import Batch
from specbench.drafters.training.step import ChainSetting, chain_loss
from specbench.types import TargetInfo, TargetWeights

VOCAB, DRAFT_VOCAB, WIDTH = 16_384, 8_192, 576
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_target(dtype: torch.dtype, device: str) -> TargetWeights:
    """A target's shared tensors in SmolLM2's width, random."""
    g = torch.Generator().manual_seed(0)
    info = TargetInfo(
        name="random", fingerprint="", hidden_size=WIDTH, num_layers=30, vocab_size=VOCAB, max_positions=8192,
        dtype=str(dtype), rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    embed = (torch.randn(VOCAB, WIDTH, generator=g) * 0.05).to(device=device, dtype=dtype)
    return TargetWeights(info=info, embed=embed, head=embed)


def make_batch(rows: int, sequences: int, dtype: torch.dtype, device: str) -> Batch:
    """Sequences of equal length, the last three quarters of each an answer."""
    g = torch.Generator().manual_seed(1)
    length = rows // sequences
    parts = [
        (torch.randint(0, VOCAB, (length + 1,), generator=g), [_normal(length, g, dtype) for _ in range(3)])
        for _ in range(sequences)
    ]
    packed = Packed.build(parts, device=device)
    chains = [torch.arange(i * length + length // 4, (i + 1) * length - 1) for i in range(sequences)]
    total = length * sequences
    return Batch(
        ids=tuple(map(str, range(sequences))),
        packed=packed,
        rows=torch.cat(chains).to(device),
        final=_normal(total, g, dtype).to(device),
        top=torch.randint(0, VOCAB, (total,), generator=g).to(device),
    )


def _normal(rows: int, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, WIDTH, generator=g).to(dtype)


def naive_loss(model: Eagle3Model, batch: Batch, teacher_head: Tensor, setting: ChainSetting) -> Tensor:
    """The loss of ``chain_loss``, written with dense masks."""
    packed, rows = batch.packed, batch.rows
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    num_rows = packed.inputs.shape[0]
    sequence = torch.searchsorted(packed.cu_seqlens, torch.arange(num_rows, device=rows.device), right=True)
    index = torch.arange(num_rows, device=rows.device)
    prefix = (sequence[rows, None] == sequence[None]) & (index[None] <= rows[:, None])
    diagonal = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    z, residual = layer.enter(model.fuse(packed.taps), model.embed(packed.inputs))
    k, v = layer.self_attn.keys_values(z, model.rope.tables(packed.positions, z.dtype))
    keys, values, masks = [k], [v], [prefix]
    z, residual = z[rows], residual[rows]
    state = residual
    total = torch.zeros((), device=rows.device)
    for step in range(1, setting.depth + 1):
        if step > 1:
            # a chain that ended goes on with any token; its loss is masked
            tokens = packed.inputs[(rows + step - 1).clamp(max=num_rows - 1)]
            z, residual = layer.enter(state, model.embed(tokens))
            own = layer.self_attn.keys_values(
                z, model.rope.tables(packed.positions[rows] + step - 1, z.dtype)
            )
            keys.append(own[0])
            values.append(own[1])
            masks.append(diagonal)
        q = layer.self_attn.queries(z)
        q = rotate(q, model.rope.tables(packed.positions[rows] + step - 1, z.dtype))
        group = q.shape[1] // k.shape[1]
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            torch.cat(keys).repeat_interleave(group, dim=1).transpose(0, 1)[None],
            torch.cat(values).repeat_interleave(group, dim=1).transpose(0, 1)[None],
            attn_mask=torch.cat(masks, dim=1)[None, None],
        )
        hidden = layer.leave(z, residual, attended[0].transpose(0, 1))
        post = model.norm(hidden)
        state = model.feedback(hidden, post)
        label = (rows + step).clamp(max=num_rows - 1)
        valid = (rows + step <= packed.last[rows]) & (model.draft_ids[batch.top[label]] >= 0)
        p = (batch.final[label] @ teacher_head.T).float().softmax(-1)
        kl = (p * (p.log() - model.logits(post).float().log_softmax(-1))).sum(-1)
        total = total + setting.decay ** (step - 1) * (kl * valid).sum() / len(rows)
    return total


def measure(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one variant in this process."""
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    dtype = DTYPES[options.precision]
    target = make_target(dtype, device)
    config = Eagle3Config.for_target(
        target.info, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
        draft_vocab_size=DRAFT_VOCAB, head="target_rows", feedback="post",
    )  # fmt: skip
    model = Eagle3Model(config, target)
    model.init_weights(torch.Generator().manual_seed(2))
    head = target.head[:DRAFT_VOCAB]
    batch = make_batch(options.rows, options.sequences, dtype, device)
    setting = ChainSetting(depth=options.depth)
    steps: dict[str, Callable[[], Any]] = {
        "specbench": lambda: chain_loss(model, batch, head, setting, normaliser=len(batch.rows)).loss,
        "naive": lambda: naive_loss(model, batch, head, setting),
    }
    before = _memory(device)
    times = []
    for _ in range(options.repeats + 1):
        began = time.perf_counter()
        loss = steps[variant]()
        loss.backward()
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {
        "loss": float(loss.detach()),
        "tokens_per_second": len(batch.rows) / min(times[1:]),
        "peak_mib": (_memory(device) - before) / 2**20,
    }


def _memory(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    """Run both variants and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="positions in the pack")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=("specbench", "naive"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options)))
        return
    found = {}
    for variant in ("specbench", "naive"):
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[variant] = json.loads(output.splitlines()[-1])
        row = found[variant]
        print(
            f"{variant:10s} {row['tokens_per_second']:8.0f} answer tokens/s   peak {row['peak_mib']:7.0f} MiB   "
            f"loss {row['loss']:.5f}"
        )
    ours, naive = found["specbench"], found["naive"]
    print(
        f"speed {ours['tokens_per_second'] / naive['tokens_per_second']:.2f}x (at least 1.5), "
        f"memory {ours['peak_mib'] / naive['peak_mib']:.2f} of the naive step's (at most 0.5)"
    )


if __name__ == "__main__":
    main()
