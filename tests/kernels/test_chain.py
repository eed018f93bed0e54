"""Chain attention: the reference against a loop and SDPA, the blocked path against the reference."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from specbench.drafters.kernels import dispatch
from specbench.drafters.kernels.chain import (
    chain_attention,
    chain_attention_shares,
    chain_attention_stats,
    reference,
)
from specbench.drafters.kernels.prefix import blocked
from specbench.errors import SpecbenchWarning, UserError

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
FLOATS = ("q", "k", "v", "own_k", "own_v", "q_sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What hypothesis draws; ``make`` turns it into tensors."""

    lengths: tuple[int, ...]
    num_own: int = 0
    window: int | None = None
    sinks: tuple[tuple[int, int], ...] | None = None
    heads: tuple[int, int] = (2, 1)
    dim: int = 16
    keep: float = 1.0
    padding: int = 0
    repacked: bool = False
    seed: int = 0

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
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        out.device
    )
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


@settings(max_examples=40, deadline=None)
@given(cases(), st.lists(st.integers(1, 12), max_size=3))
def test_shares_at_once_equal_the_reference_one_by_one(case: Case, recents: list[int]) -> None:
    args = case.make()
    labels = torch.arange(args["k"].shape[0]) % 3
    with small_blocks():
        got = chain_attention_shares(**args, labels=labels, num_regions=3, recents=recents)
    want = chain_attention_shares(**args, labels=labels, num_regions=3, recents=recents, backend="reference")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


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
    out, grads = gradients(chain_attention, args, 0)
    want, want_grads = gradients(reference.chain_attention, exact(args), 0)
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


def exact(args: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in float64."""
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in args.items()}


def check_triton(case: Case, dtype: torch.dtype, device: str, tolerance: float) -> None:
    args = case.make(dtype)
    here = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in args.items()}
    out, grads = gradients(partial(chain_attention, backend="triton"), here, case.seed)
    want, want_grads = gradients(reference.chain_attention, exact(args), case.seed)
    torch.testing.assert_close(out.double().cpu(), want, rtol=tolerance, atol=tolerance)
    for name, grad in grads.items():
        scale = max(1.0, want_grads[name].abs().max().item()) if grad.numel() else 1.0
        torch.testing.assert_close(
            grad.double().cpu(),
            want_grads[name],
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(max_length=20, dims=(64, 96, 128, 256)))
def test_triton_equals_reference_forward_and_backward(triton_device: str, case: Case) -> None:
    check_triton(case, torch.float32, triton_device, 2e-5)


EDGES = {
    "window-over-prefix": Case(lengths=(5, 17), window=40, sinks=((0, 1), (0, 1)), heads=(3, 1), dim=64),
    "window-within-own": Case(lengths=(9,), num_own=4, window=2, heads=(4, 1), dim=128),
    "empty-sink": Case(lengths=(19,), window=4, sinks=((3, 3),), heads=(2, 2), num_own=1, dim=96),
    "sink-inside-window": Case(
        lengths=(18,), window=12, sinks=((6, 11),), heads=(1, 1), num_own=2, repacked=True, dim=256
    ),
    "sink-span": Case(
        lengths=(33,), window=3, sinks=((2, 21),), heads=(8, 1), num_own=2, repacked=True, keep=0.3, dim=64
    ),
    "one-token": Case(lengths=(1, 1), num_own=1, heads=(8, 2), dim=256),
    "padding-rows": Case(lengths=(4,), num_own=2, window=3, heads=(2, 1), padding=2, dim=128),
    "only-padding-rows": Case(
        lengths=(3, 0), num_own=1, window=2, sinks=((0, 1),) * 2, heads=(3, 1), padding=2, keep=-1, dim=64
    ),
    "odd-head-dim": Case(lengths=(7,), num_own=1, heads=(2, 1), dim=24),
}


@pytest.mark.parametrize("name", EDGES)
def test_triton_at_the_edges(triton_device: str, name: str) -> None:
    check_triton(EDGES[name], torch.float32, triton_device, 2e-5)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 1), (8, 1)], ids=["1", "3", "4", "8"])
def test_triton_at_head_dims_and_ratios(triton_device: str, dim: int, heads: tuple[int, int]) -> None:
    """A tile holds 32, 10, 8 or 4 rows: with 12, its edges fall on both sides of the window's."""
    case = Case(
        lengths=(11, 1), num_own=1, window=5, sinks=((0, 2), (0, 1)), heads=heads, repacked=True, dim=dim
    )
    check_triton(case, torch.float32, triton_device, 2e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=["bf16", "fp16"]
)
def test_triton_in_half_precision(triton_device: str, dtype: torch.dtype, tolerance: float) -> None:
    case = Case(lengths=(21,), num_own=2, window=9, sinks=((0, 2),), heads=(4, 1), repacked=True)
    check_triton(case, dtype, triton_device, tolerance)


def test_triton_idle_window_changes_no_bit(triton_device: str) -> None:
    case = Case(lengths=(37, 1), num_own=1, sinks=((0, 4), (0, 1)), heads=(3, 1), repacked=True)
    args = {
        n: x.to(triton_device) if isinstance(x, Tensor) else x for n, x in case.make(torch.float32).items()
    }
    full = chain_attention(**args, backend="triton")
    assert torch.equal(chain_attention(**{**args, "window": 38}, backend="triton"), full)
    assert not torch.equal(chain_attention(**{**args, "window": 36}, backend="triton"), full)


@pytest.mark.parametrize("recent", [None, 3])
def test_triton_stats_equal_reference(triton_device: str, recent: int | None) -> None:
    case = Case(
        lengths=(21, 3), num_own=2, window=7, sinks=((1, 6), (0, 0)), heads=(3, 1), repacked=True, padding=1
    )
    args = case.make(torch.float32)
    labels = torch.arange(args["k"].shape[0]) % 3
    here = {
        n: x.to(triton_device) if isinstance(x, Tensor) else x for n, x in {**args, "labels": labels}.items()
    }
    got = chain_attention_stats(**here, num_regions=3, recent=recent, backend="triton")
    want = chain_attention_stats(
        **exact(args), labels=labels, num_regions=3, recent=recent, backend="reference"
    )
    for a, b in zip(got, want, strict=True):
        # Mass is summed from 16-bit probabilities and their 16-bit remainders.
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["triton", "blocked"])
@pytest.mark.parametrize("train", [False, True])
def test_gate_multiplies_by_its_sigmoid(triton_device: str, backend: str, train: bool) -> None:
    args = Case(lengths=(6,), num_own=1).make(torch.float32)
    gate = torch.randn(args["q"].shape, generator=torch.Generator().manual_seed(0)).requires_grad_(train)
    here = {n: x.to(triton_device) if isinstance(x, Tensor) else x for n, x in {**args, "gate": gate}.items()}
    out = chain_attention(**here, backend=backend).cpu()
    plain = reference.chain_attention(**args)
    torch.testing.assert_close(out, plain * gate.sigmoid(), rtol=1e-5, atol=1e-5)
    if train:
        (grad,) = torch.autograd.grad(out.sum(), gate)
        torch.testing.assert_close(grad, plain * gate.sigmoid() * (1 - gate.sigmoid()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_library_backends_equal_reference(backend: str) -> None:
    case = Case(
        lengths=(30, 0, 21), num_own=3, window=9, sinks=((0, 2), (0, 0), (3, 12)), heads=(4, 2), padding=1
    )
    args = case.make(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # FlexAttention says that it is not compiled here.
        out = chain_attention(**args, backend=backend)
    torch.testing.assert_close(out.double(), reference.chain_attention(**exact(args)), rtol=1e-5, atol=1e-5)


def test_falling_back_is_said_once_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_said", set())
    args = Case(lengths=(4,), heads=(1, 1), window=2, sinks=((0, 1),), repacked=True).make(torch.float32)
    with pytest.warns(
        SpecbenchWarning, match=r"triton backend does not run here \((triton is not installed|.*CUDA)"
    ):
        out = chain_attention(**args, backend="triton")
    assert torch.equal(out, chain_attention(**args, backend="blocked"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain_attention(**args, backend="triton")
    with pytest.warns(SpecbenchWarning, match="sdpa backend does not run here .*re-packed"):
        chain_attention(**args, backend="sdpa")


class small_blocks:
    """Blocks of 7 rows and few scores, so that small inputs cross block borders and take heads in turns."""

    def __enter__(self) -> None:
        self.saved = blocked.MAX_ROWS, blocked.MAX_SPAN, blocked.MAX_SCORES
        blocked.MAX_ROWS, blocked.MAX_SPAN, blocked.MAX_SCORES = 7, 11, 300

    def __exit__(self, *_: object) -> None:
        blocked.MAX_ROWS, blocked.MAX_SPAN, blocked.MAX_SCORES = self.saved
