"""The target's law over the next token, and what is kept of it.

Example:
    choice = choose(logits, sampling, uniforms)   # logits [B, V]
    choice.tokens, choice.margins                 # [B], [B]
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Next tokens and the facts a trace keeps about them, one per row."""

    tokens: Tensor
    """[B] int64"""
    logprobs: Tensor
    """[B] under the law the token was drawn from (greedy: temperature 1)."""
    margins: Tensor
    """[B] own logit minus the best other logit."""
    entropies: Tensor
    """[B] nats, temperature 1."""


def law(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities the target samples from, [..., V]; greedy puts all mass on the first maximum."""
    if sampling.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    scaled = logits / sampling.temperature
    if sampling.top_k:
        floor = scaled.topk(min(sampling.top_k, scaled.shape[-1]), dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    probs = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(-1, descending=True)
        # a token stays while the mass before it is below top_p, so at least one always does
        dropped = (ordered.cumsum(-1) - ordered) >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: probs [B, V], uniforms [B] in [0, 1) -> tokens [B]."""
    cumulative = probs.double().cumsum(-1)
    picked = torch.searchsorted(cumulative, uniforms.double()[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # rounding can point past the last token with mass, or at one without any
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.minimum(picked, last)


def describe(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Choice:
    """Return the facts about given tokens under given logits.

    Args:
        logits: [B, V] float32.
        tokens: [B].
        sampling: the law whose log-probability is kept.
    """
    chosen = logits.gather(-1, tokens[:, None])
    best_other = logits.scatter(-1, tokens[:, None], -torch.inf).amax(-1)
    top = torch.maximum(chosen[:, 0], best_other)
    shifted = logits - top[:, None]
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    entropies = log_total - (weights * shifted).sum(-1) / total
    if sampling.greedy or (sampling.temperature == 1.0 and not sampling.top_k and sampling.top_p == 1.0):
        logprobs = chosen[:, 0] - top - log_total
    else:
        logprobs = law(logits, sampling).gather(-1, tokens[:, None])[:, 0].log()
    return Choice(tokens=tokens, logprobs=logprobs, margins=chosen[:, 0] - best_other, entropies=entropies)


def choose(logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None) -> Choice:
    """Pick the next token of every row.

    Args:
        logits: [B, V] float32.
        sampling: greedy, or the law to draw from.
        uniforms: [B] in [0, 1); needed unless greedy.
    """
    if sampling.greedy:
        return describe(logits, logits.argmax(-1), sampling)
    assert uniforms is not None, "sampling needs uniforms"
    return describe(logits, draw(law(logits, sampling), uniforms), sampling)


def stream(seed: int, *key: object) -> np.random.Generator:
    """A random stream that depends on the seed and the key alone, never on batching or order."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
