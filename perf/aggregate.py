"""Time and memory of aggregating many rounds: 10 million by default, on two threads.

Example:
    python perf/aggregate.py --rounds 10000000 --threads 2

Prints the seconds and the peak memory of the acceptance table, without and with its intervals. Each is
measured in a process of its own, because a process's peak memory never falls.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from specbench.results.aggregate import acceptance_table, connect, register
from specbench.results.store import RunStore

DEPTH = 8
DRAFTERS = ("ngram", "draft-lm=tiny", "eagle3=path/to/head", "dflash=path/to/block")
SUITES = ("mtbench", "gsm8k", "humaneval", "alpaca", "longctx", "math500")
PROMPTS = 80


def _named(values: list[str], codes: np.ndarray) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(values))


def _block(rng: np.random.Generator, suite: int, condition: str, rounds: int) -> dict[str, object]:
    """Random rounds of one suite under one condition, all drafters."""
    rows = rounds * PROMPTS * len(DRAFTERS)
    position = np.arange(rows)
    drafter = position // (rounds * PROMPTS)
    prompt = position // rounds % PROMPTS
    ease = 0.4 + 0.08 * drafter + 0.15 * rng.random(PROMPTS)[prompt]
    accepted = np.minimum(rng.geometric(1 - ease) - 1, DEPTH)
    suite_name = SUITES[suite]
    return {
        "run_id": "perf",
        "suite": suite_name,
        "category": "none",
        "prompt_id": _named([f"{suite_name}/{i}" for i in range(PROMPTS)], prompt),
        "turn": 0,
        "condition": condition,
        "family": condition.split("/")[0],
        "severity": 0,
        "answer_path": "free",
        "target": "target",
        "seed": 0,
        "temperature": 0.0,
        "ids_hash": _named([f"{i:016x}" for i in range(PROMPTS)], prompt),
        "template_hash": "0",
        "drafter": _named(list(DRAFTERS), drafter),
        "drafter_kind": "perf",
        "runner": "replay",
        "sampler": "greedy",
        "k": DEPTH,
        "round": (position % rounds).astype(np.int32),
        "start": (position % rounds).astype(np.int32),
        "num_drafted": np.full(rows, DEPTH, np.int32),
        "num_accepted": accepted.astype(np.int32),
        "num_emitted": (accepted + 1).astype(np.int32),
        "cut": np.zeros(rows, bool),
        "weight": 1.0,
    }


def _answer(suite: str, prompt: int, condition: str, length: int) -> dict[str, object]:
    return {
        "run_id": "perf",
        "suite": suite,
        "category": "none",
        "prompt_id": f"{suite}/{prompt}",
        "turn": 0,
        "condition": condition,
        "family": condition.split("/")[0],
        "severity": 0,
        "answer_path": "free",
        "target": "target",
        "seed": 0,
        "temperature": 0.0,
        "ids_hash": f"{prompt:016x}",
        "template_hash": "0",
        "bos_count": 1,
        "prompt_tokens": 100,
        "answer_tokens": length,
        "answer_ids": [],
        "finish": "length",
        "degenerate": False,
        "notes": [],
    }


def make(path: Path, total: int) -> int:
    """Write a run of about ``total`` rounds and return how many it holds."""
    rng = np.random.default_rng(0)
    rounds = 200
    per_block = rounds * PROMPTS * len(DRAFTERS)
    conditions = max(1, round(total / per_block / len(SUITES)))
    names = ["template/regular", *(f"family{i % 5}/condition{i}" for i in range(1, conditions))]
    with RunStore(path) as store:
        for suite, suite_name in enumerate(SUITES):
            for condition in names:
                store.write(
                    rounds=[_block(rng, suite, condition, rounds)],
                    answers=[_answer(suite_name, p, condition, rounds + 1) for p in range(PROMPTS)],
                )
    return per_block * conditions * len(SUITES)


def measure(path: Path, threads: int, draws: int) -> None:
    """Aggregate once and print the time and the peak memory of this process."""
    start, used = time.perf_counter(), time.process_time()
    connection = connect(threads=threads)
    register(connection, path)
    loaded = time.perf_counter()
    table = acceptance_table(connection=connection, draws=draws)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    what = f"with intervals ({draws} draws)" if draws else "rates only"
    print(
        f"{what}: {done - start:.1f} s ({time.process_time() - used:.1f} s of processor time), of which checks "
        f"on load {loaded - start:.1f} s; {table.num_rows} rows; peak {peak:.2f} GiB"
    )


def main() -> None:
    """Make the run, then measure in fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draws", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.threads, options.draws)
        return
    with tempfile.TemporaryDirectory() as folder:
        for total in (options.rounds // 10, options.rounds):
            path = Path(folder) / str(total)
            made = make(path, total)
            size = sum(f.stat().st_size for f in path.rglob("*.parquet")) / 2**20
            print(f"{made:,} rounds, {size:.0f} MiB on disk", flush=True)
            for draws in (0, 10_000):
                arguments = ["--measure", str(path), "--threads", str(options.threads), "--draws", str(draws)]
                subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
