"""Targets and traces, replay, online decoding, engines: everything that runs a model."""

from __future__ import annotations

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "replay": "specbench.runners.replay:replay_runner",
    "decode": "specbench.runners.decode:decode_runner",
}
