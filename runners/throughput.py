"""Tokens per second that users get from an engine with a drafter, beside the same engine without one.

For u users, u requests are at work at any time. A pass over the prompts warms up and is dropped; then come at least
three that count. The greedy answers are the same with every drafter, so the engines do the same work.

The speed-up that acceptance promises is ``(tau + 1) / (c_verify + k c_draft)``: tokens per round over the cost of a
round, in steps of the engine without speculation. Both costs are measured, on the steps in which all users were past
their prompts: what the drafter's call took, and the rest.

Example:
    for level in measure(runner, prompts, {"ngram": drafter}, users=(1, 4), depths=(3,)):
        level.drafter, level.users, level.total, level.error
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from specbench.config import RunConfig
from specbench.errors import UserError
from specbench.runners.pace import Pace
from specbench.runners.vllm_engine import Engine, VllmRunner, engine_rounds
from specbench.runners.vllm_start import EngineAnswer
from specbench.types import CLEAN, Drafter, RenderedPrompt

FILE = "throughput.json"
REPEATS = 3
_LEAST_REQUESTS = 8
_PLAIN = ""
"""The drafter's name where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One engine serving one number of users; a value per repeat where there are several."""

    drafter: str
    """"" without speculation."""
    k: int
    users: int
    session: int = 0
    """Which start of the command measured it; only levels of one session are compared, machines being what they are."""
    requests: int = 0
    """Answers per repeat."""
    per_user: tuple[float, ...] = ()
    """Tokens/s that one user sees behind the first token, mean over answers."""
    total: tuple[float, ...] = ()
    """Tokens/s of all users, prompts included."""
    first_token_ms: tuple[float, ...] = ()
    """Median time to the first token."""
    accepted_per_round: float | None = None
    step_ms: float | None = None
    """Mean of a step in which all users were past their prompts: a round, or a token without speculation."""
    draft_ms: float | None = None
    """The drafter's part of it."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """A level beside the one without speculation for as many users."""

    per_user: float
    """Ratio of medians."""
    total: float
    c_verify: float | None
    """Cost of a round without its drafts, in steps without speculation; of all of it where drafts cannot be timed."""
    c_draft: float | None
    """Cost of one draft token."""
    predicted: float | None


def measure(
    runner: VllmRunner,
    prompts: Sequence[RenderedPrompt],
    drafters: Mapping[str, Drafter],
    *,
    users: Sequence[int],
    depths: Sequence[int],
    repeats: int = REPEATS,
    done: Sequence[Level] = (),
    on_start: Callable[[str], None] = lambda _text: None,
) -> Iterator[Level]:
    """Yield the levels of every engine, the one without speculation first; a failed one gives levels that say so.

    Args:
        runner: starts the engines.
        prompts: answered in turn.
        drafters: by name.
        users: numbers of users.
        depths: k.
        repeats: passes that count.
        done: levels that need not be measured again; the engine without speculation is, beside any that need it.
        on_start: hears which engine is measured.
    """
    engines: list[tuple[str, int]] = [
        (_PLAIN, 0),
        *((name, k) for name in drafters for k in sorted(set(depths))),
    ]
    session = 1 + max((level.session for level in done), default=-1)
    plain = {
        (level.users, level.session) for level in done if level.drafter == _PLAIN and level.error is None
    }
    have = {
        (level.drafter, level.k, level.users)
        for level in done
        if level.error is None and (level.users, level.session) in plain
    }
    missing = {
        (name, k): [u for u in sorted(set(users)) if (name, k, u) not in have] for name, k in engines[1:]
    }
    needed = {u for u in users if (_PLAIN, 0, u) not in have}.union(*missing.values())
    missing = {(_PLAIN, 0): sorted(needed), **missing}
    length = runner.length(prompts, max(depths))
    for name, k in engines:
        wanted = missing[name, k]
        if not wanted:
            continue
        on_start(f"throughput of {name} at k = {k}" if name else "throughput without speculation")
        try:
            engine = runner.engine_apart(drafters.get(name), k, length=length, users=max(users))
        except UserError as error:
            yield from (Level(drafter=name, k=k, users=u, session=session, error=str(error)) for u in wanted)
            continue
        try:
            for u in wanted:
                level = _level(runner, engine, prompts, drafters.get(name), name, k, u, repeats)
                yield replace(level, session=session)
        finally:
            engine.close()


def comparable(levels: Sequence[Level]) -> list[Level]:
    """Return the levels that stand beside one of the engine without speculation; failed ones do not."""
    plain = {
        (level.users, level.session) for level in levels if level.drafter == _PLAIN and level.error is None
    }
    return [level for level in levels if level.error is None and (level.users, level.session) in plain]


def _level(
    runner: VllmRunner,
    engine: Engine,
    prompts: Sequence[RenderedPrompt],
    drafter: Drafter | None,
    name: str,
    k: int,
    users: int,
    repeats: int,
) -> Level:
    count = max(2 * users, _LEAST_REQUESTS)
    asked = [prompts[i % len(prompts)] for i in range(count)]
    requests = [runner.request(str(i), prompt) for i, prompt in enumerate(asked)]

    def once(costs: bool = False) -> tuple[list[EngineAnswer], Pace]:
        return engine.measure(
            requests, runner.settings.sampling, runner.target.stop_ids, users=users, costs=costs
        )

    try:
        once()
        passes = [once() for _ in range(repeats)]
        # where drafts can be timed only by waiting for the device, a pass of its own does that
        costs = [pace for _answers, pace in passes]
        if drafter is not None and costs[0].draft_seconds is None:
            costs = [once(costs=True)[1]]
        accepted = None if drafter is None else _accepted(passes, asked, drafter, k)
    except UserError as error:
        return Level(drafter=name, k=k, users=users, error=str(error))
    step_ms, draft_ms = _costs(costs)
    return Level(
        drafter=name,
        k=k,
        users=users,
        requests=count,
        per_user=tuple(_per_user(answers) for answers, _pace in passes),
        total=tuple(pace.window_tokens / pace.window_seconds for _answers, pace in passes),
        first_token_ms=tuple(
            1000 * median(answer.first_token_seconds for answer in answers) for answers, _pace in passes
        ),
        accepted_per_round=accepted,
        step_ms=step_ms,
        draft_ms=draft_ms if drafter is not None else None,
    )


def _per_user(answers: Sequence[EngineAnswer]) -> float:
    """Mean over users of tokens/s behind the first token; answers of one token have none."""
    rates = [
        (len(a.token_ids) - 1) / (a.seconds - a.first_token_seconds)
        for a in answers
        if a.seconds > a.first_token_seconds
    ]
    return sum(rates) / len(rates) if rates else 0.0


def _accepted(
    passes: Sequence[tuple[list[EngineAnswer], Pace]],
    asked: Sequence[RenderedPrompt],
    drafter: Drafter,
    k: int,
) -> float | None:
    rounds = [
        entry
        for answers, _pace in passes
        for answer in answers
        if answer.records is not None
        for entry in engine_rounds(answer, asked[int(answer.key)], drafter, k)
    ]
    return sum(r.num_accepted for r in rounds) / len(rounds) if rounds else None


def _costs(paces: Sequence[Pace]) -> tuple[float | None, float | None]:
    """Milliseconds of a step and of its drafts."""
    steps = sum(p.steps for p in paces)
    if not steps:
        return None, None
    step_ms = 1000 * sum(p.step_seconds for p in paces) / steps
    drafts = [p.draft_seconds for p in paces if p.draft_seconds is not None]
    # workers in processes of their own do their drafting where this clock does not see it
    draft_ms = 1000 * sum(drafts) / steps if len(drafts) == len(paces) and sum(drafts) > 0 else None
    return step_ms, draft_ms


def speed_up(level: Level, plain: Level) -> SpeedUp | None:
    """Return a level's speed-up over the engine without speculation; None where one of them failed."""
    assert plain.drafter == _PLAIN and plain.users == level.users
    if level.error is not None or plain.error is not None or level.drafter == _PLAIN:
        return None
    c_verify = c_draft = predicted = None
    if level.step_ms is not None and plain.step_ms:
        c_verify = (level.step_ms - (level.draft_ms or 0.0)) / plain.step_ms
        if level.draft_ms is not None:
            c_draft = level.draft_ms / level.k / plain.step_ms
        if level.accepted_per_round is not None:
            predicted = (level.accepted_per_round + 1) / (c_verify + level.k * (c_draft or 0.0))
    return SpeedUp(
        per_user=median(level.per_user) / median(plain.per_user),
        total=median(level.total) / median(plain.total),
        c_verify=c_verify,
        c_draft=c_draft,
        predicted=predicted,
    )


def with_speed_ups(levels: Sequence[Level]) -> list[tuple[Level, SpeedUp | None]]:
    """Pair every level with its speed-up, by number of users, the engine without speculation first in each."""
    plain = {(level.users, level.session): level for level in levels if level.drafter == _PLAIN}
    ordered = sorted(levels, key=lambda level: (level.users, level.session, level.drafter != _PLAIN))
    pairs = ((level, plain.get((level.users, level.session))) for level in ordered)
    return [(level, None if beside is None else speed_up(level, beside)) for level, beside in pairs]


def read_levels(out: Path) -> list[Level]:
    """Return what a run directory holds; nothing where there is no such file."""
    file = out / FILE
    if not file.is_file():
        return []
    try:
        entries = json.loads(file.read_text())["levels"]
        return [_read(entry) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); remove it, and the throughput is measured again"
        ) from error


def _read(entry: Mapping[str, Any]) -> Level:
    values: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in entry.items() if n != "speed_up"
    }
    return Level(**values)


def write_levels(out: Path, levels: Sequence[Level], record: Mapping[str, Any]) -> None:
    """Write ``throughput.json``, whole or not at all."""
    entries = [
        {**asdict(level), "speed_up": None if faster is None else asdict(faster)}
        for level, faster in with_speed_ups(levels)
    ]
    file = out / FILE
    work = file.with_suffix(".json.partial")
    work.write_text(json.dumps({"engine": record, "levels": entries}, indent=1) + "\n")
    work.rename(file)


def measure_run(
    runner: Any,
    prompts: Sequence[RenderedPrompt],
    drafters: Mapping[str, Drafter],
    config: RunConfig,
    out: Path,
    note: Callable[[str], None],
) -> dict[str, str]:
    """Measure what a run asks for, on its clean first turns; levels that are stored already are kept.

    Args:
        runner: the run's.
        prompts: its first turns under all conditions.
        drafters: by name.
        config: its options.
        out: its directory; ``throughput.json`` is written after every level.
        note: hears what is measured.

    Returns:
        "throughput, drafter, k, users" -> why it could not be measured.
    """
    clean = [prompt for prompt in prompts if prompt.condition.id == CLEAN]
    levels = comparable(read_levels(out))
    found = measure(
        runner,
        clean,
        drafters,
        users=config.throughput,
        depths=config.depth,
        done=tuple(levels),
        on_start=note,
    )
    for level in found:
        levels.append(level)
        write_levels(out, levels, {**runner.record(), "repeats": REPEATS})
    return {
        f"throughput, {level.drafter or 'no speculation'}, k {level.k}, {level.users} users": level.error
        for level in levels
        if level.error is not None
    }
