"""Traces from vLLM: its answers, and the hidden states it computed on the way, tensor parallel where that is needed.

The engine keeps the states in its cache and writes a file per answer. What a trace says of the target's law comes
from the last state: final norm and head are all of the target that runs here, on the CPU.

Example:
    answerer = EngineAnswerer(runner, taps=(2, 15, 27))
    for trace in answerer.answer(prompts):
        trace.taps[15]    # [N-1, H]
    answerer.close()
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from specbench.errors import UserError
from specbench.runners.engine import decoder_layers
from specbench.runners.sampling import describe
from specbench.runners.stopping import Ending
from specbench.runners.vllm_engine import Engine, VllmRunner, end_at_string, prompt_problem
from specbench.runners.vllm_start import EngineAnswer
from specbench.types import RenderedPrompt, Trace

_ROWS = 256
"""Rows of logits at a time: a row is the whole vocabulary."""
_SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings by which a model changes its logits behind the head."""


class EngineAnswerer:
    """Answers prompts with an engine; ``answer`` and ``force`` are those of ``answers.Answerer``."""

    def __init__(
        self, runner: VllmRunner, taps: Sequence[int], on_tokens: Callable[[int], None] = lambda _count: None
    ) -> None:
        """Prepare; starts nothing yet.

        Args:
            runner: whose options and sampling count, and whose target's norm and head are used.
            taps: ``hidden_states`` indices.
            on_tokens: called with the number of new answer tokens.

        Raises:
            UserError: the target changes its logits behind its head.
        """
        self.runner = runner
        self.target = runner.target
        self.taps = tuple(sorted(set(taps)))
        self.on_tokens = on_tokens
        config = self.target.model.config.get_text_config()
        for name in _SCALED:
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise UserError(
                    f"{self.target.info.name} sets {name}, so its law cannot be read off its last state; trace it "
                    "with --runner replay"
                )
        self._folder = tempfile.TemporaryDirectory(prefix="specbench-states-")
        self._engine: tuple[int, Engine] | None = None
        self._failure: UserError | None = None

    def answer(self, prompts: Sequence[RenderedPrompt]) -> Iterator[Trace]:
        """Yield one trace per prompt, in the order they finish.

        Raises:
            UserError: the engine does not start, dies, or saw another prompt.
        """
        engine = self._started(self.runner.length(prompts, 1))
        by_key = {str(i): prompt for i, prompt in enumerate(prompts)}
        requests = [
            replace(self.runner.request(key, prompt), states="answer") for key, prompt in by_key.items()
        ]
        settings = self.runner.settings
        for answer in engine.answer(requests, settings.sampling, self.target.stop_ids, self.on_tokens):
            prompt = by_key[answer.key]
            problem = prompt_problem(prompt, answer.prompt_ids, self.target.info.bos_id)
            if problem is not None:
                raise UserError(problem)
            states = self._states(answer, prompt.token_ids + answer.token_ids[:-1])
            answer, _rounds = end_at_string(answer, [], Ending.of(self.target, prompt), 1)
            yield self._trace(prompt, answer.token_ids, answer.finish, states, "free")

    def force(
        self, prompt: RenderedPrompt, answer_ids: Sequence[int], finish: Literal["stop", "length"]
    ) -> Trace:
        """Trace a given answer: one pass over it, nothing is generated but a token that is dropped.

        Raises:
            UserError: as for :meth:`answer`.
        """
        ids = (*prompt.token_ids, *answer_ids)[:-1]
        engine = self._started(min(self.runner.length([prompt], 1), self.target.info.max_positions))
        request = replace(self.runner.request("0", prompt), token_ids=ids, max_tokens=1, states="prompt")
        (answer,) = engine.answer([request], self.runner.settings.sampling, (), self.on_tokens)
        return self._trace(prompt, tuple(answer_ids), finish, self._states(answer, ids), "forced")

    def close(self) -> None:
        """Stop the engine and remove what it wrote."""
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None
        self._folder.cleanup()

    def _started(self, length: int) -> Engine:
        if self._failure is not None:
            raise self._failure
        if self._engine is not None and self._engine[0] >= length:
            return self._engine[1]
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None
        # the law is read off the last state, whether or not it is a tap
        states = sorted({*self.taps, self.target.info.num_layers})
        try:
            engine = self.runner.states_engine(states, length, Path(self._folder.name))
        except UserError as error:
            self._failure = error
            raise
        self._engine = (length, engine)
        return engine

    def _states(self, answer: EngineAnswer, ids: tuple[int, ...]) -> dict[int, Tensor]:
        """Read and remove the file of one answer: tap -> [N-1, H].

        Raises:
            UserError: there is none, or it is of other tokens.
        """
        if answer.states is None:
            raise UserError(
                "this vLLM hands out no hidden states; it needs 0.32 or newer, or --runner replay"
            )
        file, lock = Path(answer.states), Path(answer.states + ".lock")
        try:
            with lock.open() as held:
                # the engine holds it until the file is whole
                fcntl.flock(held, fcntl.LOCK_SH)
                found = load_file(file)
        except OSError as error:
            raise UserError(f"vLLM left no hidden states for an answer: {error}") from error
        file.unlink()
        lock.unlink()
        if tuple(found["token_ids"].tolist()) != ids:
            raise UserError(
                f"vLLM gave the states of {len(found['token_ids'])} tokens where {len(ids)} were asked for"
            )
        order = sorted({*self.taps, self.target.info.num_layers})
        assert found["hidden_states"].shape[:2] == (len(ids), len(order))
        return {tap: found["hidden_states"][:, i].contiguous() for i, tap in enumerate(order)}

    def _trace(
        self,
        prompt: RenderedPrompt,
        answer_ids: tuple[int, ...],
        finish: Literal["stop", "length"],
        states: dict[int, Tensor],
        path: Literal["free", "forced"],
    ) -> Trace:
        length = len(prompt.token_ids) + len(answer_ids) - 1
        last = states[self.target.info.num_layers][len(prompt.token_ids) - 1 : length]
        logprobs, margins, entropies = self._facts(last, answer_ids)
        return Trace(
            prompt=prompt,
            answer_ids=answer_ids,
            taps={tap: states[tap][:length].clone() for tap in self.taps},
            logprobs=logprobs,
            margins=margins,
            entropies=entropies,
            finish=finish,
            sampling=self.runner.settings.sampling,
            path=path,
        )

    @torch.inference_mode()
    def _facts(self, last: Tensor, answer_ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, margin and entropy of every answer token; last [A, H] are the states before them."""
        model: Any = self.target.model
        _layers, norm = decoder_layers(model)
        head = model.get_output_embeddings()
        parts = []
        for start in range(0, len(last), _ROWS):
            rows = last[start : start + _ROWS].to(head.weight.dtype)
            tokens = torch.tensor(list(answer_ids[start : start + _ROWS]))
            parts.append(describe(head(norm(rows)).float(), tokens, self.runner.settings.sampling))
        return tuple(  # type: ignore[return-value]
            torch.cat([getattr(part, name) for part in parts]).clone()
            for name in ("logprobs", "margins", "entropies")
        )
