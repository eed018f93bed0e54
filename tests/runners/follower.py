"""A made-up target whose answers follow a rule, and drafters that really learn it in seconds.

A sequence has a topic, which only the target's states tell. The next token is a permutation of the newest one, chosen
by the topic and by the parity of the token two places before: a drafter has to read the taps, to look back by
relative position, and to carry the topic along its chain. Tap i of position p holds token and topic in a rotation of
layer i's own, at a size that varies from position to position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.drafters.chains import Packed, run_chains
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.drafters.mtp import MtpConfig, MtpModel
from specbench.types import ConditionInfo, RenderedPrompt, Span, TargetInfo, TargetWeights, Trace

VOCAB, WIDTH, LAYERS, TAPS, BOS = 42, 48, 8, (2, 4, 6), 1
USED = tuple(range(3, VOCAB - 2, 2))
"""Tokens that occur: the draft vocabulary, neither first nor contiguous."""
DEPTH = 3
_G = torch.Generator().manual_seed(7)
_PERMUTATIONS = torch.stack([torch.randperm(len(USED), generator=_G) for _ in range(4)])
_TOKENS = torch.randn(VOCAB, WIDTH, generator=_G)
_TOPICS = torch.randn(2, WIDTH, generator=_G)
_TURNS = torch.linalg.qr(torch.randn(LAYERS + 1, WIDTH, WIDTH, generator=_G)).Q
_DOUBLED = torch.randn(WIDTH, generator=_G)


def make_target(rope_theta: float = 100.0) -> TargetWeights:
    info = TargetInfo(
        name="follower",
        fingerprint="0" * 16,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        max_positions=512,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        bos_id=BOS,
    )
    g = torch.Generator().manual_seed(3)
    embed, head = (torch.randn(VOCAB, WIDTH, generator=g) for _ in range(2))
    return TargetWeights(info=info, embed=embed, head=head)


def make_trace(number: int, prompt: int = 8, answer: int = 40, bos: int = 1) -> Trace:
    """Sequence ``number``; with two BOS tokens the states differ everywhere by a constant."""
    g = torch.Generator().manual_seed(1000 + number)
    topic = int(torch.randint(0, 2, (), generator=g))
    # counted from zero: indices into USED
    ids = torch.randint(0, len(USED), (3,), generator=g).tolist()
    while len(ids) < prompt + answer:
        ids.append(int(_PERMUTATIONS[2 * topic + ids[-3] % 2, ids[-1]]))
    tokens = [BOS] * bos + [USED[i] for i in ids]
    states = _TOKENS[tokens[:-1]] + 2 * _TOPICS[topic]
    if bos == 2:
        states = states + 2 * _DOUBLED
    sizes = torch.exp(0.7 * torch.randn(len(states), 1, generator=g))
    taps = {i: (i + 1) * sizes * (states @ _TURNS[i]) for i in range(LAYERS + 1)}
    length = bos + prompt
    rendered = RenderedPrompt(
        prompt_id=f"follower/{number}",
        suite="follower",
        category="",
        turn=0,
        condition=ConditionInfo(id="template/regular", family="template", severity=0, description=""),
        token_ids=tuple(tokens[:length]),
        spans=(Span(kind="bos", start=0, end=bos), Span(kind="user", start=bos, end=length)),
        # the made-up template asks for whatever is here: a second BOS is the training pipeline's doing
        bos_count=1,
        template_hash="",
    )
    zeros = torch.zeros(answer)
    return Trace(
        prompt=rendered,
        answer_ids=tuple(tokens[length:]),
        taps=taps,
        logprobs=zeros,
        margins=zeros,
        entropies=zeros,
        finish="length",
    )


def make_model(target: TargetWeights, seed: int = 0, **switches: Any) -> Eagle3Model:
    sizes = {
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "taps": TAPS,
        "draft_vocab_size": len(USED),
        "trained_depth": DEPTH,
    }
    model = Eagle3Model(Eagle3Config.for_target(target.info, **(sizes | switches)), target, USED)
    model.init_weights(torch.Generator().manual_seed(seed), 0.08)
    return model


def make_mtp(target: TargetWeights, seed: int = 0) -> MtpModel:
    config = MtpConfig.for_target(
        target.info,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        draft_vocab_size=len(USED),
        head="own",
    )
    model = MtpModel(config, target, USED)
    model.init_weights(torch.Generator().manual_seed(seed), 0.08)
    return model


def train(
    model: Eagle3Model | MtpModel, *, steps: int, bos: int = 1, seed: int = 0, rate: float = 4e-3
) -> float:
    """Teach a drafter the rule; return the last loss."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(24):
        traces = [make_trace(int(torch.randint(0, 1 << 30, (), generator=g)), bos=bos) for _ in range(6)]
        packed = Packed.build([(torch.tensor(t.ids), [t.taps[i] for i in model.config.taps]) for t in traces])
        rows = (packed.positions >= 3).nonzero().flatten()
        batches.append((packed, rows[rows + 1 <= packed.last[rows]]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    total = torch.zeros(())
    for step in range(steps):
        packed, rows = batches[step % len(batches)]
        losses: list[Tensor] = []

        def on_step(
            i: int,
            active: Tensor,
            post: Tensor,
            packed: Packed = packed,
            rows: Tensor = rows,
            losses: Any = losses,
        ) -> None:
            labels = model.draft_ids[packed.inputs[rows[active] + i]]
            losses.append(F.cross_entropy(model.logits(post), labels))

        run_chains(model, packed, rows, DEPTH, on_step)
        total = torch.stack(losses).mean()
        optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return float(total.detach())
