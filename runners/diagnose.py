"""Why a drafter loses the prompt: sizes, attention, depth, noise, pin and windows, on the answers that score it.

Every answer of the target is looked at once and let go: rows go to the tables group by group, so memory does not
grow with the number of prompts. Chains are started at every position of an answer and run to full depth on the
target's tokens; ``accepted_per_round`` and its conditional rates come from the same chains, up to their first miss.

Example:
    diagnose(RunConfig(drafter="zoo:eagle3,zoo:eagle3.1", suite=("mtbench",)), Measures(depth=8), Path("diag"))
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from specbench.config import RunConfig
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.eagle3_drafter import Eagle3Drafter, Prepared
from specbench.drafters.resolve import load_drafter, parse_drafters, required_taps
from specbench.drafters.scoring import system_span
from specbench.errors import UserError
from specbench.perturbations.resolve import resolve_conditions
from specbench.results.diagnosis_store import DiagnosisWriter
from specbench.runners.answers import Answerer
from specbench.runners.check import chain_drafter
from specbench.runners.diagnose_probe import (
    PREFIX_REGIONS,
    Chain,
    OwnTokens,
    Pin,
    SinkSearch,
    Watch,
)
from specbench.runners.noise import GaussianNoise
from specbench.runners.packed import check_pack_taps, select
from specbench.runners.pipeline import load_chat, package_versions
from specbench.runners.plan import load_prompts, render_turn
from specbench.runners.replay import walk_rounds
from specbench.runners.stopping import read_answer
from specbench.runners.targets import Target, load_tokenizer, pick_device
from specbench.runners.trace_pack import TracePack
from specbench.types import CLEAN, PositionScores, RenderedPrompt, ScoreRequest, TargetWeights, Trace

_GROUP_TRACES = 8
_GROUP_ROWS = 8192
"""Answers are looked at in groups of at most this many and this many rows."""
_KEPT_BYTES = 256 << 20
"""Bound on the draws of noise that a thread keeps."""
_CHAIN_ROWS = 600
"""Positions of the longest answer whose chain is drawn."""
_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What is measured."""

    depth: int = 8
    """Steps whose attention is read, and k of the acceptance numbers."""
    deep: int = 16
    """Steps of the conditional rates and of forced chains."""
    alphas: tuple[float, ...] = (0.1, 0.5, 1.0)
    seeds: int = 3
    windows: tuple[int, ...] = (256, 512, 1024, 2048)
    per_head: bool = False

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UserError: one of them is off.
        """
        if self.depth < 2 or self.deep < self.depth:
            raise UserError(
                "--depth must be 2 or more, and --deep at least --depth: drift needs steps to compare"
            )
        if self.seeds < 1 or any(a <= 0 for a in self.alphas):
            raise UserError("--alphas must be above 0 and --seeds 1 or more")
        if any(w < 1 for w in self.windows):
            raise UserError("--windows must be 1 or more positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where answers come from: a target, or a trace pack."""

    weights: TargetWeights
    taps_of: Callable[[Sequence[Eagle3Drafter]], Iterator[Trace]]
    """Given the drafters, the traces."""
    decode: Callable[[Sequence[int]], str]
    num_answers: int
    """First turns; more may follow."""
    description: Mapping[str, Any]


def diagnose(
    config: RunConfig,
    measures: Measures,
    out: Path,
    note: Callable[[str], None] = lambda _text: None,
) -> None:
    """Look into the drafters of a configuration and write the tables.

    Args:
        config: suite, limit, target or traces, drafters and what concerns the answers; only clean prompts are used.
        measures: what is measured.
        out: directory of the tables.
        note: hears of progress.

    Raises:
        UserError: bad input; or a drafter that has no states to look into.
    """
    source = pack_source(config) if config.traces is not None else target_source(config)
    drafters = load_drafters(config, source.weights)
    note(f"{len(drafters)} drafters, {source.num_answers} first turns")
    with DiagnosisWriter(out) as writer:
        job = Job(drafters, source, measures, writer, config.seed)
        count = 0
        for group in _groups(source.taps_of(list(drafters.values()))):
            job.take(group)
            count += len(group)
            note(f"{count} answers looked at")
        if not job.prompts:
            raise UserError(
                "no answer was longer than one token, so there is nothing to draft; use another --suite"
            )
        writer.finish(_record(config, measures, source, job))


def load_drafters(config: RunConfig, weights: TargetWeights) -> dict[str, Eagle3Drafter]:
    """Return the drafters by name.

    Raises:
        UserError: one does not load, or has no states to look into.
    """
    found: dict[str, Eagle3Drafter] = {}
    for spec in parse_drafters(config.drafter):
        found[spec.text] = chain_drafter(
            load_drafter(spec, weights),
            "whose chains hold no states to look into; diagnose takes checkpoints of the EAGLE-3 family and MTP heads: "
            "leave it out",
        )
    return found


# ---- where answers come from


def pack_source(config: RunConfig) -> Source:
    """Answers of a trace pack; no target is loaded.

    Raises:
        UserError: no such pack, or it lacks the suite or the clean condition.
    """
    assert config.traces is not None
    pack = TracePack(config.traces)
    chosen, _skipped = select(pack, replace(config, perturb=(CLEAN,)))
    entries = [e for e in chosen if e.condition.id == CLEAN and e.path == "free"]

    def traces(drafters: Sequence[Eagle3Drafter]) -> Iterator[Trace]:
        check_pack_taps(pack, drafters)
        taps = required_taps(drafters)
        return (pack.trace(entry.number, taps) for entry in entries)

    return Source(
        weights=pack.weights(pick_device(config.device)),
        taps_of=traces,
        decode=lambda ids: " ".join(map(str, ids)),
        num_answers=sum(e.turn == 0 for e in entries),
        description={"trace_pack": str(pack.path), "checksum": pack.checksum},
    )


def target_source(config: RunConfig) -> Source:
    """Answers that a target gives now.

    Raises:
        UserError: bad input.
    """
    tokenizer, _limit = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    chat = load_chat(tokenizer, config)
    prompts = load_prompts(config, chat)
    target = Target.load(
        config.target, device=config.device, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    (clean,) = resolve_conditions([CLEAN])

    def traces(drafters: Sequence[Eagle3Drafter]) -> Iterator[Trace]:
        answerer = Answerer(
            target,
            taps=required_taps(drafters),
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
        )
        texts: dict[str, list[str]] = {prompt.id: [] for prompt in prompts}
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            rendered: list[RenderedPrompt] = []
            for prompt in prompts:
                if len(prompt.turns) > turn and len(texts[prompt.id]) == turn:
                    rendered.append(render_turn(clean, prompt, turn, texts[prompt.id], chat, config.seed))
            for trace in answerer.answer(rendered):
                texts[trace.prompt.prompt_id].append(read_answer(tokenizer, trace.answer_ids))
                yield trace

    return Source(
        weights=target.weights(),
        taps_of=traces,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        num_answers=len(prompts),
        description={"target": target.info.name},
    )


def _groups(traces: Iterator[Trace]) -> Iterator[list[Trace]]:
    group: list[Trace] = []
    rows = 0
    for trace in traces:
        if len(trace.answer_ids) < 2:
            continue
        if group and (len(group) == _GROUP_TRACES or rows + len(trace.ids) > _GROUP_ROWS):
            yield group
            group, rows = [], 0
        group.append(trace)
        rows += len(trace.ids)
    if group:
        yield group


# ---- looking


_Table = tuple[str, list[dict[str, Any]]]
"""Name and rows."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one call saw."""

    tables: list[_Table]
    scores: PositionScores | None = None
    deviation: float = 0.0


class Job:
    """Looks at answers group by group and writes what it sees."""

    def __init__(
        self,
        drafters: Mapping[str, Eagle3Drafter],
        source: Source,
        measures: Measures,
        writer: DiagnosisWriter,
        seed: int,
    ) -> None:
        self.drafters, self.source, self.measures, self.writer, self.seed = (
            drafters,
            source,
            measures,
            writer,
            seed,
        )
        self.sinks: dict[str, SinkSearch] = {}
        self.deviation = 0.0
        self.prompts: set[str] = set()
        self.answers = 0
        self._drawn = False

    def take(self, group: Sequence[Trace]) -> None:
        """Look at a group of answers with every drafter."""
        self.answers += len(group)
        self.prompts.update(trace.prompt.prompt_id for trace in group)
        names, drafters = list(self.drafters), list(self.drafters.values())
        if not self.sinks:
            sinks = self._results([partial(find_sink, drafter, group) for drafter in drafters])
            self.sinks = dict(zip(names, sinks, strict=True))
        packed = self._results([partial(drafter.prepare, group) for drafter in drafters])
        packs = dict(zip(names, packed, strict=True))
        draws = [(path, draw) for path in ("hidden", "embed") for draw in range(self.measures.seeds)]
        noise = [partial(self._noise, path, draw, group, packs) for path, draw in draws]
        own = [partial(self._own, name, group, packs[name]) for name in packs]
        chains = [partial(self._chains, name, trace) for name in packs for trace in group]
        # the long ones first, so that no thread is left with one at the end
        found = self._run([*noise, *own, *chains])
        clean: dict[str, list[PositionScores]] = {}
        for i, name in enumerate(packs):
            mine = found[len(noise) + len(own) + i * len(group) :][: len(group)]
            clean[name] = [one.scores for one in mine if one.scores is not None]
            self._clean(name, group, clean[name])
        windows = [call for name in packs for call in self._window_calls(name, group, clean[name])]
        self._run([*windows, *self._drawing(group)])

    def _results(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        return run_all(calls, self.source.weights.embed.device)

    def _run(self, calls: Sequence[Callable[[], _Found]]) -> list[_Found]:
        """Return what the calls find, in their order, and write its rows."""
        found = self._results(calls)
        for one in found:
            self.deviation = max(self.deviation, one.deviation)
            for table, rows in one.tables:
                self.writer.add(table, rows)
        return found

    def _clean(self, name: str, group: Sequence[Trace], clean: Sequence[PositionScores]) -> None:
        rows = [
            self._acceptance(name, t, s, part=part, depth=depth)
            for part, depth in (("clean", self.measures.deep), ("base", self.measures.depth))
            for t, s in zip(group, clean, strict=True)
        ]
        self.writer.add("acceptance", rows)
        self._lengths(name, group, clean)

    # -- chains to full depth

    def _chains(self, name: str, trace: Trace) -> _Found:
        """Parts 1 to 3 and 5: full chains on target tokens, and with the state pinned."""
        m, drafter = self.measures, self.drafters[name]
        prepared = drafter.prepare([trace])
        watch = self._watch(name, drafter, trace)
        deep = ScoreRequest(depth=m.deep, full_chains=True)
        (scores,) = drafter.replay(prepared, deep, probe=watch)
        pinned = self._watch(name, drafter, trace)
        request = ScoreRequest(depth=m.depth, full_chains=True)
        (pin,) = drafter.replay(prepared, request, probe=pinned, perturb=Pin(len(trace.ids) - 1))
        tables = [
            *self._watch_rows(name, trace, watch, "plain"),
            ("depth", _forced_rows(self._keys(name, trace), "target", scores)),
            *self._watch_rows(name, trace, pinned, "pin"),
            ("acceptance", [self._acceptance(name, trace, pin, part="pin", depth=m.depth)]),
        ]
        return _Found(tables=tables, scores=scores, deviation=max(watch.deviation, pinned.deviation))

    def _own(self, name: str, group: Sequence[Trace], packs: Sequence[Prepared]) -> _Found:
        """Part 3 with the chains' own tokens."""
        request = ScoreRequest(depth=self.measures.deep, full_chains=True)
        drafter, scores = self.drafters[name], []
        for pack in packs:
            own = OwnTokens(drafter.model, len(pack.packed.inputs))
            scores += drafter.replay([pack], request, probe=own, perturb=own)
        pairs = zip(group, scores, strict=True)
        rows = [row for t, s in pairs for row in _forced_rows(self._keys(name, t), "own", s)]
        return _Found(tables=[("depth", rows)])

    def _watch(self, name: str, drafter: Eagle3Drafter, trace: Trace) -> Watch:
        sink = self.sinks[name].position
        return Watch(trace, taps=drafter.info.taps, sink=sink, depth=self.measures.depth)

    def _watch_rows(self, name: str, trace: Trace, watch: Watch, arm: str) -> list[_Table]:
        keys = self._keys(name, trace) | {"arm": arm}
        sizes = [
            keys | {"quantity": quantity, "step": step, "rms": float(size.mean()), "num_chains": len(size)}
            for quantity, steps in watch.sizes.items()
            for step, size in steps.items()
        ]
        means, heads = [], []
        for step, shares in watch.attention.items():
            for measure, share in shares.items():
                control = watch.control[step].get(measure)
                row = keys | {"step": step, "measure": measure, "num_chains": len(share)}
                means.append(row | _values(share.mean(), None if control is None else control.mean()))
                if self.measures.per_head and arm == "plain":
                    others = [None] * share.shape[1] if control is None else control.mean(0)
                    heads += [
                        row | _values(value, other) | {"head": head}
                        for head, (value, other) in enumerate(zip(share.mean(0), others, strict=True))
                    ]
        return [("magnitudes", sizes), ("attention", means), ("attention_heads", heads)]

    def _lengths(self, name: str, group: Sequence[Trace], scores: Sequence[PositionScores]) -> None:
        rows = []
        for trace, one in zip(group, scores, strict=True):
            found: dict[int, list[int]] = {}
            for r in walk_rounds(one, len(trace.answer_ids), self.measures.depth):
                position = trace.prompt_length + r.start
                bucket = next((i for i, high in enumerate(_BUCKETS) if position < high), len(_BUCKETS))
                sums = found.setdefault(bucket, [0, 0])
                sums[0] += 1
                sums[1] += r.num_accepted
            for bucket, (rounds, accepted) in found.items():
                low = _BUCKETS[bucket - 1] if bucket else 0
                high = _BUCKETS[bucket] if bucket < len(_BUCKETS) else 1 << 40
                rows.append(
                    self._keys(name, trace)
                    | {"low": low, "high": high, "rounds": rounds, "accepted": accepted}
                )
        self.writer.add("lengths", rows)

    # -- chains up to their first miss

    def _noise(
        self, path: str, draw: int, group: Sequence[Trace], packs: Mapping[str, Sequence[Prepared]]
    ) -> _Found:
        """Part 4: the same draws for every drafter and size."""
        m = self.measures
        num_rows = sum(len(trace.ids) - 1 for trace in group)
        digest = hashlib.sha256(repr((self.seed, draw, path, group[0].prompt.key)).encode()).digest()
        seed = int.from_bytes(digest[:8], "little") % (1 << 62)
        width = max(drafter.model.config.hidden_size for drafter in self.drafters.values())
        kept: dict[tuple[int, int], Tensor] | None = {}
        if 4 * m.depth * num_rows * width > _KEPT_BYTES:
            kept = None  # long answers to a wide target: drawn anew every time
        rows = []
        for alpha in m.alphas:
            for name, drafter in self.drafters.items():
                noise = GaussianNoise(path=path, alpha=alpha, seed=seed, num_rows=num_rows, kept=kept)
                scores = drafter.replay(packs[name], ScoreRequest(depth=m.depth), perturb=noise)
                setting: dict[str, Any] = {"path": path, "alpha": alpha, "seed": draw}
                rows += [
                    self._acceptance(
                        name, t, s, part="noise", arm=f"{path} {alpha:g}", depth=m.depth, **setting
                    )
                    for t, s in zip(group, scores, strict=True)
                ]
        return _Found(tables=[("acceptance", rows)])

    def _window_calls(
        self, name: str, group: Sequence[Trace], clean: Sequence[PositionScores]
    ) -> list[Callable[[], _Found]]:
        """Part 6, on the answers that are longer than the window; on others a window changes nothing."""
        drafter, m = self.drafters[name], self.measures
        if not isinstance(drafter.model, Eagle3Model) or not m.windows:
            return []  # MTP heads have no window to choose
        longest = [(t, s) for t, s in zip(group, clean, strict=True) if len(t.ids) > min(m.windows)]
        if any(drafter.model.config.windows):
            traces = [t for t, _ in longest]
            whole = _windowed(drafter, 0, "none", "absolute")
            (full,) = self._results([partial(whole.score, traces, ScoreRequest(depth=m.depth))])
            longest = list(zip(traces, full, strict=True))
        rows = [self._acceptance(name, t, s, part="window", arm="full", depth=m.depth) for t, s in longest]
        self.writer.add("acceptance", rows)
        return [
            partial(self._windows, name, window, [(t, s) for t, s in longest if len(t.ids) > window])
            for window in m.windows
        ]

    def _windows(self, name: str, window: int, answers: Sequence[tuple[Trace, PositionScores]]) -> _Found:
        """One window with every sink; ``answers`` come with their scores under full attention."""
        m, drafter, rows = self.measures, self.drafters[name], []
        with_system = [(t, s) for t, s in answers if system_span(t.prompt) is not None]
        # chains up to here end inside their first window: they are those of full attention
        idle = window - m.depth
        for sinks, able in ((("none", "bos", "first4"), answers), (("system",), with_system)):
            prepared = drafter.prepare([t for t, _ in able])
            for sink, positions in _placements(sinks):
                changed = _windowed(drafter, window, sink, positions)
                scores = changed.replay(prepared, ScoreRequest(depth=m.depth), beyond=idle)
                setting: dict[str, Any] = {"window": window, "sink": sink, "positions": positions}
                rows += [
                    self._acceptance(
                        name,
                        trace,
                        _from(idle + 1 - (trace.prompt_length - 1), one, full),
                        part="window",
                        arm=f"{window} {sink} {positions}",
                        depth=m.depth,
                        **setting,
                    )
                    for (trace, full), one in zip(able, scores, strict=True)
                ]
        return _Found(tables=[("acceptance", rows)])

    # -- rows

    def _keys(self, name: str, trace: Trace) -> dict[str, Any]:
        prompt = trace.prompt
        return {"drafter": name, "suite": prompt.suite, "prompt_id": prompt.prompt_id, "turn": prompt.turn}

    def _acceptance(
        self,
        name: str,
        trace: Trace,
        scores: PositionScores,
        *,
        part: str,
        depth: int,
        arm: str = "",
        path: str = "",
        alpha: float = 0.0,
        seed: int = 0,
        window: int = 0,
        sink: str = "none",
        positions: str = "absolute",
    ) -> dict[str, Any]:
        counts = [r.num_accepted for r in walk_rounds(scores, len(trace.answer_ids), depth)]
        return self._keys(name, trace) | {
            "part": part,
            "arm": arm or part,
            "path": path,
            "alpha": alpha,
            "seed": seed,
            "window": window,
            "sink": sink,
            "positions": positions,
            "length": len(trace.ids),
            "at_least": [sum(c >= i for c in counts) for i in range(depth + 1)],
        }

    def _drawing(self, group: Sequence[Trace]) -> list[Callable[[], _Found]]:
        """Keep one chain of the first answer that is long enough to show one and short enough to draw."""
        depth = self.measures.depth
        fit = (t for t in group if depth + 8 < len(t.answer_ids) and len(t.ids) <= _CHAIN_ROWS)
        trace = next(fit, None)
        if self._drawn or trace is None:
            return []
        self._drawn = True
        row = (
            trace.prompt_length
            - 1
            + min(len(trace.answer_ids) - depth - 2, max(8, len(trace.answer_ids) // 2))
        )
        return [partial(self._draw, name, trace, row) for name in self.drafters]

    def _draw(self, name: str, trace: Trace, row: int) -> _Found:
        drafter, depth = self.drafters[name], self.measures.depth
        chain = Chain(trace, row, depth)
        drafter.score([trace], ScoreRequest(depth=depth, full_chains=True), probe=chain)
        watch = self._watch(name, drafter, trace)
        rows = []
        for step, mass in enumerate(chain.mass, start=1):
            for position, value in enumerate(mass.tolist()):
                region = PREFIX_REGIONS[int(watch.labels[position])] if position <= row else "own"
                if position == row + step - 1:
                    region = "self"
                rows.append(
                    {
                        "drafter": name,
                        "prompt_id": trace.prompt.prompt_id,
                        "row": row,
                        "step": step,
                        "position": position,
                        "region": region,
                        "token": self.source.decode([trace.ids[position]]),
                        "mass": value,
                    }
                )
        return _Found(tables=[("chain", rows)])


def run_all(calls: Sequence[Callable[[], _T]], device: torch.device) -> list[_T]:
    """Return the calls' results: on a CPU, each call on one of as many threads as torch has, else in turn.

    Single replays are too small to share: most of their steps have few rows, and threads that share one wait for each
    other, spinning, where cores are busy.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1:
        return [call() for call in calls]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda call: call(), calls))
    finally:
        # what threads that start later get
        torch.set_num_threads(threads)


def _placements(sinks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every (sink, positions) that makes sense: without a sink there is nothing to re-pack."""
    for sink in sinks:
        for positions in ("absolute", "repacked") if sink != "none" else ("absolute",):
            yield sink, positions


def _windowed(drafter: Eagle3Drafter, window: int, sink: str, positions: str) -> Eagle3Drafter:
    """Return a drafter of the same weights that looks through a window; 0: through none."""
    changed, model = copy.copy(drafter), copy.copy(drafter.model)
    changes: dict[str, Any] = {"sink": sink, "positions": positions}
    changes["windows"] = (window,) * model.config.num_layers if window else ()
    # the weights stay shared
    model.config = replace(model.config, **changes)
    changed.model = model
    return changed


def _from(start: int, scores: PositionScores, before: PositionScores) -> PositionScores:
    """Return ``scores`` from round start ``start`` on, and what ``before`` says up to there."""
    head = before.accepted[: max(0, start)].clamp(max=scores.depth)
    return replace(scores, accepted=torch.cat((head, scores.accepted[len(head) :])))


def find_sink(drafter: Eagle3Drafter, traces: Sequence[Trace]) -> SinkSearch:
    """Return where prefill queries look most, from a few answers."""
    search = SinkSearch()
    for trace in traces:
        search.prepare(trace)
        drafter.score([trace], ScoreRequest(depth=1), probe=search)
    return search


def _values(value: Tensor, control: Tensor | None) -> dict[str, float | None]:
    return {"value": float(value), "control": None if control is None else float(control)}


def _forced_rows(keys: Mapping[str, Any], feeding: str, scores: PositionScores) -> list[dict[str, Any]]:
    assert scores.forced is not None
    positions, hits = (scores.forced >= 0).sum(0).tolist(), (scores.forced == 1).sum(0).tolist()
    return [
        {**keys, "feeding": feeding, "step": i + 1, "positions": positions[i], "hits": hits[i]}
        for i in range(scores.depth)
        if positions[i]
    ]


def _record(config: RunConfig, measures: Measures, source: Source, job: Job) -> dict[str, Any]:
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config.to_json(),
        "measures": asdict(measures),
        "versions": package_versions(),
        "target": asdict(source.weights.info),
        "source": dict(source.description),
        "num_prompts": len(job.prompts),
        "num_answers": job.answers,
        "largest_deviation": job.deviation,
        "drafters": [
            {
                "name": name,
                "fingerprint": drafter.info.fingerprint,
                "settings": dict(drafter.info.settings),
                "trained_depth": drafter.info.trained_depth,
                "max_positions": drafter.info.max_positions,
                "num_parameters": drafter.info.num_parameters,
                "taps": list(drafter.info.taps),
                "notes": list(drafter.info.notes),
                "sink": {
                    "position": job.sinks[name].position,
                    "share": job.sinks[name].share,
                    "found": job.sinks[name].found,
                },
            }
            for name, drafter in job.drafters.items()
        ],
    }
