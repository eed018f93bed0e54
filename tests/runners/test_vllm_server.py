"""The server runner against a small HTTP server that speaks vLLM's answers and counters."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from specbench.drafters.ngram import NgramDrafter
from specbench.errors import UserError
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.vllm_server import Server, read_counters, server_runner
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span, TargetInfo

DEPTH = 3
CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")
SCRIPT = [(2, 3), (0, 3), (3, 3), (1, 3)]
"""Accepted and drafted of every answer's rounds."""


@dataclass
class Script:
    """What the server does."""

    answer: list[int] = field(default_factory=lambda: list(range(10, 21)))
    records: list[tuple[int, int]] = field(default_factory=lambda: list(SCRIPT))
    detailed: bool = True
    stranger: int = 0
    """Tokens another client gets in between."""
    extra_bos: bool = False
    running: int = 0
    per_position: dict[int, int] = field(default_factory=lambda: {0: 7, 1: 5, 2: 1})
    rounds: int = 9
    drafted: int = 27
    generated: int = 100
    asked: list[dict[str, Any]] = field(default_factory=list)
    fail_from: int = 10**9

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        ids = self.answer[: body["max_tokens"]]
        self.generated += len(ids) + self.stranger
        self.rounds += len(self.records)
        self.drafted += sum(d for _a, d in self.records)
        for accepted, _drafted in self.records:
            for i in range(accepted):
                self.per_position[i] += 1
        prompt = [1, *body["prompt"]] if self.extra_bos else body["prompt"]
        reply: dict[str, Any] = {
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "finish_reason": "length",
                    "token_ids": ids,
                    "prompt_token_ids": prompt,
                }
            ]
        }
        if self.detailed:
            reply["metrics"] = {
                "speculative_decoding": {
                    "num_spec_steps": len(self.records),
                    "per_step_accepted": [a for a, _d in self.records],
                    "per_step_drafted": [d for _a, d in self.records],
                }
            }
        return reply

    def metrics(self) -> str:
        label = 'engine="0",model_name="m"'
        lines = [
            "# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts.",
            f"vllm:spec_decode_num_drafts_total{{{label}}} {self.rounds}.0",
            f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {self.drafted}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {sum(self.per_position.values())}.0",
            f"vllm:generation_tokens_total{{{label}}} {self.generated}.0",
            f"vllm:generation_tokens_created{{{label}}} 1.76e+09",
            f"vllm:num_requests_running{{{label}}} {self.running}.0",
            "python_gc_objects_collected_total 3",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} {n}.0'
            for i, n in self.per_position.items()
        ]
        return "\n".join(lines) + "\n"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            """Quiet."""

        def send(self, text: str, code: int = 200) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            pages = {
                "/metrics": script.metrics(),
                "/version": '{"version": "0.32.0"}',
                "/v1/models": '{"data": [{"id": "m", "max_model_len": 64}]}',
            }
            self.send(pages.get(self.path, "none"), 200 if self.path in pages else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if len(script.asked) >= script.fail_from:
                self.send("engine core died", 500)
                return
            self.send(json.dumps(script.complete(body)))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Target:
    """As much of a target as a server runner needs."""

    info = TargetInfo(
        name="m", fingerprint="", hidden_size=8, num_layers=2, vocab_size=64, max_positions=128, dtype="float32",
        bos_id=1, stop_ids=(2,),
    )  # fmt: skip
    stop_ids = (2,)
    device = torch.device("cpu")


def settings(url: str, **changes: Any) -> RunSettings:
    made = RunSettings(
        depths=(DEPTH,),
        sampling=Sampling(),
        sampler="greedy",
        max_new_tokens=11,
        batch_size=1,
        options={"url": url},
    )
    return replace(made, **changes)


def prompts(count: int) -> list[RenderedPrompt]:
    return [
        RenderedPrompt(
            prompt_id=f"t/{i}", suite="t", category="", turn=0, condition=CLEAN, token_ids=(1, 30, 31 + i),
            spans=(Span(kind="user", start=0, end=3),), bos_count=1, template_hash="",
        )
        for i in range(count)
    ]  # fmt: skip


def run(made: RunSettings, count: int = 2) -> list[Outcome]:
    runner = server_runner(Target(), made)  # type: ignore[arg-type]
    work = [Work(prompt=p, drafters=("ngram",)) for p in prompts(count)]
    return list(runner.run(work, {"ngram": NgramDrafter()}, lambda _n: None))


def test_detailed_metrics_become_rounds(script: Script, url: str) -> None:
    outcomes = run(settings(url))
    for outcome in outcomes:
        assert not outcome.errors
        rounds = outcome.rounds["ngram", DEPTH]
        # 11 tokens: 1 + 3 + 1 + 4 + 2; the last round accepts one and adds the target's own
        assert [(r.start, r.num_accepted, r.num_drafted) for r in rounds] == [
            (0, 2, 3),
            (3, 0, 3),
            (4, 3, 3),
            (8, 1, 3),
        ]
        assert outcome.answer_ids == tuple(script.answer)
    body = script.asked[0]
    assert body["prompt"] == [1, 30, 31] and body["ignore_eos"] and body["stop_token_ids"] == [2]
    assert body["max_tokens"] == 11 and body["temperature"] == 0.0 and "seed" not in body


def test_counters_give_rates_where_there_is_nothing_else(script: Script, url: str) -> None:
    script.detailed = False
    for outcome in run(settings(url)):
        rounds = outcome.rounds["ngram", DEPTH]
        assert sorted(r.num_accepted for r in rounds) == [0, 1, 2, 3]
        assert 1 + sum(r.num_emitted for r in rounds) == 11


@pytest.mark.parametrize("change", [{"stranger": 5}, {"running": 1}])
def test_other_traffic_is_refused(script: Script, url: str, change: dict[str, int]) -> None:
    script.stranger, script.running = change.get("stranger", 0), change.get("running", 0)
    (outcome,) = run(settings(url), count=1)
    assert "other requests" in outcome.errors[""]
    assert not outcome.rounds


def test_a_second_bos_is_refused(script: Script, url: str) -> None:
    script.extra_bos = True
    (outcome,) = run(settings(url), count=1)
    assert "another BOS" in outcome.errors[""]


def test_a_server_that_dies_keeps_what_it_gave(script: Script, url: str) -> None:
    script.fail_from = 1
    first, second = run(settings(url))
    assert not first.errors
    assert "500 engine core died" in second.errors[""]


def test_a_missing_server_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"no server answers at http://127.0.0.1:9 .*same command goes on"):
        server_runner(Target(), settings("http://127.0.0.1:9"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "needs the server's address"),
        ({"url": "localhost:8000"}, "is no address"),
        ({"url": "http://x", "kv_gib": "2"}, "unknown engine option 'kv_gib'"),
    ],
)
def test_bad_addresses(options: dict[str, str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        server_runner.check(settings("", options=options))


def test_one_depth_and_one_drafter(url: str) -> None:
    with pytest.raises(UserError, match="one depth"):
        server_runner(Target(), settings(url, depths=(3, 8)))  # type: ignore[arg-type]
    runner = server_runner(Target(), settings(url))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has one drafter"):
        list(runner.run([], {"a": NgramDrafter(), "b": NgramDrafter()}, lambda _n: None))


def test_sampling_meets_the_known_defect(url: str) -> None:
    sampled = settings(url, sampling=Sampling(temperature=1.0), sampler="match")
    with pytest.raises(UserError, match="uninitialised memory"):
        server_runner(Target(), sampled)  # type: ignore[arg-type]


def test_the_page_of_another_server_is_refused() -> None:
    with pytest.raises(UserError, match="no vLLM counters"):
        read_counters("python_info 1\n")
    assert Server("http://x/v1/", 1.0).url == "http://x"
