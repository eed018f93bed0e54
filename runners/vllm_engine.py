"""The vLLM runner: the engine that serves, on the same token ids, its own metrics turned into our rounds.

Example:
    runner = vllm_runner(target, settings)
    for outcome in runner.run([Work(prompt=rendered, drafters=("ngram",))], drafters, print):
        outcome.rounds["ngram", 5][0].engine_accepted
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from specbench.drafters.ngram import NgramIndex
from specbench.errors import UserError, unknown_name
from specbench.runners import engine_defects
from specbench.runners.answers import answer_limit, kv_bytes_per_token
from specbench.runners.engine_rounds import records_from_counters, rounds_from_steps
from specbench.runners.engine_spec import METHODS, EngineSpec, check_block, engine_spec
from specbench.runners.pace import Pace
from specbench.runners.runner import Outcome, RunSettings, Work, answer_facts
from specbench.runners.sampling import stream
from specbench.runners.stopping import Ending, cut_rounds
from specbench.runners.targets import Target, cache_dir
from specbench.runners.vllm_process import RemoteEngine
from specbench.runners.vllm_start import (
    EngineAnswer,
    EngineOptions,
    Request,
    engine_environment,
    engine_version,
)
from specbench.types import Drafter, RenderedPrompt, Round, Sampling

ENGINE_OPTIONS: Mapping[str, str] = {
    "workaround": "known defects to repair in the engine, by name, joined by + (see runners/engine_defects.py)",
    "max_num_seqs": "answers at a time, at most",
    "kv_gib": "GiB for keys and values on a CPU; default: what the prompts need",
    "gpu_memory": "share of the GPU's memory the engine may take; default: nine tenths of what is free",
    "tensor_parallel": "GPUs to spread the target over",
    "prefix_cache": "on or off; default off, because a cached prefix changes what a drafter sees",
    "eager": "on or off; default on for a CPU, off for a GPU",
}
_CPU_SEQS = 16
_LEAST_KV = 256 << 20
_SLACK = 16
"""Positions behind the longest answer: near its limit an engine stops drafting, which is not what a run measures."""


class Engine(Protocol):
    """What the runner needs of an engine; tests put a scripted one here."""

    def answer(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: Callable[[int], None] = ...,
    ) -> Iterator[EngineAnswer]:
        """Yield answers as they finish."""
        ...

    def measure(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        users: int,
        costs: bool,
    ) -> tuple[list[EngineAnswer], Pace]:
        """Answer with ``users`` requests at work at any time."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


StartEngine = Callable[[EngineOptions, Mapping[str, str]], Engine]
"""(options, defects with what was done about them) -> engine."""


def start_vllm(options: EngineOptions, defects: Mapping[str, str]) -> Engine:
    """Start vLLM in a process of its own, with the workarounds of ``defects`` applied."""
    return RemoteEngine(options, defects)


class VllmRunner:
    """Runs every prompt through one vLLM engine per drafter and depth."""

    name = "vllm"
    one_drafter_a_time = True
    """An outcome per answer and drafter; runners of our own give one per answer."""

    def __init__(
        self,
        target: Target,
        settings: RunSettings,
        *,
        start: StartEngine = start_vllm,
        version: str | None = None,
        device: str | None = None,
    ) -> None:
        """Prepare; starts nothing yet.

        Args:
            target: loaded, for the drafters; the engine opens its directory itself.
            settings: of the run.
            start: makes engines.
            version: of the engine; default: the installed one's.
            device: of the engine, cpu or cuda; default: the target's.

        Raises:
            UserError: vLLM is not installed, or an engine option is unknown or malformed.
        """
        self.version = engine_version() if version is None else version
        self.target = target
        self.settings = settings
        self.options = read_options(settings.options)
        self._start = start
        self._device = device or ("cpu" if target.device.type == "cpu" else "cuda")
        self._alive: tuple[tuple[str, int], int, Engine] | None = None
        self._defects: dict[str, str] = {}
        workarounds = tuple(filter(None, self.options.get("workaround", "").split("+")))
        # refused before anything is loaded; drafters' own methods are checked as they come
        use = engine_defects.Use(method="any", sampled=not settings.sampling.greedy)
        self._defects.update(engine_defects.check(self.version, self._device, use, workarounds))
        self._workarounds = workarounds

    def expect(self, drafters: Iterable[Drafter]) -> None:
        """Note the known defects that these drafters will meet; those that stop one are told when it is run."""
        for drafter in drafters:
            method = METHODS.get(drafter.info.kind, "none")
            use = engine_defects.Use(method=method, sampled=not self.settings.sampling.greedy)
            with contextlib.suppress(UserError):
                self._defects.update(engine_defects.check(self.version, self._device, use, self._workarounds))

    def record(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the engine."""
        return {
            "name": "vllm",
            "version": self.version,
            "device": self._device,
            "dtype": self.target.info.dtype,
            "draft_sample_method": self._draft_sample_method(),
            "rejection_sample_method": "standard",
            "parallel_drafting": False,
            "prefix_cache": self._switch("prefix_cache", False),
            "enforce_eager": self._eager(),
            "max_num_seqs": self._max_num_seqs(),
            "defects": dict(self._defects),
            "rounds": "per_request_spec_decode_metrics=detailed, in versions without it from counters and the answer's "
            "growth, one answer at a time; normalised to the tokens the user receives",
            "environment": engine_environment(self._device),
        }

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield one outcome per piece of work and drafter; failures come last, so that an answer is there first."""
        failed: list[Outcome] = []
        forced = [item for item in work if item.path == "forced"]
        yield from (
            _failure(item, "", "vllm makes its own answers; --answer-path forced needs --runner replay")
            for item in forced
        )
        free = [item for item in work if item.path != "forced"]
        names = {name: drafters[name] for item in free for name in item.drafters}
        for name in self._order(names):
            own = [item for item in free if name in item.drafters]
            yield from self._run_drafter(name, drafters[name], own, free, failed, on_tokens)
        bare = [item for item in free if not item.drafters]
        if bare:
            yield from self._run_bare(bare, free, failed, on_tokens)
        yield from failed

    def engine_apart(self, drafter: Drafter | None, depth: int, *, length: int, users: int) -> Engine:
        """Start an engine to be measured; the one alive is stopped, and the caller stops this one.

        Args:
            drafter: None: no speculation.
            depth: k.
            length: positions it must have.
            users: requests it must serve at a time.

        Raises:
            UserError: vLLM cannot express the drafter, or the engine does not start.
        """
        self.close()
        speculative = None
        if drafter is not None:
            spec = engine_spec(drafter, self.target.weights(), cache_dir() / "engines")
            speculative = self._speculative(drafter, spec, depth)
        return self._start(self._engine_options(speculative, length, users), self._defects)

    def states_engine(self, taps: Sequence[int], length: int, folder: Path) -> Engine:
        """Start an engine that hands out hidden states instead of drafting; the caller stops it.

        Args:
            taps: ``hidden_states`` indices, ascending.
            length: positions it must have.
            folder: where it writes them.

        Raises:
            UserError: it does not start, or a known defect would be hit.
        """
        method = "extract_hidden_states"
        use = engine_defects.Use(method=method, sampled=not self.settings.sampling.greedy)
        self._defects.update(engine_defects.check(self.version, self._device, use, self._workarounds))
        layers = {"eagle_aux_hidden_state_layer_ids": list(taps)}
        options = self._engine_options(
            {"method": method, "num_speculative_tokens": 1, "draft_model_config": {"hf_config": layers}},
            length,
            self._max_num_seqs(),
        )
        connector = {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "specbench.runners.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        kv = options.kv_bytes
        if kv is not None:
            # states lie in the same cache as keys and values
            size = len(taps) * self.target.info.hidden_size * self.target.model.dtype.itemsize
            kv += 4 * options.max_num_seqs * length * size
        return self._start(
            replace(options, kv_bytes=kv, extra={"kv_transfer_config": connector}), self._defects
        )

    def length(self, prompts: Sequence[RenderedPrompt], depth: int) -> int:
        """Return the positions that an engine needs for these prompts, their answers and drafts behind them."""
        longest = max(
            len(prompt.token_ids) + (prompt.max_new_tokens or self.settings.max_new_tokens)
            for prompt in prompts
        )
        wanted = -(-(longest + depth + _SLACK) // 256) * 256
        return min(wanted, self.target.info.max_positions)

    def request(self, key: str, prompt: RenderedPrompt) -> Request:
        """Return a prompt as an engine gets it."""
        sampling = self.settings.sampling
        seed = None
        if not sampling.greedy:
            seed = int(stream(sampling.seed, *prompt.key).integers(1 << 31))
        return Request(
            key=key,
            token_ids=prompt.token_ids,
            max_tokens=answer_limit(prompt, self.settings.max_new_tokens, self.target.info.max_positions),
            seed=seed,
        )

    def close(self) -> None:
        """Stop the engine that is still alive."""
        if self._alive is not None:
            self._alive[2].close()
            self._alive = None

    def _order(self, names: Mapping[str, Drafter]) -> list[str]:
        """The drafter whose engine is alive goes first."""
        alive = None if self._alive is None else self._alive[0][0]
        return sorted(names, key=lambda name: name != alive)

    def _run_drafter(
        self,
        name: str,
        drafter: Drafter,
        work: Sequence[Work],
        everything: Sequence[Work],
        failed: list[Outcome],
        on_tokens: Callable[[int], None],
    ) -> Iterator[Outcome]:
        outcomes = {item.prompt.key: Outcome(work=replace(item, drafters=(name,))) for item in work}
        alive = self._alive[0] if self._alive is not None else None
        for depth in sorted(self.settings.depths, key=lambda k: (name, k) != alive):
            begun = time.perf_counter()
            try:
                spec = engine_spec(drafter, self.target.weights(), cache_dir() / "engines")
                engine = self._engine((name, depth), self._speculative(drafter, spec, depth), everything)
                for answer, item in self._answers(engine, work, on_tokens):
                    self._take(outcomes[item.prompt.key], name, depth, drafter, answer)
            except Exception as error:  # recorded; the other drafters of the run still finish
                self.close()
                text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                for outcome in outcomes.values():
                    outcome.errors.setdefault(name, text)
                break
            seconds = (time.perf_counter() - begun) / max(len(work), 1)
            for outcome in outcomes.values():
                outcome.drafter_seconds[name] = outcome.drafter_seconds.get(name, 0.0) + seconds
        for outcome in outcomes.values():
            if outcome.errors:
                failed.append(outcome)
            else:
                yield outcome

    def _run_bare(
        self,
        work: Sequence[Work],
        everything: Sequence[Work],
        failed: list[Outcome],
        on_tokens: Callable[[int], None],
    ) -> Iterator[Outcome]:
        """Answers alone, without a drafter (their rounds are already known)."""
        try:
            engine = self._engine(("", 0), None, everything)
            for answer, item in self._answers(engine, work, on_tokens):
                outcome = Outcome(work=item)
                ending = Ending.of(self.target, item.prompt)
                note_answer(outcome, end_at_string(answer, [], ending, 1)[0])
                yield outcome
        except UserError as error:
            self.close()
            failed.extend(_failure(item, "", str(error)) for item in work)

    def _answers(
        self, engine: Engine, work: Sequence[Work], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[EngineAnswer, Work]]:
        by_key = {str(i): item for i, item in enumerate(work)}
        requests = [self.request(key, item.prompt) for key, item in by_key.items()]
        missing = set(by_key)
        for answer in engine.answer(requests, self.settings.sampling, self.target.stop_ids, on_tokens):
            missing.discard(answer.key)
            yield answer, by_key[answer.key]
        assert not missing, f"the engine finished without answers {sorted(missing)}"

    def _take(self, outcome: Outcome, name: str, depth: int, drafter: Drafter, answer: EngineAnswer) -> None:
        prompt = outcome.work.prompt
        problem = prompt_problem(prompt, answer.prompt_ids, self.target.info.bos_id)
        if problem is not None:
            outcome.errors[name] = problem
            return
        ending = Ending.of(self.target, prompt)
        try:
            rounds = engine_rounds(answer, prompt, drafter, depth)
        except UserError as error:
            outcome.errors[name] = str(error)
            return
        answer, outcome.rounds[name, depth] = end_at_string(answer, rounds, ending, depth)
        if not outcome.answer_ids:
            note_answer(outcome, answer)

    def _engine(
        self, key: tuple[str, int], speculative: Mapping[str, Any] | None, work: Sequence[Work]
    ) -> Engine:
        """Return the engine of a drafter and depth, started if it is not the one alive."""
        needed = self.length([item.prompt for item in work], key[1])
        if self._alive is not None and self._alive[0] == key and self._alive[1] >= needed:
            return self._alive[2]
        self.close()
        options = self._engine_options(speculative, needed, self._max_num_seqs())
        engine = self._start(options, self._defects)
        self._alive = (key, options.max_model_len, engine)
        return engine

    def _engine_options(self, speculative: Mapping[str, Any] | None, length: int, seqs: int) -> EngineOptions:
        kv = None
        memory = float(self.options.get("gpu_memory", 0.9))
        if self._device == "cpu":
            asked = self.options.get("kv_gib")
            need = 2 * seqs * length * kv_bytes_per_token(self.target.model)
            kv = int(float(asked) * (1 << 30)) if asked else max(_LEAST_KV, need)
        elif "gpu_memory" not in self.options:
            free, total = torch.cuda.mem_get_info(
                None if self.target.device.type == "cpu" else self.target.device
            )
            memory = round(0.9 * free / total, 3)
        return EngineOptions(
            model=str(self.target.path),
            dtype=self.target.info.dtype,
            device=self._device,
            max_model_len=length,
            max_num_seqs=seqs,
            speculative=speculative,
            prefix_cache=self._switch("prefix_cache", False),
            enforce_eager=self._eager(),
            kv_bytes=kv,
            gpu_memory=memory,
            tensor_parallel=int(self.options.get("tensor_parallel", "1")),
        )

    def _speculative(self, drafter: Drafter, spec: EngineSpec, depth: int) -> dict[str, Any]:
        use = engine_defects.Use(method=spec.method, sampled=not self.settings.sampling.greedy)
        self._defects.update(engine_defects.check(self.version, self._device, use, self._workarounds))
        check_block(drafter, depth, self._defects)
        config = {**spec.config, "num_speculative_tokens": depth, "rejection_sample_method": "standard"}
        if spec.probabilistic:
            config["draft_sample_method"] = self._draft_sample_method()
        return config

    def _draft_sample_method(self) -> str:
        # one-hot drafts accepted with the target's probability are sample-and-match
        return "probabilistic" if self.settings.sampler == "rejection" else "greedy"

    def _max_num_seqs(self) -> int:
        asked = self.options.get("max_num_seqs")
        if asked:
            return int(asked)
        return min(self.settings.batch_size, _CPU_SEQS) if self._device == "cpu" else self.settings.batch_size

    def _eager(self) -> bool:
        return self._switch("eager", self._device == "cpu")

    def _switch(self, name: str, default: bool) -> bool:
        return {"on": True, "off": False}[self.options[name]] if name in self.options else default


def engine_rounds(answer: EngineAnswer, prompt: RenderedPrompt, drafter: Drafter, depth: int) -> list[Round]:
    """Return the rounds of one engine answer.

    Raises:
        UserError: the engine's metrics do not belong to the answer, or it gives none.
    """
    proposes = None
    if drafter.info.kind == "ngram":
        index = NgramIndex(drafter.min_n, drafter.max_n)  # type: ignore[attr-defined]
        index.extend(prompt.token_ids)
        finds: list[bool] = []
        for token in answer.token_ids:
            index.push(token)
            finds.append(index.match is not None)
        proposes = finds.__getitem__
    records = answer.records
    if records is None and answer.counted is not None:
        rounds, drafted, accepted = answer.counted
        records = records_from_counters(
            emitted=answer.emitted,
            num_rounds=rounds,
            num_drafted=drafted,
            num_accepted=accepted,
            depth=depth,
            proposes=proposes,
        )
    if records is None and len(answer.token_ids) > 1:
        raise UserError("this vLLM tells nothing of its speculation, neither per request nor in counters")
    return rounds_from_steps(
        records or (),
        answer_length=len(answer.token_ids),
        depth=depth,
        emitted=answer.emitted or None,
        proposes=proposes,
    )


def end_at_string(
    answer: EngineAnswer, rounds: list[Round], ending: Ending, depth: int
) -> tuple[EngineAnswer, list[Round]]:
    """Cut an engine's answer where a stop string ends it; the engine is told of stop tokens only.

    An engine's own stop strings follow its own detokeniser; the cut here is that of the other runners.
    """
    if not ending.strings or not answer.token_ids:
        return answer, rounds
    ids = answer.token_ids[: ending.length(answer.token_ids)]
    cut = replace(answer, token_ids=ids, finish="stop" if ending.reached(ids) else answer.finish)
    return cut, cut_rounds(rounds, len(ids), depth)


def prompt_problem(prompt: RenderedPrompt, seen: Sequence[int], bos_id: int | None) -> str | None:
    """Say how the prompt the engine saw differs from the one it was given."""
    if not seen or tuple(seen) == prompt.token_ids:
        return None
    if bos_id is not None and tuple(seen) == (bos_id, *prompt.token_ids):
        return "the engine put another BOS before the prompt's own token ids; turn its BOS off"
    return f"the engine saw {len(seen)} prompt tokens where {len(prompt.token_ids)} were given"


def note_answer(outcome: Outcome, answer: EngineAnswer) -> None:
    """Enter the answer itself."""
    outcome.answer_ids = answer.token_ids
    outcome.finish = answer.finish
    outcome.facts = answer_facts(answer.token_ids, ())
    outcome.target_seconds = answer.seconds


def _failure(item: Work, name: str, text: str) -> Outcome:
    return Outcome(work=item, errors={name: text})


def read_options(options: Mapping[str, Any], known: Mapping[str, str] = ENGINE_OPTIONS) -> dict[str, str]:
    """Check the ``--engine`` options of a run.

    Raises:
        UserError: an unknown one, or a value that is none.
    """
    read: dict[str, str] = {}
    for name, value in options.items():
        if name not in known:
            raise unknown_name("engine option", name, known)
        text = str(value)
        if name in ("prefix_cache", "eager") and text not in ("on", "off"):
            raise UserError(f"--engine {name} is on or off, not {text!r}")
        if name in ("max_num_seqs", "tensor_parallel") and not (text.isdecimal() and int(text) > 0):
            raise UserError(f"--engine {name} is a whole number of 1 or more, not {text!r}")
        if name in ("kv_gib", "gpu_memory", "timeout"):
            try:
                positive = float(text) > 0
            except ValueError:
                positive = False
            if not positive:
                raise UserError(f"--engine {name} is a number above 0, not {text!r}")
        read[name] = text
    return read


def describe_options(options: EngineOptions) -> dict[str, Any]:
    """Return an engine's options as plain values."""
    return asdict(options)


class VllmFactory:
    """Makes the vLLM runner."""

    def check(self, settings: RunSettings) -> None:
        """Refuse, before any model is loaded, what cannot run here.

        Raises:
            UserError: vLLM is not installed, or an engine option is unknown or malformed.
        """
        engine_version()
        read_options(settings.options)

    def __call__(self, target: Target, settings: RunSettings) -> VllmRunner:
        """Make the runner.

        Raises:
            UserError: see :class:`VllmRunner`.
        """
        return VllmRunner(target, settings)


vllm_runner = VllmFactory()
