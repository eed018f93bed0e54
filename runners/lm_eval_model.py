r"""specbench as a model of lm-eval: its tasks, its metrics, our decode loop with a drafter, acceptance beside them.

lm-eval finds models in a table of its own and has no entry points for others, so importing this module registers the
name ``specbench``; ``specbench lm-eval`` imports it and hands over to lm-eval's own command line.

Example:
    specbench lm-eval --model specbench --model_args target=smollm2-135m,drafter=zoo:eagle3.1,depth=5 --tasks gsm8k
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from specbench.config import RunConfig
from specbench.drafters.resolve import load_drafter, parse_drafters
from specbench.errors import UserError
from specbench.runners.answers import Answerer
from specbench.runners.decode import DecodeRunner, NoDrafter
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.stopping import read_answer
from specbench.runners.targets import Target
from specbench.types import CLEAN, ConditionInfo, Drafter, RenderedPrompt, Round, Sampling, Span

NAME = "specbench"
_LOG = logging.getLogger(__name__)
_CONDITION = ConditionInfo(id=CLEAN, family="template", severity=0, description="as lm-eval writes it")
_MAX_GEN_TOKS = 256
"""lm-eval's own default where a task names no limit."""
_KNOWN = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"})


@dataclass(slots=True, kw_only=True)
class Acceptance:
    """Rounds of one drafter over all answers of an evaluation."""

    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    answers: int = 0
    reached: list[int] = field(default_factory=list)
    """Entry i: rounds that accepted at least i + 1 tokens."""

    def add(self, rounds: Sequence[Round]) -> None:
        """Enter one answer's rounds."""
        self.answers += 1
        for entry in rounds:
            self.rounds += 1
            self.accepted += entry.num_accepted
            self.drafted += entry.num_drafted
            self.reached += [0] * (entry.num_accepted - len(self.reached))
            for i in range(entry.num_accepted):
                self.reached[i] += 1

    def record(self) -> dict[str, Any]:
        """As plain values, for lm-eval's results."""
        rate = self.accepted / self.rounds if self.rounds else None
        return {
            "accepted_per_round": rate,
            "tokens_per_round": None if rate is None else rate + 1,
            "marginal_rates": [n / self.rounds for n in self.reached],
            "rounds": self.rounds,
            "accepted": self.accepted,
            "drafted": self.drafted,
            "answers": self.answers,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossy:
    """An answer that the drafter changed: it should not exist but for ties."""

    task: str
    doc: int
    position: int
    """Answer token at which the two part."""
    tokens: tuple[int | None, int | None]
    """The target's own, and the one with the drafter; None where that answer had ended."""
    margin: float | None
    """The target's logit for its own token minus the best other one, there."""
    text: tuple[str, str]

    def sentence(self) -> str:
        """Say it in one line."""
        margin = "" if self.margin is None else f", target's margin {self.margin:.2g}"
        return (
            f"{self.task} document {self.doc}: token {self.position} is {self.tokens[0]} from the target alone and "
            f"{self.tokens[1]} with the drafter{margin}"
        )


@register_model(NAME)
class SpecbenchLM(TemplateLM):  # type: ignore[misc]
    """A target with a drafter, as lm-eval sees a model.

    Answers come from the decode loop with the drafter; log-likelihoods from the target alone, as no drafter takes
    part in them.
    """

    backend = "causal"
    made: ClassVar[list[SpecbenchLM]] = []
    """Every model that lm-eval has asked for in this process, for whoever called lm-eval."""

    def __init__(
        self,
        target: str = "smollm2-135m",
        drafter: str = "none",
        depth: int = 5,
        runner: str = "decode",
        check_lossless: bool = False,
        acceptance_file: str | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        add_bos_token: bool | None = None,
        **unknown: Any,
    ) -> None:
        """Load target and drafter.

        Args:
            target: as for ``specbench run``.
            drafter: one drafter as for ``specbench run``, or ``none``: the target alone.
            depth: k.
            runner: ``decode``: our loop; ``vllm``: the engine.
            check_lossless: answer everything without the drafter too, and list the answers that differ.
            acceptance_file: a JSON file that gets the acceptance; lm-eval's results hold it anyway.
            max_length: positions to use, at most the target's.
            dtype: as for ``specbench run``.
            device: auto, cpu, cuda or cuda:N.
            batch_size: answers at a time where the runner can; log-likelihoods at a time.
            max_batch_size: lm-eval's; of no effect, batches are not searched for.
            seed: of sampling, where a task samples.
            trust_remote_code: let the target's repository run its own code.
            add_bos_token: whether a BOS goes before every text; default: as the tokenizer does.
            unknown: refused by name.

        Raises:
            UserError: an unknown or impossible argument, or target or drafter cannot be loaded.
        """
        super().__init__()
        if unknown:
            raise UserError(
                f"--model specbench has no argument {sorted(unknown)[0]!r}; it has target, drafter, depth, runner, "
                "check_lossless, acceptance_file, max_length, dtype, device, seed, trust_remote_code, add_bos_token"
            )
        if runner not in ("decode", "vllm"):
            raise UserError(f"--model specbench takes runner=decode or runner=vllm, not {runner!r}")
        # lm-eval's command line says cuda:0 where the user says nothing
        if device == "cuda:0" and not torch.cuda.is_available():
            device = "auto"
        self.target = Target.load(
            str(target), device=device or "auto", dtype=dtype, trust_remote_code=trust_remote_code
        )
        self.tokenizer = self.target.tokenizer
        self.depth = _whole(depth, "depth")
        self.batch_size_given = _batch(batch_size)
        self.seed = int(seed)
        self.add_bos_token = add_bos_token
        self.acceptance_file = acceptance_file
        self.check_lossless = bool(check_lossless)
        self._max_length = min(int(max_length or 1 << 30), self.target.info.max_positions)
        self.drafter_name, self.drafter = self._load_drafter(str(drafter))
        self.runner = runner
        self._engine: Any = None
        self.acceptance: dict[str, Acceptance] = {}
        self.lossy: list[Lossy] = []
        self.num_cut = 0
        SpecbenchLM.made.append(self)

    def _load_drafter(self, text: str) -> tuple[str, Drafter | None]:
        if text == "none":
            return "none", None
        specs = parse_drafters(text)
        if len(specs) != 1:
            raise UserError(f"--model specbench takes one drafter, not {text!r}")
        return specs[0].text, load_drafter(specs[0], self.target.weights())

    # ---- what lm-eval asks of a model

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text whose first token is scored."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Positions."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Answer tokens where a task names no limit."""
        return _MAX_GEN_TOKS

    @property
    def batch_size(self) -> int:
        """Sequences at a time."""
        return self.batch_size_given

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self.target.device

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.target.info.name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_more: Any) -> list[int]:
        """Return the ids of a text; no second BOS where it begins with one."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            wanted = False
        options = {} if wanted is None else {"add_special_tokens": wanted}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the messages as the target's template writes them."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval stores beside the results: who drafted, and how much was accepted."""
        info = self.target.info
        return {
            "specbench": {
                "target": info.name,
                "target_fingerprint": info.fingerprint,
                "dtype": info.dtype,
                "drafter": self.drafter_name,
                "drafter_fingerprint": None if self.drafter is None else self.drafter.info.fingerprint,
                "depth": self.depth,
                "runner": self.runner,
                "acceptance": {task: found.record() for task, found in self.acceptance.items()},
                "answers_cut_by_their_limit": self.num_cut,
                "lossless": self._lossless(),
            }
        }

    def _lossless(self) -> Any:
        if not self.check_lossless:
            return "not checked"
        return {"different": len(self.lossy), "samples": [entry.sentence() for entry in self.lossy]}

    # ---- answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer every request with the drafter; requests of one setting go to the runner together."""
        prepared = [self._prepare(request, i, *request.args[:2]) for i, request in enumerate(requests)]
        groups: dict[tuple[Sampling, int], list[int]] = {}
        for i, (_prompt, settings) in enumerate(prepared):
            groups.setdefault((settings.sampling, settings.max_new_tokens), []).append(i)
        texts = [""] * len(prepared)
        try:
            with tqdm(total=len(requests), disable=disable_tqdm, desc="answers with the drafter") as bar:
                for members in groups.values():
                    self._answer_group(requests, prepared, members, texts, bar)
        finally:
            self._close_runner()
        self._report()
        return texts

    def _answer_group(
        self,
        requests: Sequence[Any],
        prepared: Sequence[tuple[RenderedPrompt, RunSettings]],
        members: Sequence[int],
        texts: list[str],
        bar: Any,
    ) -> None:
        prompts, settings = [prepared[i][0] for i in members], prepared[members[0]][1]
        index = {prepared[i][0].prompt_id: i for i in members}
        with_drafter: dict[int, Outcome] = {}
        for outcome in self._outcomes(prompts, settings, self.drafter):
            i = index[outcome.work.prompt.prompt_id]
            texts[i] = read_answer(self.tokenizer, outcome.answer_ids, prepared[i][0].stop_strings)
            self._note(requests[i], outcome)
            self.cache_hook.add_partial("generate_until", requests[i].args[:2], texts[i])
            with_drafter[i] = outcome
            bar.update(1)
        if self.check_lossless and self.drafter is not None:
            for alone in self._outcomes(prompts, settings, None):
                i = index[alone.work.prompt.prompt_id]
                self._compare(requests[i], alone, with_drafter[i])

    def _prepare(
        self, request: Any, number: int, context: str, asked: Mapping[str, Any]
    ) -> tuple[RenderedPrompt, RunSettings]:
        """Make a request's prompt and settings.

        Raises:
            UserError: the task asks for something the loop does not do, or its limit leaves no room for a prompt.
        """
        wanted = dict(normalize_gen_kwargs(dict(asked), self.max_gen_toks))
        unknown = sorted(set(wanted) - _KNOWN)
        if unknown:
            raise UserError(
                f"the task {request.task_name} asks for the generation setting {unknown[0]!r}, which specbench does "
                "not have; leave it out of generation_kwargs"
            )
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        strings = handle_stop_sequences(list(wanted.get("until") or ()), eos=eos)
        limit = int(wanted["max_gen_toks"])
        room = self.max_length - limit
        if room < 1:
            raise UserError(
                f"the task {request.task_name} asks for {limit} answer tokens, but the target has {self.max_length} "
                "positions; set max_gen_toks lower with --gen_kwargs"
            )
        ids = self.tok_encode(context)
        if len(ids) > room:
            raise UserError(
                f"the task {request.task_name}, document {request.doc_id}: its prompt has {len(ids)} tokens, and with "
                f"{limit} answer tokens the target has room for {room}; give a smaller --num_fewshot or max_gen_toks"
            )
        prompt = RenderedPrompt(
            prompt_id=f"{request.task_name}/{request.doc_id}/{number}",
            suite=str(request.task_name),
            category=str(request.task_name),
            turn=0,
            condition=_CONDITION,
            token_ids=tuple(ids),
            spans=(Span(kind="user", start=0, end=len(ids)),),
            bos_count=0,
            template_hash="",
            max_new_tokens=limit,
            stop_strings=tuple(strings),
        )
        return prompt, self._settings(wanted, limit)

    def _settings(self, wanted: Mapping[str, Any], limit: int) -> RunSettings:
        temperature = float(wanted.get("temperature") or 0.0) if wanted.get("do_sample") else 0.0
        sampling = Sampling(
            temperature=temperature,
            top_p=float(wanted.get("top_p", 1.0)),
            top_k=int(wanted.get("top_k", 0)),
            seed=self.seed,
        )
        return RunSettings(
            depths=(self.depth,),
            sampling=sampling,
            sampler="greedy" if sampling.greedy else "match",
            max_new_tokens=limit,
            batch_size=self.batch_size,
        )

    def _outcomes(
        self, prompts: Sequence[RenderedPrompt], settings: RunSettings, drafter: Drafter | None
    ) -> Iterator[Outcome]:
        """Answer prompts, with a drafter or with the target alone.

        Raises:
            UserError: the runner could not answer one of them.
        """
        name = self.drafter_name if drafter is not None else "none"
        bare = drafter is None and self.runner != "decode"
        used: dict[str, Drafter] = {} if bare else {name: drafter or NoDrafter()}
        work = [Work(prompt=prompt, drafters=tuple(used)) for prompt in prompts]
        for outcome in self._runner(settings).run(work, used, lambda _count: None):
            if outcome.errors:
                raise UserError(
                    f"{outcome.work.prompt.prompt_id} cannot be answered: {next(iter(outcome.errors.values()))}"
                )
            yield outcome

    def _runner(self, settings: RunSettings) -> Any:
        if self.runner == "decode":
            return DecodeRunner(self.target, settings)
        from specbench.runners.vllm_engine import vllm_runner

        if self._engine is None or self._engine.settings != settings:
            self._close_runner()
            self._engine = vllm_runner(self.target, settings)
        return self._engine

    def _close_runner(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _note(self, request: Any, outcome: Outcome) -> None:
        self.num_cut += outcome.finish == "length"
        if self.drafter is None:
            return
        found = self.acceptance.setdefault(str(request.task_name), Acceptance())
        found.add(outcome.rounds[self.drafter_name, self.depth])

    def _compare(self, request: Any, alone: Outcome, outcome: Outcome) -> None:
        """Remember where an answer with the drafter parts from the target's own."""
        ours, theirs, prompt = alone.answer_ids, outcome.answer_ids, alone.work.prompt
        if ours == theirs:
            return
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        position = min(len(ours), len(theirs)) if at is None else at
        margins = alone.margins
        if not margins and position < len(ours):
            # engines tell no margins; the target's own pass over its answer does
            answerer = Answerer(self.target, taps=(), max_new_tokens=1)
            margins = tuple(answerer.force(prompt, ours[: position + 1], "length").margins.tolist())
        entry = Lossy(
            task=str(request.task_name),
            doc=int(request.doc_id or 0),
            position=position,
            tokens=(
                ours[position] if position < len(ours) else None,
                theirs[position] if position < len(theirs) else None,
            ),
            margin=margins[position] if position < len(margins) else None,
            text=(
                read_answer(self.tokenizer, ours, prompt.stop_strings),
                read_answer(self.tokenizer, theirs, prompt.stop_strings),
            ),
        )
        self.lossy.append(entry)

    def _report(self) -> None:
        """Write the acceptance where the user sees it."""
        info = self.get_model_info()["specbench"]
        if self.acceptance_file:
            path = Path(self.acceptance_file)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(info, indent=1) + "\n")
            except OSError as error:
                raise UserError(f"cannot write acceptance_file={path}: {error.strerror}") from error

    # ---- log-likelihoods: the target alone

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_more: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding would say it) of each continuation."""
        answerer = Answerer(self.target, taps=(), max_new_tokens=1)
        results = []
        for key, context, continuation in tqdm(
            requests, disable=disable_tqdm, desc="log-likelihoods of the target"
        ):
            whole = [*context, *continuation][-(self.max_length + 1) :]
            kept = len(whole) - len(continuation)
            if kept < 1:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens does not fit the target's {self.max_length} "
                    "positions; leave the task out"
                )
            trace = answerer.force(_plain(whole[:kept]), whole[kept:], "length")
            result = (float(trace.logprobs.double().sum()), bool((trace.margins >= 0).all()))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
            results.append(result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows of the target's positions."""
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="rolling log-likelihoods of the target"):
            (text,) = request.args
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                ),
            )
            parts = self._loglikelihood_tokens([(None, *window) for window in windows], disable_tqdm=True)
            total = math.fsum(part[0] for part in parts)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            results.append(total)
        return results


def _plain(ids: Sequence[int]) -> RenderedPrompt:
    return RenderedPrompt(
        prompt_id="log-likelihood",
        suite="",
        category="",
        turn=0,
        condition=_CONDITION,
        token_ids=tuple(ids),
        spans=(Span(kind="user", start=0, end=len(ids)),),
        bos_count=0,
        template_hash="",
    )


def _whole(value: Any, name: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise UserError(f"--model specbench takes {name}= a whole number of 1 or more, not {value!r}")
    return number


def _batch(value: Any) -> int:
    # lm-eval lets "auto" search for a size; the loop decodes one answer at a time and needs none
    text = str(value or RunConfig().batch_size)
    return RunConfig().batch_size if text.startswith("auto") else _whole(text, "batch_size")
