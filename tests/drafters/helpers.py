"""Small random targets, traces and drafters, without a target model: scoring needs only numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span, TargetInfo, TargetWeights, Trace

VOCAB, WIDTH, LAYERS = 23, 16, 8


def make_target(
    seed: int = 0, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, width: int = WIDTH
) -> TargetWeights:
    g = torch.Generator().manual_seed(seed)
    info = TargetInfo(
        name="toy",
        fingerprint="0" * 16,
        hidden_size=width,
        num_layers=LAYERS,
        vocab_size=vocab,
        max_positions=512,
        dtype=str(dtype),
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_id=1,
    )
    return TargetWeights(
        info=info,
        embed=torch.randn(vocab, width, generator=g, dtype=dtype),
        head=torch.randn(vocab, width, generator=g, dtype=dtype),
    )


def make_prompt(ids: list[int], spans: tuple[Span, ...] | None = None, name: str = "toy/0") -> RenderedPrompt:
    condition = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")
    return RenderedPrompt(
        prompt_id=name,
        suite="toy",
        category="toy",
        turn=0,
        condition=condition,
        token_ids=tuple(ids),
        spans=spans or (Span(kind="user", start=0, end=len(ids)),),
        bos_count=int(bool(ids) and ids[0] == 1),
        template_hash="",
    )


def make_trace(
    length: tuple[int, int],
    seed: int,
    *,
    vocab: int = VOCAB,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
    temperature: float = 0.0,
    spans: tuple[Span, ...] | None = None,
    prefix: tuple[int, ...] = (),
) -> Trace:
    """A random answer of ``length[1]`` tokens to ``length[0]`` tokens, with random taps at every depth."""
    g = torch.Generator().manual_seed(seed)
    p, a = length
    ids = torch.randint(2, vocab, (p + a,), generator=g).tolist()
    ids[: len(prefix)] = prefix
    taps = {i: torch.randn(p + a - 1, width, generator=g, dtype=dtype) * (i + 1) for i in range(LAYERS + 1)}
    return Trace(
        prompt=make_prompt(ids[:p], spans, name=f"toy/{seed}"),
        answer_ids=tuple(ids[p:]),
        taps=taps,
        logprobs=-torch.rand(a, generator=g, dtype=torch.float64) * 3,
        margins=torch.ones(a),
        entropies=torch.ones(a),
        finish="length",
        sampling=Sampling(temperature=temperature),
    )


def make_model(target: TargetWeights, seed: int = 0, std: float = 0.4, **changes: Any) -> Eagle3Model:
    """A random drafter; sharp enough that ties do not happen and that its tokens vary."""
    settings: dict[str, Any] = {
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "taps": (2, 4, 5),
        "head": "own",
    }
    settings.update(changes)
    if settings["head"] == "target":
        settings["draft_vocab_size"] = target.info.vocab_size
    ids = settings.pop("target_ids", None)
    if ids is not None:
        settings["draft_vocab_size"] = len(ids)
    model = Eagle3Model(Eagle3Config.for_target(target.info, **settings), target, ids)
    g = torch.Generator().manual_seed(seed)
    model.init_weights(g, std)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(
                    torch.rand(parameter.shape, generator=g) + (0.5 if name.endswith("weight") else -0.5)
                )
    return model


SPANS = (
    Span(kind="bos", start=0, end=1),
    Span(kind="system", start=2, end=5),
    Span(kind="user", start=5, end=7),
)
HALF = list(range(1, VOCAB, 2))

SWITCHES = st.fixed_dictionaries(
    {
        "feedback": st.sampled_from(["pre", "post"]),
        "norm_per_tap": st.booleans(),
        "norm_joint": st.booleans(),
        "norm_before_residual": st.booleans(),
        "gate": st.booleans(),
        "qk_norm": st.booleans(),
        "qkv_bias": st.booleans(),
        "o_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "fc_bias": st.booleans(),
        "num_layers": st.sampled_from([1, 1, 2, 3]),
        "own_embed": st.booleans(),
        "logit_scale": st.sampled_from([1.0, 0.25]),
        "attention": st.sampled_from(
            ["full", "window", "bos", "first4", "system", "bos-repacked", "system-repacked"]
        ),
        "vocabulary": st.sampled_from(["own-all", "own-half", "target", "rows"]),
    }
)


def build(target: Any, switches: dict[str, Any], seed: int) -> Any:
    s = dict(switches)
    attention, vocabulary = s.pop("attention"), s.pop("vocabulary")
    if attention != "full":
        s["windows"] = tuple(3 + i for i in range(s["num_layers"]))
        name, _, packed = attention.partition("-")
        if name != "window":
            s["sink"] = name
        if packed:
            s["positions"] = packed
    s |= {
        "own-all": {"head": "own"},
        "own-half": {"head": "own", "target_ids": HALF},
        "target": {"head": "target"},
        "rows": {"head": "target_rows", "target_ids": HALF},
    }[vocabulary]
    return make_model(target, seed, **s)
