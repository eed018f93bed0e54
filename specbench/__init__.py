"""specbench: a benchmark and robustness suite for speculative-decoding drafters."""

from __future__ import annotations

__version__ = "0.1.0"
