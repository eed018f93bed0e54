"""Time and memory of chain attention on the CPU: the blocked path against SDPA with a mask, over lengths.

Example: ``python perf/kernels_cpu.py --lengths 2048 4096 8192 16384 --threads 2``

Each measurement runs in a process of its own, so that its peak memory is its own. Exit status 1 if the blocked path is
not at least five times faster than SDPA at the longest length, or its time per token grows by half over the lengths.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch

from specbench.drafters.kernels.chain import chain_attention
from specbench.drafters.kernels.chain.blocked import chain_options
from specbench.drafters.kernels.prefix import dense


def run_once(backend: str, length: int, args: argparse.Namespace) -> None:
    """Print seconds (best of the repeats) and MiB above the inputs for one backend and length."""
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_(args.backward)

    q = normal(length, args.heads, args.dim)
    k, v = (normal(length, args.kv_heads, args.dim) for _ in range(2))
    own = (length, args.own, args.kv_heads, args.dim)
    own_k, own_v = (normal(*own), normal(*own)) if args.own else (None, None)
    rows, bounds = torch.arange(length), torch.tensor([0, length])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = chain_options(q, own_k, args.window, None)
    mask = None
    if backend == "sdpa":
        # Built before the clock starts: the comparison is of the attention, not of making masks.
        mask = dense.sdpa_mask(rows, bounds, None, 1, length, args.own, options)

    def attend() -> torch.Tensor:
        if mask is None:
            return chain_attention(q, k, v, own_k, own_v, rows, bounds, window=args.window, backend=backend)
        return dense.attend_sdpa(q[:, None], k, v, own_k, own_v, rows, bounds, None, options, mask)[:, 0]

    best = float("inf")
    clock = time.process_time if args.cpu_time else time.perf_counter
    for _ in range(args.repeats):
        start = clock()
        out = attend()
        if args.backward:
            out.sum().backward()
        best = min(best, clock() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(best, (peak - before) / 1024)


def measure(backend: str, length: int, argv: list[str]) -> tuple[float, float]:
    """Run ``run_once`` in a child process and read what it prints."""
    command = [sys.executable, __file__, *argv, "--child", backend, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, memory = done.stdout.split()
    return float(seconds), float(memory)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--own", type=int, default=0, help="own keys a row (SDPA's mask grows by own x length squared)"
    )
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: for a busy machine")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_once(args.child[0], int(args.child[1]), args)
        return 0
    print(
        "| tokens | blocked s | us a token | MiB | masked SDPA s | MiB | ratio |\n|---|---|---|---|---|---|---|"
    )
    per_token = []
    ratio = 0.0
    for length in args.lengths:
        seconds, memory = measure("blocked", length, sys.argv[1:])
        sdpa_seconds, sdpa_memory = measure("sdpa", length, sys.argv[1:])
        ratio = sdpa_seconds / seconds
        per_token.append(seconds / length)
        print(
            f"| {length} | {seconds:.3f} | {1e6 * seconds / length:.1f} | {memory:.0f} | {sdpa_seconds:.3f} "
            f"| {sdpa_memory:.0f} | {ratio:.1f} |",
            flush=True,
        )
    growth = per_token[-1] / min(per_token)
    print(
        f"masked SDPA / blocked at {args.lengths[-1]} tokens: {ratio:.1f}x; time a token grows {growth:.2f}x"
    )
    return 0 if ratio >= 5 and growth <= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
