"""Runs with trace packs: making one, keeping one beside a run, and scoring drafters on one.

Example:
    trace(RunConfig(suite=("mini",), out="packs/first"), Observer(), taps=(2, 15, 27))
    run_on_pack(RunConfig(traces="packs/first", suite=(), perturb=(), drafter="ngram", out="runs/second"), Observer())
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from specbench.config import TARGET_OPTIONS, RunConfig
from specbench.drafters.eagle3 import default_taps
from specbench.drafters.resolve import load_drafter, required_taps
from specbench.errors import UserError, unknown_name
from specbench.perturbations.condition import Condition
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import ALIASES, resolve_conditions
from specbench.results.store import AnswerKey, RunStore
from specbench.runners.pipeline import (
    Observer,
    Pipeline,
    RunDirectory,
    RunReport,
    drafter_specs,
    engine_lines,
    load_chat,
    package_versions,
    run_settings,
    warn_positions,
)
from specbench.runners.plan import Plan, make_plan
from specbench.runners.replay import ReplayRunner, score_in_groups
from specbench.runners.runner import Outcome, Runner, RunSettings, Work
from specbench.runners.targets import Target, load_tokenizer, pick_device, pick_dtype, resolve_target_path
from specbench.runners.trace_pack import PackEntry, PackWriter, TraceKey, TracePack
from specbench.types import (
    CLEAN,
    ConditionInfo,
    Drafter,
    Prompt,
    RenderedPrompt,
    Trace,
)

KEPT = "traces"
"""Where ``--keep-traces`` puts a run's pack, within its directory."""
_FILTERS = ("suite", "perturb", "severity", "limit")
_ENTRY_BYTES, _ID_BYTES = 2048, 10
"""Of a trace in shard header and index: what it takes by itself, and per token."""
_FOLLOW_MARKUP = 16
"""Template tokens around a later turn, for the size estimate."""


# ---- making a pack


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What of a target decides how large its traces are; read from its configuration alone."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    tied: bool
    itemsize: int
    """Bytes of one number."""

    @classmethod
    def read(cls, config: RunConfig) -> TargetShape:
        """Read the shape of a run's target.

        Raises:
            UserError: the target is not found.
        """
        from transformers import AutoConfig

        path = resolve_target_path(config.target)
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        text = model.get_text_config()
        return cls(
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            vocab_size=text.vocab_size,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            itemsize=pick_dtype(config.dtype, pick_device(config.device)).itemsize,
        )


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the taps, ascending and each once.

    Raises:
        UserError: the target has no such hidden state.
    """
    for tap in taps:
        if not 0 <= tap <= num_layers:
            raise UserError(
                f"--taps names {tap}, but the target has the hidden states 0 (embeddings) to {num_layers} (leaving the "
                "last block)"
            )
    return tuple(sorted(set(taps)))


def estimate_bytes(
    plan: Plan, config: RunConfig, chat: ChatTokenizer, shape: TargetShape, num_taps: int
) -> int:
    """Return the size of this plan's pack if every answer reaches its limit, in bytes."""
    follow = {
        prompt.id: [len(chat.tokenizer(text)["input_ids"]) + _FOLLOW_MARKUP for text in prompt.turns[1:]]
        for prompt in plan.prompts
    }
    row_bytes = num_taps * shape.hidden_size * shape.itemsize
    total = (1 if shape.tied else 2) * shape.vocab_size * shape.hidden_size * shape.itemsize
    for first in plan.first_turns:
        limit = first.max_new_tokens or config.max_new_tokens
        times = 2 if config.answer_path == "both" and first.condition.id != CLEAN else 1
        length = len(first.token_ids)
        for extra in (*follow[first.prompt_id], 0):
            # three facts per answer token; ids, spans and condition in header and index
            total += times * ((length + limit) * (row_bytes + _ID_BYTES) + limit * 12 + _ENTRY_BYTES)
            length += limit + extra
    return total


def _pack_line(plan: Plan, config: RunConfig, chat: ChatTokenizer, num_taps: int, where: Path) -> str:
    size = estimate_bytes(plan, config, chat, TargetShape.read(config), num_taps)
    return f"{where}: at most about {format_bytes(size)}, {num_taps} taps; {format_bytes(_free(where))} free there"


def _free(path: Path) -> int:
    there = path.expanduser().absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def format_bytes(count: int) -> str:
    """Return a size for people: ``1.3 GiB``."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


class _PackLedger:
    """A pack in the place of a run's store: finished traces are finished answers, and nothing is scored."""

    def __init__(self, writer: PackWriter) -> None:
        self.writer = writer
        self.path = writer.path

    def finished_keys(self) -> set[Any]:
        return set()

    def answers(self) -> list[dict[str, Any]]:
        return [row | {"error": None} for row in self.writer.rows]

    def write(self, **_rows: Any) -> None:
        """Put on disk what came since the last call: a kill loses no more of a pack than of a run."""
        self.writer.flush()


def trace(
    config: RunConfig,
    observer: Observer,
    *,
    taps: Sequence[int] | None = None,
    dry_run: bool = False,
    command: Sequence[str] = (),
) -> RunReport | None:
    """Make a trace pack in ``config.out``, or go on with it; return None after a dry run.

    Args:
        config: prompts, conditions and target; what concerns drafters is not looked at.
        observer: hears of progress.
        taps: ``hidden_states`` indices to keep; default: EAGLE-3's for this depth.
        dry_run: stop after the plan.
        command: recorded in ``pack.json``.

    Raises:
        UserError: bad input, before any model runs; or a disk that refuses.
    """
    tokenizer, limit = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    chat = load_chat(tokenizer, config, limit)
    num_layers = TargetShape.read(config).num_layers
    chosen = check_taps(taps, num_layers) if taps is not None else default_taps(num_layers)
    plan = make_plan(config, chat, limit)
    details = {
        "drafters": "",
        "depth": "",
        "taps": ", ".join(map(str, chosen)) or "none",
        "out": _pack_line(plan, config, chat, len(chosen), Path(config.out)),
    }
    if config.runner == "vllm":
        details["target"] = f"{config.target}: {plan.answers} answers (one pass each, in the engine)"
    plan = replace(plan, details=details)
    observer.planned(plan, config)
    if dry_run:
        return None
    target, runner, done = _tracer(config, observer)
    writer = open_writer(Path(config.out), target, config, plan, chosen, command)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(done)
        cleanup.enter_context(kept_open(writer, plan))
        runner.extra_taps, runner.on_trace = chosen, writer.add
        pipeline = Pipeline(
            config,
            plan,
            target=target.info,
            chat=chat,
            runner=runner,
            drafters={},
            store=cast(RunStore, _PackLedger(writer)),
            observer=observer,
        )
        observer.started(target.info, [], plan.answers, pipeline.resumed)
        return pipeline.execute()


def _tracer(config: RunConfig, observer: Observer) -> tuple[Target, ReplayRunner, Callable[[], None]]:
    """Return a plan's target, who traces it, and what to call in the end.

    With ``runner="vllm"`` the engine runs the target; the copy here stays on the CPU for its embeddings, norm and head.

    Raises:
        UserError: the target cannot be loaded, or vLLM cannot run here.
    """
    settings = run_settings(config)
    engine = config.runner == "vllm"
    place = pick_device(config.device)
    if engine:
        from specbench.runners.vllm_engine import vllm_runner

        vllm_runner.check(settings)
    target = Target.load(
        config.target,
        device="cpu" if engine else config.device,
        dtype=str(pick_dtype(config.dtype, place)).removeprefix("torch.") if engine else config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    runner = ReplayRunner(target, settings)
    if not engine:
        return target, runner, lambda: None
    from specbench.runners.vllm_engine import VllmRunner
    from specbench.runners.vllm_states import EngineAnswerer

    device = "cpu" if place == "cpu" else "cuda"
    asked = VllmRunner(target, settings, device=device)
    for text in engine_lines({"engine": asked.record()}):
        observer.note(text)
    made: list[EngineAnswerer] = []

    def answerer(taps: Sequence[int], on_tokens: Callable[[int], None]) -> EngineAnswerer:
        if not made:
            made.append(EngineAnswerer(asked, taps, on_tokens))
        return made[0]

    def close() -> None:
        for one in made:
            one.close()

    runner.make_answerer = answerer
    return target, runner, close


def open_writer(
    path: Path, target: Target, config: RunConfig, plan: Plan, taps: Sequence[int], command: Sequence[str]
) -> PackWriter:
    """Begin the pack of a plan, or go on with it."""
    return PackWriter(
        path,
        target.weights(),
        config=config,
        taps=taps,
        prompts_hash=plan.prompts_hash,
        command=shlex.join(command),
        versions=package_versions(),
    )


def finish_writer(writer: PackWriter, plan: Plan) -> None:
    """Complete a pack, its index in the plan's order."""
    writer.finish([prompt.id for prompt in plan.prompts], [c.info.id for c in plan.conditions])


# ---- keeping one beside a run


def with_kept_traces(plan: Plan, config: RunConfig, chat: ChatTokenizer) -> Plan:
    """Return the plan with a line on the pack that ``--keep-traces`` will leave."""
    line = _pack_line(plan, config, chat, 3, Path(config.out) / KEPT)
    return replace(plan, details={**plan.details, "traces": line})


def kept_taps(drafters: Iterable[Drafter], num_layers: int) -> tuple[int, ...]:
    """Return the taps that ``--keep-traces`` keeps: the drafters', or EAGLE-3's where they need none."""
    taps = required_taps(drafters)
    if taps:
        return taps
    try:
        return default_taps(num_layers)
    except UserError:
        return ()


def keep_traces(
    runner: Runner,
    target: Target,
    config: RunConfig,
    plan: Plan,
    drafters: Collection[Drafter],
    command: Sequence[str],
) -> PackWriter | None:
    """Let a run's traces go into a pack under its directory, where it asks for that; return the pack's writer."""
    if not config.keep_traces:
        return None
    assert isinstance(runner, ReplayRunner), "the configuration lets no other runner keep traces"
    taps = kept_taps(drafters, target.info.num_layers)
    path = Path(config.out).expanduser() / KEPT
    writer = open_writer(path, target, config, plan, taps, command)
    runner.extra_taps, runner.on_trace = taps, writer.add
    return writer


@contextlib.contextmanager
def kept_open(writer: PackWriter | None, plan: Plan) -> Iterator[None]:
    """Complete the pack if the work inside ends well; whatever happens, write what it holds."""
    if writer is None:
        yield
        return
    try:
        yield
        finish_writer(writer, plan)
    finally:
        writer.close()


# ---- scoring on one


def settle(config: RunConfig, pack: TracePack, given: Collection[str] = ()) -> RunConfig:
    """Return the configuration with everything that concerns the target as the pack has it.

    Args:
        config: of a run with ``traces``.
        pack: that pack.
        given: names of options that the user wrote; None of them may contradict the pack. Options that differ from
            their defaults count as written.

    Raises:
        UserError: an option contradicts the pack.
    """
    theirs, default = pack.config, RunConfig()
    settled = {name: getattr(theirs, name) for name in TARGET_OPTIONS if name not in _FILTERS}
    for name, value in settled.items():
        mine = getattr(config, name)
        if mine != value and (name in given or mine != getattr(default, name)):
            raise UserError(
                f"--{name.replace('_', '-')} {mine} contradicts the trace pack {pack.path}, which was made with "
                f"{value}; leave the option out"
            )
    config = replace(config, **settled)
    try:
        config.check_sampler()
    except UserError as error:
        raise UserError(
            f"the trace pack {pack.path} was made at temperature {config.temperature}: {error}"
        ) from error
    return config


def select(pack: TracePack, config: RunConfig) -> tuple[list[PackEntry], list[str]]:
    """Return the traces of a pack that a run asks for, and a sentence for each condition it lacks.

    ``suite`` and ``perturb`` choose among what the pack holds (empty: all), ``limit`` takes the first prompts of each
    suite. The clean condition is always there.

    Raises:
        UserError: the pack lacks a suite, every condition asked for, or the clean condition.
    """
    entries = list(pack.entries)
    if not entries:
        raise UserError(f"the trace pack {pack.path} holds no traces; every one failed when it was made")
    suites = list(dict.fromkeys(entry.suite for entry in entries))
    wanted = [Path(name).stem if name.endswith(".jsonl") else name for name in config.suite]
    for name in wanted:
        if name not in suites:
            raise UserError(f"the trace pack {pack.path} has no suite {name!r}; it has {', '.join(suites)}")
    conditions, skipped = _wanted_conditions(pack, config, entries)
    chosen = [e for e in entries if (not wanted or e.suite in wanted) and e.condition.id in conditions]
    if config.limit is not None:
        kept: dict[str, list[str]] = {}
        for entry in chosen:
            names = kept.setdefault(entry.suite, [])
            if entry.prompt_id not in names and len(names) < config.limit:
                names.append(entry.prompt_id)
        chosen = [entry for entry in chosen if entry.prompt_id in kept[entry.suite]]
    return chosen, skipped


def _wanted_conditions(
    pack: TracePack, config: RunConfig, entries: Sequence[PackEntry]
) -> tuple[set[str], list[str]]:
    there = {entry.condition.id: entry.condition for entry in entries}
    if CLEAN not in there:
        raise UserError(
            f"the trace pack {pack.path} has no {CLEAN}, so there is nothing to compare with; trace again"
        )
    light = {name for name, c in there.items() if config.severity is None or c.severity <= config.severity}
    items = [part.strip() for text in config.perturb for part in text.split(",") if part.strip()]
    if not items:
        return light | {CLEAN}, []
    wanted, skipped = {CLEAN}, []
    for item in items:
        found, lacking = _named_conditions(item, there, config.severity)
        wanted |= found if item in there else found & light
        skipped += [f"{name}: the trace pack does not have it" for name in lacking]
        if not found:
            raise UserError(
                f"the trace pack {pack.path} has nothing of --perturb {item}; it has {', '.join(there)}"
            )
    return wanted, skipped


def _named_conditions(
    item: str, there: Mapping[str, ConditionInfo], severity: int | None
) -> tuple[set[str], list[str]]:
    """Return the ids that one item names and the pack has, and those that it lacks."""
    if item in there:
        return {item}, []
    try:
        named = [condition.info.id for condition in resolve_conditions([item], severity)]
    except UserError:
        # a family from a package that is not installed here; its traces can be scored all the same
        family = ALIASES.get(item, item)
        found = {name for name, condition in there.items() if condition.family == family}
        if not found:
            raise unknown_name("perturbation", item, there) from None
        return found, []
    if item not in (CLEAN, "all", "paper", "template", "templates"):
        named = [name for name in named if name != CLEAN]  # it is always added
    return {name for name in named if name in there}, [name for name in named if name not in there]


@dataclass(frozen=True, slots=True)
class PackedCondition:
    """A condition whose work is done: the pack holds its token ids."""

    info: ConditionInfo

    @property
    def same_ids(self) -> bool:
        """Whether it acts inside the drafter only."""
        return "noise_path" in self.info.parameters

    def available(self, chat: ChatTokenizer) -> str | None:
        """It is there."""
        return None

    def render(
        self, prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer, seed: int
    ) -> RenderedPrompt:
        """Never asked for."""
        raise AssertionError("a trace pack's prompts are rendered already")


def pack_plan(pack: TracePack, config: RunConfig) -> tuple[Plan, list[PackEntry]]:
    """Return what a run on a pack will do, and the traces it will do it on.

    Raises:
        UserError: see :func:`select`.
    """
    entries, skipped = select(pack, config)
    turns: dict[str, int] = {}
    for entry in entries:
        turns[entry.prompt_id] = max(turns.get(entry.prompt_id, 0), entry.turn + 1)
    by_prompt = {entry.prompt_id: entry for entry in entries}
    prompts = [
        Prompt(id=name, suite=by_prompt[name].suite, category=by_prompt[name].category, turns=("",) * count)
        for name, count in turns.items()
    ]
    infos = {entry.condition.id: entry.condition for entry in entries}
    ordered = sorted(infos.values(), key=lambda info: info.id != CLEAN)
    conditions: list[Condition] = [PackedCondition(info) for info in ordered]
    firsts = {entry.key[:3]: entry for entry in entries if entry.turn == 0}
    plan = Plan(
        prompts=tuple(prompts),
        conditions=tuple(conditions),
        first_turns=tuple(pack.prompt(entry.number) for entry in firsts.values()),
        skipped=tuple(skipped),
        unchanged=0,
        answers=len(entries),
        prompt_tokens=sum(entry.prompt_tokens for entry in firsts.values()),
        max_answer_tokens=sum(entry.answer_tokens for entry in entries),
        details={
            "suites": f"{', '.join(dict.fromkeys(p.suite for p in prompts))}: {len(prompts)} prompts",
            "target": f"{pack.info.name}: {len(entries)} answers from the trace pack {pack.path} (no target is loaded)",
        },
    )
    return plan, entries


class PackRunner:
    """Scores drafters on the traces of a pack; its rows are those of the replay runner."""

    name = "replay"

    def __init__(self, pack: TracePack, settings: RunSettings) -> None:
        self.pack = pack
        self.settings = settings
        self._numbers = {entry.key: entry.number for entry in pack.entries}

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield an outcome for every piece of work.

        Raises:
            UserError: a shard is not what was written.
        """
        taps = required_taps(drafters.values())
        yield from score_in_groups(self._read(work, taps, on_tokens), drafters, self.settings)

    def _read(
        self, work: Sequence[Work], taps: Sequence[int], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[Work, Trace]]:
        for item in work:
            trace = self.pack.trace(self._numbers[TraceKey(*item.prompt.key, item.path)], taps)
            on_tokens(len(trace.answer_ids))
            yield item, trace


class PackPipeline(Pipeline):
    """A run whose work is what a pack holds."""

    def __init__(
        self, config: RunConfig, plan: Plan, pack: TracePack, entries: Sequence[PackEntry], **parts: Any
    ) -> None:
        super().__init__(config, plan, target=pack.info, chat=None, **parts)
        self.pack = pack
        self.entries = entries

    def execute(self) -> RunReport:
        """Score all traces that are not scored yet."""
        self._run(list(self._packed_work()))
        return self.report

    def _packed_work(self) -> Iterator[Work]:
        for entry in self.entries:
            key = AnswerKey(*entry.key)
            missing = tuple(name for name in self.drafters if self._item(key, name) not in self._finished)
            if missing:
                yield Work(prompt=self.pack.prompt(entry.number), drafters=missing, path=entry.path)


def check_pack_taps(pack: TracePack, drafters: Iterable[Drafter]) -> None:
    """Refuse drafters that need a tap which the pack lacks.

    Raises:
        UserError: naming drafter and tap, and how to trace again.
    """
    drafters = list(drafters)
    for drafter in drafters:
        lacking = [tap for tap in drafter.info.taps if tap not in pack.taps]
        if lacking:
            names = ", ".join(map(str, lacking))
            have = ", ".join(map(str, pack.taps)) or "none"
            union = ",".join(str(tap) for tap in sorted({*pack.taps, *required_taps(drafters)}))
            raise UserError(
                f"drafter {drafter.info.name} needs tap{'s' if len(lacking) > 1 else ''} {names}, which the trace pack "
                f"{pack.path} lacks (it has {have}); trace again where the target is: specbench trace --config "
                f"{pack.path / 'pack.json'} --taps {union} --out NEW"
            )


def run_on_pack(
    config: RunConfig, observer: Observer, *, dry_run: bool = False, command: Sequence[str] = ()
) -> RunReport | None:
    """Score drafters on a trace pack; no target is loaded. Return None after a dry run.

    Raises:
        UserError: bad input, before any drafter runs; or a pack that is not what was written.
    """
    assert config.traces is not None
    pack = TracePack(config.traces)
    config = settle(config, pack)
    specs = drafter_specs(config)
    plan, entries = pack_plan(pack, config)
    observer.planned(plan, config)
    if dry_run:
        return None
    directory = RunDirectory(config)
    try:
        weights = pack.weights(pick_device(config.device))
        drafters = {spec.text: load_drafter(spec, weights) for spec in specs}
        check_pack_taps(pack, drafters.values())
        warn_positions(plan, drafters.values(), config, observer)
        infos = [drafter.info for drafter in drafters.values()]
        source = {"trace_pack": {"path": str(pack.path), "checksum": pack.checksum}}
        directory.write_record(pack.info, infos, plan, command, source)
        pipeline = PackPipeline(
            config,
            plan,
            pack,
            entries,
            runner=PackRunner(pack, run_settings(config)),
            drafters=drafters,
            store=directory.store,
            observer=observer,
        )
        observer.started(pack.info, infos, plan.answers, pipeline.resumed)
        return pipeline.execute()
    finally:
        directory.store.close()
