"""Chain attention: one query per chain over a causal prefix and the chain's own keys.

Example: ``out = chain_attention(q, k, v, own_k, own_v, rows, cu_seqlens, window=1024)`` with q [R, Hq, D].
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BACKENDS = ("triton", "flex", "sdpa", "reference", "blocked")


def chain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend from one query per chain to the chain's prefix and to its own keys, under one softmax.

    The query sits at position p = row + J. It sees the step-1 keys of its own sequence up to and including
    its row and its J own keys (positions row + 1 .. row + J), cut to positions (p - window, p], and the sink
    keys up to its row.

    Args:
        q: [R, Hq, D] queries of one step, rotary applied.
        k: [N, Hkv, D] step-1 keys of all packed rows; query head h reads head h // (Hq // Hkv).
        v: [N, Hkv, D] step-1 values.
        own_k: [R, J, Hkv, D] own keys of steps 2..J+1; None at step 1.
        own_v: [R, J, Hkv, D] own values.
        rows: [R] int64, sorted: the packed row each chain hangs on. A row outside every sequence (-1, or at
            least ``cu_seqlens[-1]``) is padding: its output and its gradients are zero.
        cu_seqlens: [S+1] int64 boundaries of the packed sequences, 0 first.
        window: positions a query sees, its own included; None: all.
        sink: [S, 2] int64 packed rows (start, end) of each sequence that stay visible in spite of the window.
        q_sink: [R, Hq, D] used instead of q against sink keys outside the window (re-packed positions).
        gate: [R, Hq, D]; the output is multiplied by its sigmoid. The Triton kernel does so as it writes, where no
            gradient is asked for.
        scale: of the scores; D ** -0.5 where None.
        backend: ``auto`` (Triton on CUDA, blocked PyTorch on CPU), ``triton``, ``flex``, ``sdpa``,
            ``reference`` or ``blocked``. A backend that cannot take the input falls back to ``blocked`` with
            one warning.

    Returns:
        [R, Hq, D], differentiable in every float argument.

    Raises:
        UserError: unknown backend.
    """
    _check(q, k, v, own_k, own_v, rows, sink, window)
    run = _choose(backend, q, k, own_k, q_sink, stats=False)
    options = {"window": window, "sink": sink, "q_sink": q_sink, "scale": scale}
    args = (q, k, v, own_k, own_v, rows, cu_seqlens)
    out: Tensor
    if gate is None:
        out = run.chain_attention(*args, **options)
    elif run.__name__.endswith(".triton") and not _differentiable(*args[:5], q_sink, gate):
        out = run.chain_attention(*args, **options, gate=gate)
    else:
        out = run.chain_attention(*args, **options) * gate.sigmoid()
    return out


def chain_attention_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    labels: Tensor,
    num_regions: int,
    *,
    recent: int | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Chain attention that also says where the probability went. No R x N matrix is kept; not differentiable.

    Args:
        q: as in ``chain_attention``, like all arguments not named here.
        labels: [N] int64 region of each prefix row, in 0 .. num_regions - 1.
        num_regions: how many regions there are.
        recent: prefix keys at the last ``recent`` positions count towards one more region instead of their
            label's; at most the window.

    Returns:
        The output [R, Hq, D]; the mass [R, Hq, C + J] of each region and then of each own key, C =
        num_regions or num_regions + 1 with ``recent``, summing to 1 (0 on padding rows); the entropy [R, Hq]
        in nats.

    Raises:
        UserError: unknown backend.
    """
    _check(q, k, v, own_k, own_v, rows, sink, window)
    assert labels.shape == k.shape[:1], (labels.shape, k.shape)
    if recent is not None and window is not None:
        recent = min(recent, window)
    run = _choose(backend, q, k, own_k, q_sink, stats=True)
    result: tuple[Tensor, Tensor, Tensor] = run.chain_attention_stats(
        q,
        k,
        v,
        own_k,
        own_v,
        rows,
        cu_seqlens,
        labels,
        num_regions,
        recent=recent,
        window=window,
        sink=sink,
        q_sink=q_sink,
        scale=scale,
    )
    return result


def chain_attention_shares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    labels: Tensor,
    num_regions: int,
    recents: Sequence[int],
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    q_sink: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chain attention with the mass of every region and, beside it, of what is near, for several widths.

    The blocked backend computes the probabilities once; others run ``chain_attention_stats`` for every width.

    Args:
        q: as in ``chain_attention_stats``, like all arguments not named here.
        recents: numbers of last positions w, the query's own included.

    Returns:
        Output, mass [R, Hq, num_regions + J] and entropy as of ``chain_attention_stats``, and [R, Hq, len(recents)]
        the mass of those prefix keys inside the window that lie among the last w positions.

    Raises:
        UserError: unknown backend.
    """
    import torch

    _check(q, k, v, own_k, own_v, rows, sink, window)
    run = _choose(backend, q, k, own_k, q_sink, stats=True)
    args = (q, k, v, own_k, own_v, rows, cu_seqlens, labels, num_regions)
    options: dict[str, Any] = {"window": window, "sink": sink, "q_sink": q_sink}
    if run.__name__.endswith(".blocked"):
        shares: tuple[Tensor, Tensor, Tensor, Tensor] = run.chain_attention_shares(*args, recents, **options)
        return shares
    out, mass, entropy = run.chain_attention_stats(*args, **options)
    widths = recents if window is None else [min(w, window) for w in recents]
    near = [run.chain_attention_stats(*args, recent=w, **options)[1][..., num_regions] for w in widths]
    return out, mass, entropy, torch.stack(near, -1) if near else mass[..., :0]


def _differentiable(*inputs: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of some input."""
    import torch

    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    rows: Tensor,
    sink: Tensor | None,
    window: int | None,
) -> None:
    num_rows, num_heads, dim = q.shape
    assert k.shape == v.shape and k.shape[2] == dim, (q.shape, k.shape, v.shape)
    assert num_heads % k.shape[1] == 0, (num_heads, k.shape[1])
    assert rows.shape == (num_rows,), (rows.shape, num_rows)
    assert (own_k is None) == (own_v is None), "own keys and own values go together"
    if own_k is not None and own_v is not None:
        assert own_k.shape == own_v.shape, (own_k.shape, own_v.shape)
        assert own_k.shape[0] == num_rows and own_k.shape[2:] == k.shape[1:], (own_k.shape, k.shape)
    assert window is None or window >= 1, window
    assert sink is None or sink.shape[1] == 2, sink


def _choose(
    backend: str, q: Tensor, k: Tensor, own_k: Tensor | None, q_sink: Tensor | None, *, stats: bool
) -> Any:
    """Return the module that runs this call."""
    from specbench.drafters.kernels import dispatch

    dispatch.check_backend(backend, BACKENDS)
    num_own = 0 if own_k is None else own_k.shape[1]
    name = dispatch.choose("chain attention", backend, q, k, num_own=num_own, q_sink=q_sink, stats=stats)
    return importlib.import_module(f"specbench.drafters.kernels.chain.{name}")
