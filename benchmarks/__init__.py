"""Prompt sets, by name.

Example: ``BUILTIN["mini"]`` is ``"specbench.benchmarks.mini:MINI"``, imported only when the suite is wanted.
"""

BUILTIN: dict[str, str] = {
    "alpaca": "specbench.benchmarks.catalogue:ALPACA",
    "eagle-qa": "specbench.benchmarks.catalogue:EAGLE_QA",
    "eagle-sum": "specbench.benchmarks.catalogue:EAGLE_SUM",
    "gsm8k": "specbench.benchmarks.catalogue:GSM8K",
    "humaneval": "specbench.benchmarks.catalogue:HUMANEVAL",
    "longctx": "specbench.benchmarks.longctx:LONGCTX",
    "math500": "specbench.benchmarks.catalogue:MATH500",
    "mbpp": "specbench.benchmarks.catalogue:MBPP",
    "mini": "specbench.benchmarks.mini:MINI",
    "mtbench": "specbench.benchmarks.catalogue:MTBENCH",
    "specbench480": "specbench.benchmarks.catalogue:SPECBENCH480",
}
