"""Block attention: the reference against SDPA and chain attention, the other backends against the reference."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from specbench.drafters.kernels.block import block_attention, reference
from specbench.drafters.kernels.chain import reference as chain_reference
from specbench.drafters.kernels.prefix import blocked

FLOATS = ("q", "k", "v", "block_k", "block_v", "q_sink")
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def make(
    lengths: tuple[int, ...],
    size: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dim: int = 16,
    window: int | None = None,
    sink: tuple[int, int] | None = None,
    repacked: bool = False,
    causal: bool = False,
    keep: float = 1.0,
    padding: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Random inputs; a block on every kept row, padding rows around them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    cu = torch.tensor([0, *lengths]).cumsum(0)
    total = int(cu[-1])
    rows = torch.arange(total)[torch.rand(total, generator=generator) <= keep]
    rows = torch.cat([rows.new_full((padding,), -1), rows, rows.new_full((padding,), total)])
    num_heads, num_kv = heads
    bounds = (
        None if sink is None else torch.tensor([[min(s, n) for s in sink] for n in lengths]) + cu[:-1, None]
    )
    return {
        "q": normal(len(rows), size, num_heads, dim),
        "k": normal(total, num_kv, dim),
        "v": normal(total, num_kv, dim),
        "block_k": normal(len(rows), size, num_kv, dim),
        "block_v": normal(len(rows), size, num_kv, dim),
        "rows": rows,
        "cu_seqlens": cu,
        "causal": causal,
        "window": window,
        "sink": bounds,
        "q_sink": normal(len(rows), size, num_heads, dim) if repacked else None,
    }


def gradients(function: Any, args: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {n: args[n].detach().clone().requires_grad_() for n in FLOATS if args[n] is not None}
    out = function(**{**args, **leaves})
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        out.device
    )
    found = torch.autograd.grad((out.double() * weight).sum(), list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]
    return out.detach(), dict(zip(leaves, zeros, strict=True))


def check(args: dict[str, Any], backend: str, device: str, tolerance: float) -> None:
    here = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in args.items()}
    exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in args.items()}
    out, grads = gradients(partial(block_attention, backend=backend), here)
    want, want_grads = gradients(reference.block_attention, exact)
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


@pytest.mark.parametrize("row", [0, 8])
def test_reference_is_bidirectional_sdpa_over_prefix_and_block(row: int) -> None:
    args = make((9,), 4, heads=(4, 2))
    keys, values = (
        torch.cat([args[a][: row + 1], args[b][row]])[None].transpose(1, 2)
        for a, b in (("k", "block_k"), ("v", "block_v"))
    )
    want = functional.scaled_dot_product_attention(
        args["q"][row][None].transpose(1, 2), keys, values, enable_gqa=True
    )
    torch.testing.assert_close(reference.block_attention(**args)[row], want[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize("window", [None, 3, 7])
def test_reference_of_a_causal_block_is_a_chain_query_by_query(window: int | None) -> None:
    """Query t of a causal block sees what step t + 2 of a chain with the same own keys sees."""
    args = make((12, 5), 3, window=window, sink=(0, 2), repacked=True, causal=True, padding=1)
    out = reference.block_attention(**args)
    for t in range(3):
        want = chain_reference.chain_attention(
            args["q"][:, t],
            args["k"],
            args["v"],
            args["block_k"][:, : t + 1],
            args["block_v"][:, : t + 1],
            args["rows"],
            args["cu_seqlens"],
            window=window,
            sink=args["sink"],
            q_sink=args["q_sink"][:, t],
        )
        torch.testing.assert_close(out[:, t], want, **CLOSE)


def test_windowed_block_sees_its_own_later_keys_by_hand() -> None:
    """Row 3, B = 4, window 6: query 2 at position 6 averages positions 1..7 when all scores are equal."""
    args = make((4,), 4, heads=(1, 1), dim=4, window=6)
    args["q"] = torch.zeros_like(args["q"])
    want = (args["v"][1:, 0].sum(0) + args["block_v"][3, :, 0].sum(0)) / 7
    torch.testing.assert_close(reference.block_attention(**args)[3, 2, 0], want)


blocks = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple),
        "size": st.integers(1, 5),
        "heads": st.sampled_from([(2, 2), (3, 1), (8, 2)]),
        "window": st.none() | st.integers(1, 35),
        "sink": st.none() | st.sampled_from([(0, 1), (0, 4), (2, 9), (5, 5)]),
        "repacked": st.booleans(),
        "causal": st.booleans(),
        "keep": st.sampled_from([1.0, 0.4]),
        "padding": st.integers(0, 1),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=50, deadline=None)
@given(blocks)
def test_blocked_equals_reference_forward_and_backward(drawn: dict[str, Any]) -> None:
    saved = blocked.MAX_ROWS
    blocked.MAX_ROWS = 12
    try:
        check(make(dim=8, **drawn), "blocked", "cpu", 1e-9)
    finally:
        blocked.MAX_ROWS = saved


CASES: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": (11, 1), "size": 5, "heads": (3, 1), "dim": 64},
    "window-sink": {
        "lengths": (14,),
        "size": 3,
        "window": 6,
        "sink": (0, 2),
        "repacked": True,
        "keep": 0.5,
        "heads": (4, 1),
        "dim": 128,
    },
    "causal": {
        "lengths": (6,),
        "size": 4,
        "window": 5,
        "causal": True,
        "padding": 1,
        "heads": (2, 2),
        "dim": 256,
    },
    "one-token-empty-sink": {
        "lengths": (1, 1),
        "size": 2,
        "window": 9,
        "sink": (1, 1),
        "heads": (8, 1),
        "dim": 96,
    },
    "sink-inside-window": {
        "lengths": (9,),
        "size": 2,
        "window": 8,
        "sink": (3, 7),
        "repacked": True,
        "heads": (8, 2),
        "dim": 64,
    },
    "only-padding-rows": {
        "lengths": (3,),
        "size": 2,
        "keep": -1.0,
        "padding": 2,
        "heads": (3, 1),
        "dim": 128,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_reference(triton_device: str, name: str) -> None:
    check(make(dtype=torch.float32, **CASES[name]), "triton", triton_device, 2e-5)


@pytest.mark.parametrize(("backend", "causal"), [("sdpa", False), ("sdpa", True), ("flex", True)])
def test_library_backends_equal_reference(backend: str, causal: bool) -> None:
    args = make((13, 4), 4, window=6, sink=(0, 2), causal=causal, padding=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # FlexAttention says that it is not compiled here.
        out = block_attention(**args, backend=backend)
    torch.testing.assert_close(out, reference.block_attention(**args), **CLOSE)
