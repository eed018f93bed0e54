"""Chain attention: the reference against a loop and SDPA, the blocked path against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from specbench.drafters.kernels.chain import blocked, chain_attention, chain_attention_stats, reference
from specbench.errors import UserError

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
FLOATS = ("q", "k", "v", "own_k", "own_v", "q_sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What hypothesis draws; ``make`` turns it into tensors."""

    lengths: tuple[int, ...]
    num_own: int
    window: int | None
    sinks: tuple[tuple[int, int], ...] | None
    heads: tuple[int, int]
    dim: int
    keep: float
    padding: int
    repacked: bool
    seed: int

    def make(self, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        cu = torch.tensor([0, *self.lengths]).cumsum(0)
        total = int(cu[-1])
        rows = torch.arange(total)[torch.rand(total, generator=generator) <= self.keep]
        rows = torch.cat([rows.new_full((self.padding,), -1), rows, rows.new_full((self.padding,), total)])
        num_heads, num_kv = self.heads
        own = self.num_own > 0
        sink = None
        if self.sinks is not None:
            ends = [(min(a, n), min(b, n)) for (a, b), n in zip(self.sinks, self.lengths, strict=True)]
            sink = torch.tensor(ends).view(-1, 2) + cu[:-1, None]
        return {
            "q": normal(len(rows), num_heads, self.dim),
            "k": normal(total + self.padding, num_kv, self.dim),
            "v": normal(total + self.padding, num_kv, self.dim),
            "own_k": normal(len(rows), self.num_own, num_kv, self.dim) if own else None,
            "own_v": normal(len(rows), self.num_own, num_kv, self.dim) if own else None,
            "rows": rows,
            "cu_seqlens": cu,
            "window": self.window,
            "sink": sink,
            "q_sink": normal(len(rows), num_heads, self.dim) if self.repacked else None,
        }


@st.composite
def cases(draw: st.DrawFn, max_length: int = 40, dims: tuple[int, ...] = (8,)) -> Case:
    lengths = tuple(draw(st.lists(st.integers(0, max_length), min_size=1, max_size=3)))
    span = st.integers(0, max_length)
    with_sinks = draw(st.booleans())
    sinks = tuple(tuple(sorted((draw(span), draw(span)))) for _ in lengths) if with_sinks else None
    return Case(
        lengths=lengths,
        num_own=draw(st.integers(0, 5)),
        window=draw(st.none() | st.integers(1, max_length + 8)),
        sinks=sinks,  # type: ignore[arg-type]
        heads=draw(st.sampled_from([(2, 2), (3, 1), (4, 1), (8, 2), (8, 1)])),
        dim=draw(st.sampled_from(dims)),
        keep=draw(st.sampled_from([1.0, 0.5, 0.1])),
        padding=draw(st.integers(0, 2)),
        repacked=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def gradients(function: Any, args: dict[str, Any], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and the gradients of a fixed random projection of it."""
    leaves = {n: args[n].detach().clone().requires_grad_() for n in FLOATS if args[n] is not None}
    out = function(**{**args, **leaves})
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = torch.autograd.grad((out.double() * weight).sum(), list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]
    return out.detach(), dict(zip(leaves, zeros, strict=True))


def by_loop(args: dict[str, Any]) -> Tensor:
    """The definition, one query and one head at a time, in words of positions."""
    q, k, v, window = args["q"], args["k"], args["v"], args["window"]
    num_own = 0 if args["own_k"] is None else args["own_k"].shape[1]
    bounds = args["cu_seqlens"].tolist()
    out = torch.zeros_like(q)
    for r, row in enumerate(args["rows"].tolist()):
        here = [s for s in range(len(bounds) - 1) if bounds[s] <= row < bounds[s + 1]]
        if not here:
            continue
        first, last = (0, 0) if args["sink"] is None else args["sink"][here[0]].tolist()
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            scores, values = [], []
            position = row + num_own
            for n in range(bounds[here[0]], row + 1):
                inside = window is None or n > position - window
                if inside or first <= n < last:
                    query = q if inside or args["q_sink"] is None else args["q_sink"]
                    scores.append(float(query[r, h] @ k[n, g]) / math.sqrt(q.shape[2]))
                    values.append(v[n, g])
            for i in range(num_own):
                if window is None or row + 1 + i > position - window:
                    scores.append(float(q[r, h] @ args["own_k"][r, i, g]) / math.sqrt(q.shape[2]))
                    values.append(args["own_v"][r, i, g])
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            out[r, h] = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    return out


@settings(max_examples=40, deadline=None)
@given(cases(max_length=9, dims=(4,)))
def test_reference_is_the_definition(case: Case) -> None:
    args = case.make()
    torch.testing.assert_close(reference.chain_attention(**args), by_loop(args), **CLOSE)


def test_reference_at_step_one_is_causal_sdpa() -> None:
    case = Case(
        lengths=(17,),
        num_own=0,
        window=None,
        sinks=None,
        heads=(6, 2),
        dim=8,
        keep=1,
        padding=0,
        repacked=False,
        seed=1,
    )
    args = case.make()
    q, k, v = (args[n].transpose(0, 1)[None] for n in "qkv")
    want = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference.chain_attention(**args), want[0].transpose(0, 1), **CLOSE)


def test_reference_at_later_steps_is_sdpa_over_a_longer_sequence() -> None:
    """The chain of the last row, fed step by step, is ordinary decoding: its queries see one growing sequence."""
    case = Case(
        lengths=(11,),
        num_own=3,
        window=None,
        sinks=None,
        heads=(4, 1),
        dim=8,
        keep=1,
        padding=0,
        repacked=False,
        seed=2,
    )
    args = case.make()
    keys, values = (
        torch.cat([args[a], args[b][-1]])[None].transpose(1, 2) for a, b in (("k", "own_k"), ("v", "own_v"))
    )
    query = args["q"][-1][None, :, None]
    want = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    torch.testing.assert_close(reference.chain_attention(**args)[-1], want[0, :, 0], **CLOSE)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_blocked_equals_reference_forward_and_backward(case: Case) -> None:
    args = case.make()
    with small_blocks():
        out, grads = gradients(chain_attention, args, case.seed)
    want, want_grads = gradients(reference.chain_attention, args, case.seed)
    torch.testing.assert_close(out, want, **CLOSE)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=40, deadline=None)
@given(cases())
def test_stats_equal_reference(case: Case) -> None:
    args = case.make()
    labels = torch.arange(args["k"].shape[0]) % 3
    for recent in (None, 4):
        with small_blocks():
            got = chain_attention_stats(**args, labels=labels, num_regions=3, recent=recent)
        want = chain_attention_stats(**args, labels=labels, num_regions=3, recent=recent, backend="reference")
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        real = (args["rows"] >= 0) & (args["rows"] < args["cu_seqlens"][-1])
        sums = got[1].sum(-1)
        torch.testing.assert_close(sums, real[:, None].expand_as(sums).double(), **CLOSE)


def test_stats_of_equal_scores_by_hand() -> None:
    """Zero queries spread the mass evenly: row 3 with two own keys sees six keys."""
    args = {"q": torch.zeros(1, 1, 4), "k": torch.ones(5, 1, 4), "v": torch.ones(5, 1, 4)}
    own = torch.ones(1, 2, 1, 4)
    rows, cu, labels = torch.tensor([3]), torch.tensor([0, 5]), torch.tensor([0, 1, 1, 2, 2])
    out, mass, entropy = chain_attention_stats(
        **args, own_k=own, own_v=own, rows=rows, cu_seqlens=cu, labels=labels, num_regions=3
    )
    torch.testing.assert_close(mass[0, 0], torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]) / 6)
    torch.testing.assert_close(entropy, torch.full((1, 1), math.log(6)))
    torch.testing.assert_close(out, torch.ones(1, 1, 4))


@pytest.mark.parametrize("num_own", [0, 3])
def test_idle_window_changes_no_bit(num_own: int) -> None:
    case = Case(
        lengths=(300, 0, 1, 129), num_own=num_own, window=None, sinks=((0, 4),) * 4, heads=(9, 3), dim=64, keep=0.9,
        padding=1, repacked=True, seed=3,
    )  # fmt: skip
    args = case.make(torch.float32)
    full = chain_attention(**args)
    assert torch.equal(chain_attention(**{**args, "window": 300 + num_own}), full)
    assert not torch.equal(chain_attention(**{**args, "window": 299 + num_own}), full)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
    ids=["fp32", "bf16", "fp16"],
)
def test_lower_precision_stays_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    case = Case(
        lengths=(70, 33), num_own=2, window=20, sinks=((0, 1), (3, 9)), heads=(8, 2), dim=64, keep=1, padding=0,
        repacked=True, seed=4,
    )  # fmt: skip
    args = case.make(dtype)
    exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in args.items()}
    out, grads = gradients(chain_attention, args, 0)
    want, want_grads = gradients(reference.chain_attention, exact, 0)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    for name, grad in grads.items():
        scale = want_grads[name].abs().max().item()
        torch.testing.assert_close(grad.double(), want_grads[name], rtol=tolerance, atol=tolerance * scale)


def test_padding_rows_are_zero_with_zero_gradient() -> None:
    case = Case(
        lengths=(5,),
        num_own=2,
        window=3,
        sinks=None,
        heads=(2, 1),
        dim=8,
        keep=1,
        padding=2,
        repacked=False,
        seed=5,
    )
    args = case.make()
    for function in (chain_attention, reference.chain_attention):
        out, grads = gradients(function, args, 0)
        for found in (out, grads["q"], grads["own_k"], grads["own_v"]):
            assert torch.isfinite(found).all()
            assert not found[[0, 1, -1, -2]].any()
        assert not grads["k"][5:].any()


def test_gradcheck() -> None:
    case = Case(
        lengths=(4, 3), num_own=2, window=4, sinks=((0, 1), (0, 2)), heads=(2, 1), dim=3, keep=1, padding=0,
        repacked=True, seed=6,
    )  # fmt: skip
    args = case.make()
    names = ("q", "k", "v", "own_k", "own_v", "q_sink")
    leaves = tuple(args[n].requires_grad_() for n in names)
    rest = {n: x for n, x in args.items() if n not in names}
    assert torch.autograd.gradcheck(
        lambda *x: chain_attention(**dict(zip(names, x, strict=True)), **rest), leaves
    )


def test_unknown_backend_is_named() -> None:
    args = Case(
        lengths=(2,),
        num_own=0,
        window=None,
        sinks=None,
        heads=(1, 1),
        dim=4,
        keep=1,
        padding=0,
        repacked=False,
        seed=0,
    ).make()
    with pytest.raises(UserError, match="did you mean 'triton'"):
        chain_attention(**args, backend="tritn")


class small_blocks:
    """Blocks of 7 rows and few scores, so that small inputs cross block borders and take heads in turns."""

    def __enter__(self) -> None:
        self.saved = blocked.MAX_ROWS, blocked.MAX_SPAN, blocked.MAX_SCORES
        blocked.MAX_ROWS, blocked.MAX_SPAN, blocked.MAX_SCORES = 7, 11, 300

    def __exit__(self, *_: object) -> None:
        blocked.MAX_ROWS, blocked.MAX_SPAN, blocked.MAX_SCORES = self.saved
