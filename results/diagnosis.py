"""From the tables of a diagnosis to numbers with intervals: drift scores, rates, retentions.

Prompts are the unit everywhere: shares and sizes are means over heads, then chains, then prompts; rates are ratios of
sums over prompts; intervals come from resampling prompts within their suite.

Drift scores are differences over depth, never levels (arXiv 2605.09992 and its notes):

* growth g = RMS_k / RMS_1, and the slope of log RMS per step, of the raw residual and of what is fed back;
* D_sink = sink(1) - sink(k); D_recent_w = recent_w(k) - recent_w(1);
* net of position: the same differences against step-1 queries at the same positions.

Example:
    summary = summarise(Path("diag"))
    summary.drift["zoo:eagle3"]["D_sink"]     # Value(value=0.21, low=0.17, high=0.25)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import UserError
from specbench.results.diagnosis_store import read_record, read_table
from specbench.results.statistics import Floats, Plan, estimate
from specbench.results.sums import conditional_rates

RECENT = (1, 4, 8)
_FEW = 20
"""Rates over fewer rounds or chains than this are left out of figures."""

Prompt = tuple[str, str]
"""(suite, prompt id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number with its 95 % interval; NaN where prompts are too few for one."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is a number at all."""
        return bool(np.isfinite(self.value))

    def above(self, level: float) -> bool:
        """Whether the whole interval is above."""
        return bool(self.low > level)

    def below(self, level: float) -> bool:
        """Whether the whole interval is below."""
        return bool(self.high < level)

    def text(self, digits: int = 2, sign: bool = False) -> str:
        """Return ``1.20 [1.05, 1.36]``."""
        form = f"{'+' if sign else ''}.{digits}f"
        if not np.isfinite(self.low):
            return f"{self.value:{form}}"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(slots=True, kw_only=True)
class Summary:
    """Everything the figures and the report show; the lists are flat rows, written beside the figures."""

    record: dict[str, Any]
    accepted: dict[str, Value] = field(default_factory=dict)
    """drafter -> accepted_per_round at the diagnosis's k."""
    drift: dict[str, dict[str, Value]] = field(default_factory=dict)
    """drafter -> score -> value; scores of the pinned arm begin with ``pin:``."""
    pin: dict[str, Value] = field(default_factory=dict)
    """drafter -> relative change of accepted_per_round under the pin."""
    norms: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)
    noise: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    chain: list[dict[str, Any]] = field(default_factory=list)
    contrasts: list[dict[str, Any]] = field(default_factory=list)
    """Paired differences, post-norm minus pre-norm, of growth, D_sink and retention under noise."""

    @property
    def drafters(self) -> list[str]:
        """Names, in the order of the command."""
        return [d["name"] for d in self.record["drafters"]]

    def facts(self, drafter: str) -> dict[str, Any]:
        """Settings and sink of a drafter."""
        return next(d for d in self.record["drafters"] if d["name"] == drafter)

    @property
    def depth(self) -> int:
        """Draft tokens per round of the acceptance numbers."""
        return int(self.record["measures"]["depth"])


def summarise(out: Path, *, draws: int = 10_000) -> Summary:
    """Read the tables of a diagnosis and compute everything that is shown.

    Args:
        out: the diagnosis's directory.
        draws: resamples of the prompts.

    Raises:
        UserError: there is no finished diagnosis.
    """
    summary = Summary(record=read_record(out))
    resample = _Resample(int(summary.record["config"]["seed"]), draws)
    sums = _acceptance_sums(out)
    _acceptance(summary, sums, resample)
    sizes = _norms(summary, out, resample)
    sinks = _shares(summary, out, resample)
    _contrasts(summary, sums, sizes, sinks, resample)
    _forced(summary, out, resample)
    _lengths(summary, out, resample)
    summary.chain = read_table(out, "chain").to_pylist()
    if not summary.accepted:
        raise UserError(f"the diagnosis in {out} holds no rounds; run it again with more prompts")
    return summary


# ---- intervals


@dataclass(frozen=True, slots=True)
class _Resample:
    seed: int
    draws: int

    def values(
        self, by_prompt: Mapping[Prompt, Sequence[float]], statistic: Callable[[Floats], Floats]
    ) -> list[Value]:
        """Estimate statistics of per-prompt sums."""
        prompts = sorted(by_prompt)
        sums = np.array([by_prompt[p] for p in prompts], np.float64)
        _names, counts = np.unique([suite for suite, _ in prompts], return_counts=True)
        plan = Plan(strata=tuple(int(n) for n in counts), draws=self.draws, seed=self.seed)
        found = estimate(sums, statistic, plan)
        return [
            Value(value=float(v), low=float(a), high=float(b))
            for v, a, b in zip(found.value, found.low, found.high, strict=True)
        ]

    def mean(
        self, by_prompt: Mapping[Prompt, Sequence[float]], of: Callable[[Floats], Floats] = lambda m: m
    ) -> list[Value]:
        """Estimate functions of the means over prompts of per-prompt values."""
        counted = {p: (*values, 1.0) for p, values in by_prompt.items()}
        return self.values(counted, lambda s: of(s[..., :-1] / s[..., -1:]))


NOTHING = Value(value=float("nan"), low=float("nan"), high=float("nan"))


def _row(keys: Mapping[str, Any], value: Value) -> dict[str, Any]:
    return {**keys, "value": value.value, "low": value.low, "high": value.high}


# ---- acceptance, noise, pin, windows


def _acceptance_sums(out: Path) -> dict[str, dict[tuple[Any, ...], dict[Prompt, Floats]]]:
    """Return part -> (drafter, arm keys) -> prompt -> rounds with at least i accepted tokens."""
    found: dict[str, dict[tuple[Any, ...], dict[Prompt, Floats]]] = defaultdict(lambda: defaultdict(dict))
    keys = {"noise": ("path", "alpha"), "window": ("window", "sink", "positions")}
    for row in read_table(out, "acceptance").to_pylist():
        group = found[row["part"]][(row["drafter"], *(row[k] for k in keys.get(row["part"], ())))]
        prompt = (row["suite"], row["prompt_id"])
        sums = np.array(row["at_least"], np.float64)
        group[prompt] = group[prompt] + sums if prompt in group else sums
    return found


def _per_round(sums: Floats) -> Floats:
    accepted: Floats = sums[..., 1:].sum(-1, keepdims=True) / sums[..., :1]
    return accepted


def _ratio(
    resample: _Resample, arm: Mapping[Prompt, Floats], base: Mapping[Prompt, Floats]
) -> tuple[Value, Value]:
    """Return accepted per round of an arm, and relative to the base over the prompts of both."""
    shared = [p for p in arm if p in base]
    if not shared:
        return NOTHING, NOTHING
    width = len(arm[shared[0]])
    joined = {p: [*arm[p], *base[p]] for p in shared}
    own, ratio = resample.values(
        joined,
        lambda s: np.concatenate(
            [_per_round(s[..., :width]), _per_round(s[..., :width]) / _per_round(s[..., width:])], axis=-1
        ),
    )
    return own, ratio


def _acceptance(
    summary: Summary,
    sums: Mapping[str, Mapping[tuple[Any, ...], Mapping[Prompt, Floats]]],
    resample: _Resample,
) -> None:
    for name in summary.drafters:
        base = sums["base"][(name,)]
        (summary.accepted[name],) = resample.values({p: list(v) for p, v in base.items()}, _per_round)
        deep = {p: list(v) for p, v in sums["clean"][(name,)].items()}
        reached = np.sum(list(deep.values()), axis=0)
        for step, value in enumerate(resample.values(deep, conditional_rates), start=1):
            if reached[step - 1] >= _FEW and value.known:
                keys = {"drafter": name, "feeding": "rounds", "step": step, "count": int(reached[step - 1])}
                summary.rates.append(_row(keys, value))
        pinned = sums.get("pin", {}).get((name,))
        if pinned:
            ratio = _ratio(resample, pinned, base)[1]
            summary.pin[name] = Value(value=ratio.value - 1, low=ratio.low - 1, high=ratio.high - 1)
    for (name, path, alpha), arm in sums.get("noise", {}).items():
        own, ratio = _ratio(resample, arm, sums["base"][(name,)])
        keys = {"drafter": name, "path": path, "alpha": alpha, "accepted_per_round": own.value}
        summary.noise.append(_row(keys, ratio))
    summary.noise.sort(key=lambda r: (summary.drafters.index(r["drafter"]), r["path"], r["alpha"]))
    for (name, window, sink, positions), arm in sums.get("window", {}).items():
        # an arm holds the answers longer than its window; the full arm those longer than the smallest
        own, ratio = _ratio(resample, arm, sums["window"].get((name, 0, "none", "absolute"), {}))
        keys = {
            "drafter": name,
            "window": window,
            "sink": sink,
            "positions": positions,
            "num_prompts": len(arm),
            "relative_to_full": ratio.value,
        }
        summary.windows.append(_row(keys, own))
    order = ("none", "bos", "first4", "system")
    summary.windows.sort(
        key=lambda r: (
            summary.drafters.index(r["drafter"]),
            r["window"],
            order.index(r["sink"]),
            r["positions"],
        )
    )


# ---- sizes and attention


def _per_prompt(
    rows: Iterable[Mapping[str, Any]], keys: Sequence[str], value: str
) -> dict[tuple[Any, ...], dict[Prompt, float]]:
    """Return keys -> prompt -> mean over its turns, weighted by chains."""
    sums: dict[tuple[Any, ...], dict[Prompt, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0, 0.0])
    )
    for row in rows:
        if row[value] is None:
            continue
        cell = sums[tuple(row[k] for k in keys)][(row["suite"], row["prompt_id"])]
        cell[0] += row[value] * row["num_chains"]
        cell[1] += row["num_chains"]
    return {k: {p: a / n for p, (a, n) in prompts.items()} for k, prompts in sums.items()}


def _norms(summary: Summary, out: Path, resample: _Resample) -> dict[str, dict[Prompt, list[float]]]:
    """Fill ``norms`` and the scores of sizes; return drafter -> prompt -> RMS fed back at steps 1..k."""
    rows = read_table(out, "magnitudes").to_pylist()
    cells = _per_prompt(rows, ("drafter", "arm", "quantity", "step"), "rms")
    series: dict[tuple[str, str, str], dict[int, dict[Prompt, float]]] = defaultdict(dict)
    for (name, arm, quantity, step), prompts in cells.items():
        series[name, arm, quantity][step] = prompts
        (value,) = resample.mean({p: [v] for p, v in prompts.items()})
        keys = {"drafter": name, "arm": arm, "quantity": quantity, "step": step}
        summary.norms.append(_row(keys, value))
    fed_back: dict[str, dict[Prompt, list[float]]] = {}
    for (name, arm, quantity), steps in series.items():
        if quantity not in ("raw", "fed_back") or summary.depth not in steps:
            continue
        prefix = "" if arm == "plain" else "pin:"
        scores = summary.drift.setdefault(name, {})
        wanted = range(1, summary.depth + 1)
        whole = _common([steps[i] for i in wanted])
        if not whole:
            continue
        if (arm, quantity) == ("plain", "fed_back"):
            fed_back[name] = whole
        growth, slope = resample.mean(whole, lambda m: np.stack([m[..., -1] / m[..., 0], _slope(m)], axis=-1))
        scores[f"{prefix}growth_{quantity}"] = growth
        scores[f"{prefix}slope_{quantity}"] = slope
    return fed_back


def _slope(means: Floats) -> Floats:
    """Least-squares slope of log RMS against the step; means [..., k]."""
    steps = np.arange(means.shape[-1]) - (means.shape[-1] - 1) / 2
    slope: Floats = (np.log(means) * steps).sum(-1) / (steps**2).sum()
    return slope


def _common(columns: Sequence[Mapping[Prompt, float]]) -> dict[Prompt, list[float]]:
    """Return the prompts that every column has, with their values."""
    shared = set(columns[0]).intersection(*columns[1:])
    return {p: [c[p] for c in columns] for p in shared}


def _shares(summary: Summary, out: Path, resample: _Resample) -> dict[str, dict[Prompt, list[float]]]:
    """Fill ``shares`` and the scores of attention; return drafter -> prompt -> sink shares at steps 1 and k."""
    rows = read_table(out, "attention").to_pylist()
    keys = ("drafter", "arm", "measure", "step")
    cells, controls = _per_prompt(rows, keys, "value"), _per_prompt(rows, keys, "control")
    for (name, arm, measure, step), prompts in cells.items():
        (value,) = resample.mean({p: [v] for p, v in prompts.items()})
        other = controls.get((name, arm, measure, step), {})
        row = _row({"drafter": name, "arm": arm, "measure": measure, "step": step}, value)
        summary.shares.append(row | {"control": float(np.mean(list(other.values()))) if other else None})
    for name in summary.drafters:
        for arm, prefix in (("plain", ""), ("pin", "pin:")):
            measures = ("sink", *(f"recent_{w}" for w in RECENT), "entropy")
            for measure in measures:
                first = cells.get((name, arm, measure, 1))
                last = cells.get((name, arm, measure, summary.depth))
                if not first or not last:
                    continue
                control = controls.get((name, arm, measure, summary.depth), {})
                _drift(summary.drift.setdefault(name, {}), prefix, measure, first, last, control, resample)
    steps = (1, summary.depth)
    return {
        name: _common([cells.get((name, "plain", "sink", i), {}) for i in steps]) for name in summary.drafters
    }


def _drift(
    scores: dict[str, Value],
    prefix: str,
    measure: str,
    first: Mapping[Prompt, float],
    last: Mapping[Prompt, float],
    control: Mapping[Prompt, float],
    resample: _Resample,
) -> None:
    # the paper's sign: positive is away from the sink, towards what is recent
    sign = -1.0 if measure == "sink" else 1.0
    pair = _common([first, last])
    if pair:
        (scores[f"{prefix}D_{measure}"],) = resample.mean(pair, lambda m: sign * (m[..., 1:2] - m[..., :1]))
    net = _common([control, last]) if control else {}
    if net:
        found = resample.mean(net, lambda m: sign * (m[..., 1:2] - m[..., :1]))
        (scores[f"{prefix}D_{measure}_net"],) = found


def noise_level(summary: Summary) -> float | None:
    """Return the noise that drafters are compared at: alpha 0.5 where it was measured, else the middle one."""
    alphas = sorted({row["alpha"] for row in summary.noise})
    if not alphas:
        return None
    return 0.5 if 0.5 in alphas else float(alphas[len(alphas) // 2])


def _contrasts(
    summary: Summary,
    sums: Mapping[str, Mapping[tuple[Any, ...], Mapping[Prompt, Floats]]],
    sizes: Mapping[str, Mapping[Prompt, list[float]]],
    sinks: Mapping[str, Mapping[Prompt, list[float]]],
    resample: _Resample,
) -> None:
    """Compare every post-norm drafter with every pre-norm one, prompt by prompt."""
    feedback = {name: summary.facts(name)["settings"]["feedback"] for name in summary.drafters}
    alpha = noise_level(summary)
    for pre in (n for n, f in feedback.items() if f == "pre"):
        for post in (n for n, f in feedback.items() if f == "post"):
            keys = {"pre": pre, "post": post}

            def growth(m: Floats) -> Floats:
                ours, theirs = np.split(m, 2, axis=-1)
                return (ours[..., -1:] / ours[..., :1]) - (theirs[..., -1:] / theirs[..., :1])

            def left_sink(m: Floats) -> Floats:
                return (m[..., 0:1] - m[..., 1:2]) - (m[..., 2:3] - m[..., 3:4])

            for score, cells, of in (("growth", sizes, growth), ("D_sink", sinks, left_sink)):
                ours, theirs = cells.get(post, {}), cells.get(pre, {})
                joined = {p: [*ours[p], *theirs[p]] for p in ours if p in theirs}
                if joined:
                    summary.contrasts.append(_row({**keys, "score": score}, resample.mean(joined, of)[0]))
            if alpha is None:
                continue
            arms = [
                side
                for name in (post, pre)
                for side in (sums["noise"][name, "hidden", alpha], sums["base"][(name,)])
            ]
            width = len(next(iter(arms[0].values())))

            def retained(s: Floats, width: int = width) -> Floats:
                noisy, clean, other_noisy, other = (
                    _per_round(s[..., i * width : (i + 1) * width]) for i in range(4)
                )
                return noisy / clean - other_noisy / other

            shared = set(arms[0]).intersection(*arms[1:])
            if shared:
                values = resample.values({p: [x for arm in arms for x in arm[p]] for p in shared}, retained)
                summary.contrasts.append(_row({**keys, "score": f"retention_hidden_{alpha:g}"}, values[0]))


# ---- depth and length


def _forced(summary: Summary, out: Path, resample: _Resample) -> None:
    sums: dict[tuple[str, str, int], dict[Prompt, list[float]]] = defaultdict(dict)
    for row in read_table(out, "depth").to_pylist():
        cell = sums[row["drafter"], row["feeding"], row["step"]].setdefault(
            (row["suite"], row["prompt_id"]), [0.0, 0.0]
        )
        cell[0] += row["positions"]
        cell[1] += row["hits"]
    for (name, feeding, step), prompts in sorted(sums.items(), key=lambda item: item[0]):
        count = int(sum(v[0] for v in prompts.values()))
        if count >= _FEW:
            (value,) = resample.values(prompts, lambda s: s[..., 1:] / s[..., :1])
            keys = {"drafter": name, "feeding": feeding, "step": step, "count": count}
            summary.rates.append(_row(keys, value))


def _lengths(summary: Summary, out: Path, resample: _Resample) -> None:
    sums: dict[tuple[str, int, int], dict[Prompt, list[float]]] = defaultdict(dict)
    for row in read_table(out, "lengths").to_pylist():
        cell = sums[row["drafter"], row["low"], row["high"]].setdefault(
            (row["suite"], row["prompt_id"]), [0.0, 0.0]
        )
        cell[0] += row["rounds"]
        cell[1] += row["accepted"]
    for (name, low, high), prompts in sorted(sums.items(), key=lambda item: item[0]):
        count = int(sum(v[0] for v in prompts.values()))
        (value,) = resample.values(prompts, lambda s: s[..., 1:] / s[..., :1])
        keys = {"drafter": name, "from": low, "to": high, "rounds": count, "num_prompts": len(prompts)}
        summary.lengths.append(_row(keys, value))
