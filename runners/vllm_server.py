"""A vLLM server that the user started: token ids in over its OpenAI-compatible completions, its own metrics out.

Where the server was started with ``--per-request-spec-decode-metrics detailed`` each answer brings its rounds. Else
its counters are read before and after each answer: per-position rates are exact then, the order of the rounds is
unknown, and a difference that is not all ours is refused.

Example:
    runner = server_runner(target, settings)    # settings.options["url"] = "http://127.0.0.1:8000"
    next(runner.run([Work(prompt=rendered, drafters=("ngram",))], drafters, print)).rounds["ngram", 5]
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specbench.errors import UserError
from specbench.runners import engine_defects
from specbench.runners.answers import answer_limit
from specbench.runners.engine_rounds import rounds_from_counters
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.sampling import stream
from specbench.runners.stopping import Ending
from specbench.runners.targets import Target
from specbench.runners.vllm_engine import (
    end_at_string,
    engine_rounds,
    note_answer,
    prompt_problem,
    read_options,
)
from specbench.runners.vllm_start import EngineAnswer
from specbench.types import Drafter, RenderedPrompt, Round

SERVER_OPTIONS: Mapping[str, str] = {
    "url": "of the server",
    "model": "its name of the model; default: the only one it serves",
    "timeout": "seconds an answer may take",
    "workaround": "known defects that the server's engine has been repaired of",
}
_PREFIX = "vllm:spec_decode_num_"
_SETTLE_SECONDS = 5.0
"""Counters follow an answer within moments; after this long they count as final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a server has counted since it started."""

    rounds: int
    drafted: int
    per_position: tuple[int, ...]
    generated: int
    """Tokens of all answers."""
    running: int
    """Requests at work right now."""

    def since(self, before: Counters) -> Counters:
        """Return the difference to an earlier reading; positions that appeared in between count from 0."""
        old = before.per_position + (0,) * (len(self.per_position) - len(before.per_position))
        return Counters(
            rounds=self.rounds - before.rounds,
            drafted=self.drafted - before.drafted,
            per_position=tuple(a - b for a, b in zip(self.per_position, old, strict=True)),
            generated=self.generated - before.generated,
            running=self.running,
        )


def read_counters(text: str) -> Counters:
    """Read vLLM's counters from a Prometheus page; engines of one server are summed.

    Raises:
        UserError: the page has none of them.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        if not rest:
            name, _, value = line.rpartition(" ")
        try:
            number = float(value.split()[0])
        except (IndexError, ValueError):
            continue
        name = name.strip().removesuffix("_total")
        if name == _PREFIX + "accepted_tokens_per_pos":
            index = int(labels.split('position="')[1].split('"')[0])
            positions[index] = positions.get(index, 0.0) + number
        else:
            sums[name] = sums.get(name, 0.0) + number
    if "vllm:generation_tokens" not in sums:
        raise UserError(
            "the server's /metrics page has no vLLM counters; is it a vLLM server started with its stats on?"
        )
    width = max(positions, default=-1) + 1
    return Counters(
        rounds=round(sums.get(_PREFIX + "drafts", 0)),
        drafted=round(sums.get(_PREFIX + "draft_tokens", 0)),
        per_position=tuple(round(positions.get(i, 0)) for i in range(width)),
        generated=round(sums["vllm:generation_tokens"]),
        running=round(sums.get("vllm:num_requests_running", 0)),
    )


class Server:
    """HTTP to one server; every trouble is one sentence."""

    def __init__(self, url: str, timeout: float) -> None:
        """Remember the address.

        Raises:
            UserError: it is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"--url {url!r} is no address; write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout

    def get(self, path: str) -> str:
        """Return a page's text."""
        return self._open(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send JSON, return JSON."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        text = self._open(urllib.request.Request(self.url + path, data=data, headers=headers))
        try:
            answer: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"the server at {self.url} does not answer in JSON: {text[:80]!r}") from error
        return answer

    def _open(self, request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace").strip()[:200]
            raise UserError(
                f"the server at {self.url} refuses {request.selector}: {error.code} {detail}"
            ) from error
        except TimeoutError as error:
            raise UserError(
                f"the server at {self.url} did not answer within {self.timeout:.0f} s; raise --engine timeout="
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                f"no server answers at {self.url} ({reason}); start it, and the same command goes on"
            ) from error

    def counters(self) -> Counters:
        """Read the counters now."""
        return read_counters(self.get("/metrics"))

    def version(self) -> str:
        """Return the server's vLLM version, "unknown" where it does not tell."""
        try:
            return str(json.loads(self.get("/version"))["version"])
        except (UserError, ValueError, KeyError, TypeError):
            return "unknown"

    def model(self) -> tuple[str, int | None]:
        """Return the name of the model it serves and its positions.

        Raises:
            UserError: it serves none, or several.
        """
        entries = json.loads(self.get("/v1/models")).get("data", [])
        if len(entries) != 1:
            names = ", ".join(str(e.get("id")) for e in entries) or "none"
            raise UserError(f"the server at {self.url} serves {names}; name one with --engine model=NAME")
        return str(entries[0]["id"]), entries[0].get("max_model_len")


class ServerRunner:
    """Asks a running server for every answer, one at a time, so that its counters tell whose tokens they are."""

    name = "vllm-server"

    def __init__(self, target: Target, settings: RunSettings) -> None:
        """Look at the server.

        Args:
            target: the model that the server serves; its tokenizer made the ids.
            settings: of the run; ``options["url"]`` is the address.

        Raises:
            UserError: no address, no server, several models, several depths, or a known defect of its version.
        """
        self.options = read_options(settings.options, SERVER_OPTIONS)
        self.target = target
        self.settings = settings
        self.server = Server(self.options["url"], float(self.options.get("timeout", 600.0)))
        self.version = self.server.version()
        name, positions = (self.options["model"], None) if "model" in self.options else self.server.model()
        self.model = name
        self.positions = min(target.info.max_positions, positions or target.info.max_positions)
        if len(settings.depths) != 1:
            raise UserError("a running server has one depth; give --depth the number of tokens it speculates")
        use = engine_defects.Use(method="any", sampled=not settings.sampling.greedy)
        device = "cpu" if target.device.type == "cpu" else "cuda"
        workarounds = tuple(filter(None, self.options.get("workaround", "").split("+")))
        self._defects = engine_defects.check(self.version, device, use, workarounds)

    def record(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the server."""
        return {
            "name": self.name,
            "version": self.version,
            "device": "the server's device",
            "url": self.server.url,
            "model": self.model,
            "dtype": "the server's",
            "draft_sample_method": "the server's",
            "rejection_sample_method": "the server's",
            "defects": dict(self._defects),
            "rounds": "per answer where the server tells them, else from counters: rates exact, order unknown",
        }

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield an outcome for every piece of work.

        Raises:
            UserError: several drafters are named; the server runs one.
        """
        names = {name for item in work for name in item.drafters}
        if len(names) > 1 or len(drafters) > 1:
            raise UserError(
                f"a running server has one drafter, but {', '.join(sorted(drafters))} are named; name the one it runs"
            )
        for item in work:
            outcome = Outcome(work=item)
            if item.path == "forced":
                outcome.errors[""] = (
                    "a server makes its own answers; --answer-path forced needs --runner replay"
                )
                yield outcome
                continue
            try:
                self._answer(outcome, drafters, on_tokens)
            except UserError as error:
                # a dead server fails every later prompt at once, and all of them are tried again by the next start
                outcome.errors[""] = str(error)
            yield outcome

    def _answer(
        self, outcome: Outcome, drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> None:
        prompt = outcome.work.prompt
        (depth,) = self.settings.depths
        before = self.server.counters()
        if before.running:
            raise UserError(
                f"the server at {self.server.url} has {before.running} other requests at work; wait until it is idle"
            )
        begun = time.perf_counter()
        reply = self.server.post("/v1/completions", self._body(prompt))
        answer = _read_answer(reply, prompt.prompt_id, time.perf_counter() - begun)
        problem = prompt_problem(prompt, answer.prompt_ids, self.target.info.bos_id)
        if problem is not None:
            raise UserError(problem)
        spent = self._spent(before, len(answer.token_ids))
        ending = Ending.of(self.target, prompt)
        whole = answer
        answer, _rounds = end_at_string(whole, [], ending, depth)
        if answer.records is None and len(answer.token_ids) < len(whole.token_ids):
            raise UserError(
                "this server tells counters only, so rounds cannot be cut at the prompt's stop strings; start it with "
                "per-request speculation metrics (vLLM 0.32 or newer), or use --runner decode"
            )
        for name in outcome.work.drafters:
            if answer.records is not None:
                rounds = end_at_string(
                    whole, engine_rounds(whole, prompt, drafters[name], depth), ending, depth
                )[1]
            else:
                rounds = _counted(spent, answer, depth)
            outcome.rounds[name, depth] = rounds
            outcome.drafter_seconds[name] = answer.seconds
        note_answer(outcome, answer)
        on_tokens(len(answer.token_ids))

    def _body(self, prompt: RenderedPrompt) -> dict[str, Any]:
        sampling = self.settings.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt.token_ids),
            "max_tokens": answer_limit(prompt, self.settings.max_new_tokens, self.positions),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": True,
            "stop_token_ids": list(self.target.stop_ids),
            "return_token_ids": True,
            "add_special_tokens": False,
            "stream": False,
        }
        if not sampling.greedy:
            body["seed"] = int(stream(sampling.seed, *prompt.key).integers(1 << 31))
        return body

    def _spent(self, before: Counters, tokens: int) -> Counters:
        """What the server counted for one answer of ours.

        Raises:
            UserError: it counted more: somebody else uses the server.
        """
        until = time.monotonic() + _SETTLE_SECONDS
        spent = self.server.counters().since(before)
        while spent.generated < tokens and time.monotonic() < until:
            time.sleep(0.02)
            spent = self.server.counters().since(before)
        if spent.generated != tokens or spent.running:
            raise UserError(
                f"the server at {self.server.url} counted {spent.generated} tokens where this run received {tokens}: "
                "other requests reach it; give it to this run alone"
            )
        return spent


def _read_answer(reply: Mapping[str, Any], prompt_id: str, seconds: float) -> EngineAnswer:
    """Read one completion.

    Raises:
        UserError: it holds no token ids.
    """
    choices = reply.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if not ids:
        raise UserError(
            f"the server's answer to {prompt_id} holds no token ids; it needs vLLM 0.10.2 or newer (return_token_ids)"
        )
    metrics = ((reply.get("metrics") or {}).get("speculative_decoding")) or {}
    accepted, drafted = metrics.get("per_step_accepted"), metrics.get("per_step_drafted")
    records = None
    if accepted is not None and drafted is not None:
        records = tuple(zip(accepted, drafted, strict=True))
    elif metrics.get("num_spec_steps") == 0:
        records = ()
    return EngineAnswer(
        key=prompt_id,
        prompt_ids=tuple(choices[0].get("prompt_token_ids") or ()),
        token_ids=tuple(ids),
        finish="length" if choices[0].get("finish_reason") == "length" else "stop",
        emitted=(),
        records=records,
        seconds=seconds,
    )


def _counted(spent: Counters, answer: EngineAnswer, depth: int) -> list[Round]:
    if not spent.per_position:
        raise UserError("the server does not speculate; start it with --speculative-config")
    if len(spent.per_position) > depth:
        raise UserError(
            f"the server speculates {len(spent.per_position)} tokens, not {depth}; give --depth that number"
        )
    return rounds_from_counters(
        num_rounds=spent.rounds,
        num_drafted=spent.drafted,
        accepted_per_position=spent.per_position,
        answer_length=len(answer.token_ids),
        depth=depth,
    )


class ServerFactory:
    """Makes the server runner."""

    def check(self, settings: RunSettings) -> None:
        """Refuse a run without an address before any model is loaded.

        Raises:
            UserError: there is none, or an option is unknown.
        """
        options = read_options(settings.options, SERVER_OPTIONS)
        if "url" not in options:
            raise UserError("--runner vllm-server needs the server's address: --url http://HOST:PORT")
        Server(options["url"], 1.0)

    def __call__(self, target: Target, settings: RunSettings) -> ServerRunner:
        """Make the runner.

        Raises:
            UserError: see :class:`ServerRunner`.
        """
        self.check(settings)
        return ServerRunner(target, settings)


server_runner = ServerFactory()
