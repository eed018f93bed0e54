"""Compiling every Triton kernel ahead of time, for any NVIDIA architecture and without a GPU.

Example: ``compile_variant(variant, 90)`` returns ``Resources(registers=168, shared_bytes=98304, spill_bytes=0, ...)``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbench.drafters.kernels.decode import triton as decode
from specbench.drafters.kernels.prefix import launch
from specbench.drafters.kernels.prefix import triton as prefix

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory one program may have."""

_DTYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_INT64 = {"rows", "bounds", "cu_seqlens", "sink", "labels", "lengths"}
_INT32 = {"plan"}
_FLOAT32 = {"lse", "delta", "delta_out", "mass_out", "entropy_out", "partial", "partial_lse"}
_SCALARS = {"c": "fp32", "scale": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with its constants fixed."""

    name: str
    kernel: Any
    dim: int
    dtype: torch.dtype
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the assembler says about one compiled kernel."""

    registers: int
    """Per thread."""
    shared_bytes: int
    spill_bytes: int
    """Bytes stored to local memory for want of registers, per thread."""
    cubin_bytes: int
    matrix_instruction: str
    """``wgmma``, ``tcgen05``, ``mma`` or ``none``."""


def variants(
    dims: tuple[int, ...] = (64, 96, 128, 192, 256),
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32),
    architecture: int = 90,
) -> Iterator[Variant]:
    """Yield every kernel as chain, block and decode attention launch it on one architecture."""
    for dim in dims:
        for dtype in dtypes:
            yield from _prefix_variants(dim, dtype, architecture)
            yield from _decode_variants(dim, dtype)
    yield from _plan_variants()


_CHAIN = ("chain fwd", "chain dq", "chain dkv", "chain own", "chain stats")
_BLOCK = ("block fwd", "block dq", "block dkv", "block own")
_DECODE = ("decode split T1", "decode split T16", "decode merge")
LEGS = (
    (128, torch.bfloat16, (*_CHAIN, *_BLOCK, *_DECODE)),
    (128, torch.float32, (*_CHAIN, "decode split T1", "decode merge")),
    (64, torch.float16, (*_CHAIN, "decode split T1")),
    (64, torch.float32, _CHAIN),
    (256, torch.bfloat16, (*_CHAIN, "decode split T1", "decode split T16")),
    (192, torch.float32, (*_CHAIN, "decode split T1")),
)
"""Head dimension, dtype, and the kernels that ``covering`` compiles with them."""


def covering(architecture: int = 90) -> Iterator[Variant]:
    """Yield the kernels in every set of tiles that a launch on one architecture chooses from, each set once.

    Tiles are chosen by head dimension (to 64, 128, 256) and width of the dtype (16 or 32 bits). The two 16-bit types
    take turns; 192 stands for the dimensions that are no power of two, where loads are masked. Block attention runs
    the kernels of chain attention with another number of queries a row: bfloat16 at 128 stands for it. Every feature
    is on (sinks with queries of their own, own keys, gate): off leaves code out.
    """
    for dim, dtype, names in LEGS:
        for variant in (*_prefix_variants(dim, dtype, architecture), *_decode_variants(dim, dtype)):
            if variant.name in names:
                yield variant
    yield from _plan_variants()


def _prefix_variants(dim: int, dtype: torch.dtype, architecture: int) -> Iterator[Variant]:
    shape = {"G": 4, "HKV": 8, "D": dim, "BLOCK_D": triton.next_power_of_2(dim)}
    for op, num_queries in (("chain", 1), ("block", 16)):
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "fwd": (
                prefix.prefix_fwd_kernel,
                {"HAS_SINK": True, "HAS_OWN": True, "HAS_GATE": num_queries == 1, "CAUSAL": False},
            ),
            "dq": (prefix.prefix_bwd_dq_kernel, {"HAS_SINK": True, "HAS_Q_SINK": True, "HAS_OWN": True}),
            "dkv": (prefix.prefix_bwd_dkv_kernel, {"HAS_SINK": True}),
            "own": (prefix.prefix_bwd_own_kernel, {"CAUSAL": False}),
            "stats": (prefix.prefix_stats_kernel, {"HAS_SINK": True, "HAS_RECENT": True, "BLOCK_C": 16}),
        }
        for kind, (kernel, extra) in kinds.items():
            if kind == "stats" and op == "block":
                continue
            size = launch.tiles(kind, dim, dtype, architecture)
            constants = {
                **shape,
                **extra,
                "BLOCK_M": size.block_m,
                "BLOCK_N": size.block_n,
                "PRECISION": launch.precision(dtype, tensor_cores=kind != "stats"),
            }
            if kind != "stats":
                constants["T"] = num_queries
            yield Variant(
                name=f"{op} {kind}",
                kernel=kernel,
                dim=dim,
                dtype=dtype,
                constants=constants,
                num_warps=size.num_warps,
                num_stages=size.num_stages,
            )


def _decode_variants(dim: int, dtype: torch.dtype) -> Iterator[Variant]:
    shape = {"T": 1, "G": 4, "HKV": 8, "D": dim, "BLOCK_D": triton.next_power_of_2(dim)}
    for num_queries in (1, 16):
        size = decode.tile(dim, num_queries * shape["G"], dtype)
        launched = {"num_warps": size.pop("num_warps"), "num_stages": size.pop("num_stages")}
        common = {**shape, "T": num_queries, "ROWS": decode.rows(num_queries * shape["G"])}
        split = {**common, **size, "HAS_SINK": True, "PRECISION": launch.precision(dtype)}
        yield Variant(
            name=f"decode split T{num_queries}",
            kernel=decode.decode_split_kernel,
            dim=dim,
            dtype=dtype,
            constants=split,
            **launched,
        )
        if num_queries == 1:
            yield Variant(
                name="decode merge",
                kernel=decode.decode_merge_kernel,
                dim=dim,
                dtype=dtype,
                constants={**common, "HAS_GATE": True, "BLOCK_S": 64},
                num_warps=4,
                num_stages=1,
            )


def _plan_variants() -> Iterator[Variant]:
    """The kernels that cut the work into tiles; they see neither head dimension nor dtype."""
    queries = {"HAS_SINK": True, "GROUP": 4, "BLOCK_M": 128, "BLOCK_S": 64}
    keys = {"HAS_SINK": True, "T": 1, "BLOCK_N": 128, "BLOCK_S": 64}
    for name, kernel, constants in (
        ("plan queries", prefix.prefix_plan_queries_kernel, queries),
        ("plan keys", prefix.prefix_plan_keys_kernel, keys),
    ):
        yield Variant(
            name=name,
            kernel=kernel,
            dim=0,
            dtype=torch.float32,
            constants=constants,
            num_warps=4,
            num_stages=1,
        )


def _signature(variant: Variant) -> dict[str, str]:
    types = {}
    for name in variant.kernel.arg_names:
        if name in variant.constants:
            types[name] = "constexpr"
        elif name in _SCALARS:
            types[name] = _SCALARS[name]
        elif name in ("window", "offset", "recent") or name.startswith(("num_", "max_")):
            types[name] = "i32"
        elif name in _INT64:
            types[name] = "*i64"
        elif name in _INT32:
            types[name] = "*i32"
        elif name in _FLOAT32:
            types[name] = "*fp32"
        else:
            types[name] = _DTYPES[variant.dtype]
    return types


def digest(variant: Variant, architecture: int) -> str:
    """Name everything the compiled kernel is made from: source with its helpers, constants, types, launch, Triton.

    Two variants of one digest compile to the same machine code, so a table made once stays true while digests do.
    """
    parts = {
        "sources": _sources(variant.kernel),
        "constants": variant.constants,
        "types": _signature(variant),
        "launch": [variant.num_warps, variant.num_stages, architecture],
        "triton": triton.__version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _sources(kernel: Any) -> dict[str, str]:
    """Return the text of a kernel and of all that it calls or reads by name."""
    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if function.__name__ in found:
            continue
        found[function.__name__] = function.src
        for name in set(re.findall(r"[A-Za-z_]\w*", function.src)):
            value = function.fn.__globals__.get(name)
            if isinstance(value, triton.JITFunction):
                waiting.append(value)
            elif isinstance(value, triton.language.constexpr):
                found[name] = repr(value.value)
    return found


def compile_variant(variant: Variant, architecture: int) -> Resources:
    """Compile ``variant`` for compute capability ``architecture`` (90 is 9.0) and read the assembler's report.

    Raises:
        Exception: Triton's own, where the kernel does not compile.
    """
    types = _signature(variant)
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")
    }
    source = ASTSource(variant.kernel, types, variant.constants, aligned)
    log = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(triton.knobs.compilation.scope())
        stack.enter_context(triton.knobs.nvidia.scope())
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        stack.enter_context(contextlib.redirect_stdout(log))
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
        )
    text = log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    spill = re.search(r"(\d+) bytes spill stores", text)
    assert registers and spill, text
    ptx: str = compiled.asm["ptx"]
    found = [name for name in ("tcgen05.mma", "wgmma.mma", "mma.sync") if name in ptx]
    return Resources(
        registers=int(registers[1]),
        shared_bytes=compiled.metadata.shared,
        spill_bytes=int(spill[1]),
        cubin_bytes=len(compiled.asm["cubin"]),
        matrix_instruction=found[0].split(".")[0] if found else "none",
    )
