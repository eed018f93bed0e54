"""Draft-decode attention: the reference against SDPA and chain attention, the other backends against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from specbench.drafters.kernels.chain import reference as chain_reference
from specbench.drafters.kernels.decode import decode_attention, reference
from specbench.errors import SpecbenchWarning

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def make(
    lengths: tuple[int, ...],
    *,
    num_queries: int = 1,
    heads: tuple[int, int] = (4, 1),
    dim: int = 16,
    window: int | None = None,
    sink: tuple[int, int] | None = None,
    repacked: bool = False,
    gated: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Random inputs in a cache three slots longer than needed, whose unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    batch, capacity = len(lengths), max(lengths) + 3
    cache = [normal(batch, capacity, heads[1], dim) for _ in range(2)]
    for x in cache:
        for b, n in enumerate(lengths):
            x[b, n:] = torch.nan
    queries = (batch, num_queries, heads[0], dim)
    return {
        "q": normal(*queries),
        "k": cache[0],
        "v": cache[1],
        "lengths": torch.tensor(lengths),
        "window": window,
        "sink": None if sink is None else torch.tensor([[min(s, n) for s in sink] for n in lengths]),
        "q_sink": normal(*queries) if repacked else None,
        "gate": normal(*queries) if gated else None,
    }


def exact(args: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in args.items()}


def test_reference_is_sdpa_over_the_filled_cache() -> None:
    args = make((9, 4), heads=(4, 2))
    for b, n in enumerate((9, 4)):
        q, k, v = (x[b : b + 1].transpose(1, 2) for x in (args["q"], args["k"][:, :n], args["v"][:, :n]))
        want = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(reference.decode_attention(**args)[b], want[0].transpose(0, 1), **CLOSE)


def test_reference_is_the_newest_rows_of_step_one() -> None:
    args = make((12,), num_queries=3, window=4, sink=(0, 2), repacked=True)
    want = chain_reference.chain_attention(
        args["q"][0],
        args["k"][0, :12],
        args["v"][0, :12],
        None,
        None,
        torch.arange(9, 12),
        torch.tensor([0, 12]),
        window=4,
        sink=args["sink"],
        q_sink=args["q_sink"][0],
    )
    torch.testing.assert_close(reference.decode_attention(**args)[0], want, **CLOSE)


def test_gate_multiplies_by_its_sigmoid() -> None:
    args = make((5,), gated=True)
    open_gate = decode_attention(**{**args, "gate": None})
    torch.testing.assert_close(decode_attention(**args), open_gate * torch.sigmoid(args["gate"]), **CLOSE)


drawn = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
        "num_queries": st.integers(1, 4),
        "heads": st.sampled_from([(1, 1), (3, 1), (4, 1), (8, 2)]),
        "window": st.none() | st.integers(1, 45),
        "sink": st.none() | st.sampled_from([(0, 1), (0, 4), (2, 19), (5, 5)]),
        "repacked": st.booleans(),
        "gated": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=80, deadline=None)
@given(drawn)
def test_blocked_equals_reference(case: dict[str, Any]) -> None:
    args = make(dim=8, **case)
    out = decode_attention(**args)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, reference.decode_attention(**args), **CLOSE)


@pytest.mark.parametrize("num_splits", [1, 3])
@settings(max_examples=8, deadline=None)
@given(drawn, st.sampled_from([64, 96, 128, 256]))
def test_triton_equals_reference(triton_device: str, num_splits: int, case: dict[str, Any], dim: int) -> None:
    check_triton(make(dtype=torch.float32, dim=dim, **case), triton_device, num_splits)


@pytest.mark.parametrize(
    ("heads", "dim", "num_queries"),
    [((2, 2), 256, 1), ((3, 1), 128, 2), ((4, 1), 96, 1), ((8, 1), 64, 9)],
    ids=["1", "3", "4", "8"],
)
def test_triton_at_head_dims_and_ratios(
    triton_device: str, heads: tuple[int, int], dim: int, num_queries: int
) -> None:
    """Nine queries of eight heads are more rows than one program takes in the interpreter."""
    shape: dict[str, Any] = {"num_queries": num_queries, "heads": heads, "dim": dim, "dtype": torch.float32}
    args = make((23, 1, 0), window=6, sink=(0, 2), repacked=True, gated=True, **shape)
    check_triton(args, triton_device, 2)


def check_triton(args: dict[str, Any], triton_device: str, num_splits: int) -> None:
    from specbench.drafters.kernels.decode import triton

    here = {n: x.to(triton_device) if isinstance(x, Tensor) else x for n, x in args.items()}
    out = triton.decode_attention(**here, num_splits=num_splits).double().cpu()
    torch.testing.assert_close(out, reference.decode_attention(**exact(args)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=["bf16", "fp16"]
)
def test_triton_in_half_precision(triton_device: str, dtype: torch.dtype, tolerance: float) -> None:
    args = make((37, 6), num_queries=2, window=11, sink=(0, 3), repacked=True, gated=True, dtype=dtype)
    here = {n: x.to(triton_device) if isinstance(x, Tensor) else x for n, x in args.items()}
    out = decode_attention(**here, backend="triton").double().cpu()
    torch.testing.assert_close(out, reference.decode_attention(**exact(args)), rtol=tolerance, atol=tolerance)


def test_splits_fill_the_device_and_no_more() -> None:
    pytest.importorskip("triton")
    from specbench.drafters.kernels.decode.triton import split_count

    assert split_count(8, 131072, 132) == 66  # 528 programs for 132 processors
    assert split_count(8, 1024, 132) == 4  # no part under 256 keys
    assert split_count(4096, 131072, 132) == 1  # enough programs without splitting
    assert split_count(1, 10, 132) == 1


def test_too_many_queries_fall_back_with_the_number(triton_device: str) -> None:
    args = make((40,), num_queries=20, heads=(8, 1), dtype=torch.float32)
    here = {n: x.to(triton_device) if isinstance(x, Tensor) else x for n, x in args.items()}
    with pytest.warns(SpecbenchWarning, match="160 queries a key-value head are over 128"):
        out = decode_attention(**here, backend="triton")
    torch.testing.assert_close(
        out.double().cpu(), reference.decode_attention(**exact(args)), rtol=1e-5, atol=1e-5
    )
