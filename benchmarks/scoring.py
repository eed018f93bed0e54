r"""Scoring answers: lm-eval's filters and metrics where it has a task, test programs for the code suites.

Example:
    scorer = scorers(["gsm8k"], prompts)["gsm8k"]
    scorer.score([Answer(prompt=prompt, text="... so she has 18 eggs.")]).scores[0].value   # 1.0
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specbench.benchmarks.lm_eval_tasks import (
    PREFIX,
    LoadedTask,
    lm_eval_folder,
    load_tasks,
    quiet,
    require_lm_eval,
)
from specbench.benchmarks.sandbox import FLAG, CodeEval, run_program
from specbench.errors import UserError
from specbench.types import Prompt

_PREFERRED = "flexible-extract"
"""Of several filters the one that reads answers as chat models write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is scored."""

    prompt: Prompt
    text: str
    """Without special tokens, cut at the first stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One metric of one answer."""

    prompt_id: str
    filter: str
    metric: str
    value: float | None
    """None where the metric exists over many answers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """One metric over all answers, as its task aggregates it."""

    filter: str
    metric: str
    value: float
    higher_is_better: bool
    primary: bool
    """The one that stands beside acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a scorer found."""

    scores: tuple[Score, ...]
    totals: tuple[Total, ...]


class Scorer(Protocol):
    """Scores the answers of one suite."""

    @property
    def task(self) -> str:
        """Whose metric it is."""
        ...

    @property
    def version(self) -> str:
        """Of that task."""
        ...

    @property
    def runs_code(self) -> bool:
        """Whether it executes what the model wrote."""
        ...

    def score(self, answers: Sequence[Answer]) -> Scored:
        """Score the answers of one condition.

        Raises:
            UserError: the task's own code fails, or generated code may not run.
        """
        ...


def scorers(specs: Sequence[str], prompts: Sequence[Prompt]) -> dict[str, Scorer]:
    """Return a scorer for every suite that has one.

    Args:
        specs: what ``--suite`` names.
        prompts: those of the run; suites without any are left out.

    Raises:
        UserError: lm-eval is needed and not installed.
    """
    found: dict[str, Scorer] = {}
    present = {p.suite for p in prompts}
    for spec in specs:
        if spec.startswith(PREFIX):
            name = spec.removeprefix(PREFIX)
            found |= {t.suite: TaskScorer(t) for t in _loadable(name) if t.suite in present}
        elif spec in present and spec in _OWN:
            found[spec] = _OWN[spec]([p for p in prompts if p.suite == spec])
    return found


def _loadable(spec: str) -> list[LoadedTask]:
    # a task that cannot be loaded has no prompts, and was reported when they were asked for
    try:
        return load_tasks(spec)
    except UserError:
        return []


@dataclass(frozen=True, slots=True)
class TaskScorer:
    """Scores with the filters and metrics of an lm-eval task.

    Args:
        loaded: the task.
        documents: id of a prompt -> number of its document; None: prompts that lm-eval made know theirs.
    """

    loaded: LoadedTask
    documents: Mapping[str, int] | None = None

    @property
    def task(self) -> str:
        """lm-eval's name of it."""
        return self.loaded.name

    @property
    def version(self) -> str:
        """As its file says."""
        return self.loaded.version

    @property
    def runs_code(self) -> bool:
        """Whether the task is marked as unsafe."""
        return self.loaded.runs_code

    def score(self, answers: Sequence[Answer]) -> Scored:
        """Score the answers of one condition, as lm-eval would.

        Raises:
            UserError: the task's own code fails, or runs generated code in a way that cannot be confined.
        """
        if self.runs_code and not _is_confined(self.loaded.task):
            raise UserError(
                f"{self.loaded.suite} runs generated code in a way of its own, which cannot be confined here; score it "
                "with `specbench lm-eval --confirm_run_unsafe_code` on a machine that may break"
            )
        try:
            with quiet():
                return self._score(answers)
        except UserError:
            raise
        except Exception as error:  # filters and metrics are other people's code
            said = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"{self.loaded.suite} fails while it scores: {type(error).__name__}: {said}; mend the task, or run "
                "without --score"
            ) from error

    def _number(self, prompt: Prompt) -> int:
        return self.documents[prompt.id] if self.documents is not None else int(prompt.meta["lm_eval_doc"])

    def _score(self, answers: Sequence[Answer]) -> Scored:
        from lm_eval.api.instance import Instance
        from lm_eval.api.metrics import mean

        task, documents = self.loaded.task, self.loaded.task.eval_docs
        instances = [
            Instance(
                request_type="generate_until",
                doc=documents[number],
                arguments=("", {}),
                idx=0,
                metadata=(self.loaded.name, number, 1),
                resps=[answer.text],
            )
            for answer, number in ((a, self._number(a.prompt)) for a in answers)
        ]
        for ensemble in task._filters:
            ensemble.apply(instances)
        scores: list[Score] = []
        raw: dict[tuple[str, str], list[Any]] = {}
        for ensemble in task._filters:
            for answer, instance in zip(answers, instances, strict=True):
                results = task.process_results(instance.doc, [instance.filtered_resps[ensemble.name]])
                for metric, value in results.items():
                    raw.setdefault((ensemble.name, metric), []).append(value)
                    scores.append(
                        Score(
                            prompt_id=answer.prompt.id,
                            filter=ensemble.name,
                            metric=metric,
                            value=_number_or_none(value),
                        )
                    )
        better, aggregate = task.higher_is_better(), task.aggregation()
        chosen = _primary(list(raw))
        totals = tuple(
            Total(
                filter=key[0],
                metric=key[1],
                value=float((aggregate.get(key[1]) or mean)(values)),
                higher_is_better=bool(better.get(key[1], True)),
                primary=key == chosen,
            )
            for key, values in raw.items()
        )
        return Scored(scores=tuple(scores), totals=totals)


def _primary(keys: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return next((key for key in keys if key[0] == _PREFERRED), keys[0])


def _number_or_none(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_confined(task: Any) -> bool:
    """Whether the task's metrics reach generated code through our stand-in for ``code_eval``."""
    config = task.config
    used = [m.get("metric") for m in config.metric_list or () if isinstance(m, dict)]
    used += [config.process_results, *getattr(task, "_metric_fn_list", {}).values()]
    functions = [getattr(f, "__wrapped__", f) for f in used if callable(f)]
    functions = [getattr(f, "__self__", f) for f in functions]
    return any(
        isinstance(value, CodeEval) for f in functions for value in getattr(f, "__globals__", {}).values()
    )


# ---- our own suites


@dataclass(frozen=True, slots=True)
class PromptScorer:
    """Scores each answer by itself, and takes the mean.

    Args:
        task: whose metric it is.
        filter: how the answer is read.
        metric: what is compared.
        judge: the value of one answer.
        runs_code: whether ``judge`` executes it.
    """

    task: str
    filter: str
    metric: str
    judge: Callable[[Answer], float]
    runs_code: bool = False

    @property
    def version(self) -> str:
        """Of a scorer that comes with specbench: none of its own."""
        return ""

    def score(self, answers: Sequence[Answer]) -> Scored:
        """Score the answers of one condition.

        Raises:
            UserError: generated code may not run.
        """
        if self.runs_code and not CodeEval.allowed:
            raise UserError(f"this suite is scored by running what the model wrote; allow it with {FLAG}")
        values = [self.judge(answer) for answer in answers]
        scores = tuple(
            Score(prompt_id=a.prompt.id, filter=self.filter, metric=self.metric, value=v)
            for a, v in zip(answers, values, strict=True)
        )
        total = Total(
            filter=self.filter,
            metric=self.metric,
            value=sum(values) / len(values),
            higher_is_better=True,
            primary=True,
        )
        return Scored(scores=scores, totals=(total,))


def _gsm8k(prompts: Sequence[Prompt]) -> Scorer:
    """lm-eval's gsm8k on the prompts' own questions and solutions: no data set is fetched."""
    rows = [{"question": p.turns[0], "answer": p.meta["solution"]} for p in prompts]
    task = _with_data("gsm8k", "gsm8k/gsm8k.yaml", rows)
    return TaskScorer(task, {p.id: i for i, p in enumerate(prompts)})


def _with_data(name: str, file: str, rows: list[dict[str, str]]) -> LoadedTask:
    """Return one of lm-eval's own tasks over rows that are at hand."""
    require_lm_eval(f"scoring {name}")
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    def data(**_settings: Any) -> Any:
        table = datasets.Dataset.from_list(rows)
        return {"train": table, "test": table}

    with quiet():
        settings = load_yaml(lm_eval_folder() / file)
        settings = {k: v for k, v in settings.items() if k not in ("tag", "dataset_kwargs")}
        task = ConfigurableTask(config={**settings, "custom_dataset": data})
    return LoadedTask(name=name, version=str(task.VERSION), task=task)


def _math500(prompts: Sequence[Prompt]) -> Scorer:
    """lm-eval's comparison of hendrycks_math, on the last box of the answer: chat models put the result there."""
    require_lm_eval("scoring math500")
    utils = importlib.import_module("lm_eval.tasks.hendrycks_math.utils")

    def judge(answer: Answer) -> float:
        box = utils.last_boxed_only_string(answer.text)
        return float(box is not None and utils.is_equiv(utils.remove_boxed(box), answer.prompt.reference))

    return PromptScorer("hendrycks_math500", "last-boxed", "exact_match", judge)


def _humaneval(prompts: Sequence[Prompt]) -> Scorer:
    return PromptScorer("humaneval", "first-code-block", "pass@1", _judge(humaneval_program), runs_code=True)


def _mbpp(prompts: Sequence[Prompt]) -> Scorer:
    return PromptScorer("mbpp", "first-code-block", "pass@1", _judge(mbpp_program), runs_code=True)


def _judge(program: Callable[[Answer], str]) -> Callable[[Answer], float]:
    return lambda answer: float(run_program(program(answer)).passed)


_OWN: Mapping[str, Callable[[Sequence[Prompt]], Scorer]] = {
    "gsm8k": _gsm8k,
    "math500": _math500,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
}

_FENCE = re.compile(r"```[^\S\n]*\w*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(text: str) -> str:
    """Return the answer's first code block, to its end where nothing closes it; without one, the whole text."""
    found = _FENCE.search(text)
    return found.group(1) if found else text


def humaneval_program(answer: Answer) -> str:
    """Return the published stub with its imports and helpers, the answer's code, and the published tests."""
    facts = json.loads(answer.prompt.meta["scoring"])
    stub, code = str(facts["prompt"]).rstrip() + "\n", code_of(answer.text)
    # a stub of a docstring alone is a whole function, so a function in the answer simply takes its place
    joined = stub + code if code[:1].isspace() and code.strip() else f"{stub}\n\n{code}"
    return f"{joined}\n\n{facts['test']}\n\ncheck({facts['entry_point']})\n"


def mbpp_program(answer: Answer) -> str:
    """Return the answer's code and the published tests."""
    facts = json.loads(answer.prompt.meta["scoring"])
    return "\n".join([code_of(answer.text), "", *facts["test_imports"], *facts["test_list"], ""])
