"""Figures of a diagnosis, each with its data beside it.

Colours are Okabe and Ito's, lines differ in marker and dash too, the heat map's scale is even in grey: readable in a
black-and-white print and by colour-blind readers.

Example:
    draw(summary, Path("diag/figures"))     # [Figure(name="shares", ...), ...], files .svg, .png, .csv
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import UserError
from specbench.results.diagnosis import Summary
from specbench.results.plots import COLOURS, DASHES, MARKERS
from specbench.results.text import csv_text

_SHOWN = {"sink": "sink", "recent_8": "last 8 positions", "drafted": "drafted in this chain"}
_SHORT = {
    "sink": "S",
    "system": "system",
    "markup": "mk",
    "user": "user",
    "context": "context",
    "answer": "answer",
    "own": "chain",
    "self": "chain",
}
_FLOOR = 1e-4
"""Smallest share that the heat map tells apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One drawn figure."""

    name: str
    title: str
    caption: str
    rows: Sequence[dict[str, Any]]
    """Its data, as in the CSV."""


def draw(summary: Summary, folder: Path) -> list[Figure]:
    """Draw every figure there is data for: NAME.svg, NAME.png and NAME.csv.

    Raises:
        UserError: the folder cannot be written.
    """
    makers: Sequence[tuple[Figure, Callable[[Summary], Any]]] = (
        (_figure_of("chain", summary.chain, _CHAIN_TITLE, _CHAIN), _draw_chain),
        (_figure_of("shares", drafted_shares(summary), _SHARES_TITLE, _SHARES), _draw_shares),
        (_figure_of("norms", summary.norms, _NORMS_TITLE, _NORMS), _draw_norms),
        (_figure_of("rates", summary.rates, _RATES_TITLE, _RATES), _draw_rates),
        (_figure_of("noise", summary.noise, _NOISE_TITLE, _NOISE), _draw_noise),
        (_figure_of("lengths", summary.lengths, _LENGTHS_TITLE, _LENGTHS), _draw_lengths),
        (_figure_of("windows", summary.windows, _WINDOWS_TITLE, _WINDOWS), _draw_windows),
    )
    drawn = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure, maker in makers:
            if not figure.rows:
                continue
            canvas = maker(summary)
            canvas.savefig(folder / f"{figure.name}.svg", metadata={"Date": None})
            canvas.savefig(folder / f"{figure.name}.png", dpi=130)
            names = list(figure.rows[0])
            text = csv_text(names, [[_cell(row[n]) for n in names] for row in figure.rows])
            (folder / f"{figure.name}.csv").write_text(text, encoding="utf-8")
            drawn.append(figure)
    except OSError as error:
        raise UserError(f"cannot write figures to {folder}: {error.strerror or error}") from error
    return drawn


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _figure_of(name: str, rows: Sequence[dict[str, Any]], title: str, caption: str) -> Figure:
    return Figure(name=name, title=title, caption=caption, rows=rows)


_CHAIN_TITLE = "Where one chain looks"
_CHAIN = (
    "Rows are draft steps, columns positions of one answer; the darker, the smaller the share of attention (mean over "
    "heads, logarithmic). The strip above marks regions; S is the sink, and the staircase at the right is what the "
    "chain itself has made."
)
_SHARES_TITLE = "Attention by region against depth"
_SHARES = (
    "Share of attention at each draft step, mean over heads, chains and prompts, with 95 % intervals over prompts. "
    "Thin grey lines: step-1 queries at the same positions, which see as many positions, none of them drafted."
)
_NORMS_TITLE = "Size of the state against depth"
_NORMS = (
    "RMS of the raw residual (solid, filled) and of what is fed back (dashed, hollow), logarithmic. Left of step 1: "
    "the fused input."
)
_RATES_TITLE = "Conditional acceptance and forced chains"
_RATES = (
    "Left: conditional rate of real rounds, which only the survivors of earlier steps enter. Middle and right: chains "
    "at every position that go on whatever they proposed, fed with the target's tokens or with their own. Bands are "
    "95 % intervals over prompts; the dotted lines mark the depth of training."
)
_NOISE_TITLE = "Retention under noise"
_NOISE = (
    "Accepted tokens per round with Gaussian noise of alpha times each state's RMS on one input path at every step, "
    "relative to none; 95 % intervals over prompts."
)
_LENGTHS_TITLE = "Acceptance against position"
_LENGTHS = (
    "Accepted tokens per round by the position at which the round starts; 95 % intervals over prompts. The dotted line "
    "is the number of positions a drafter declares, where it lies in the range."
)
_WINDOWS_TITLE = "Acceptance under attention windows"
_WINDOWS = (
    "Accepted tokens per round on answers longer than the window, with and without positions that stay visible; "
    "the black line is full attention on the answers longer than the smallest window."
)


def _panels(count: int, width: float = 4.2, height: float = 3.4, rows: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure and ``count`` axes side by side, without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    columns = -(-count // rows)
    canvas = Canvas(figsize=(max(5.0, width * columns), height * rows), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
    return canvas, axes


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "markersize": 4.5,
        "linewidth": 1.5,
    }


def _line(axis: Any, rows: Sequence[dict[str, Any]], x: str, label: str, style: dict[str, Any]) -> None:
    if not rows:
        return
    places = [row[x] for row in rows]
    value, low, high = (np.array([row[k] for row in rows], float) for k in ("value", "low", "high"))
    axis.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.plot(places, value, label=label, **style)


def _whole_steps(axis: Any) -> None:
    axis.xaxis.get_major_locator().set_params(integer=True)


def drafted_shares(summary: Summary) -> list[dict[str, Any]]:
    """Return the share rows, with ``drafted`` (own + self from step 2 on) added."""
    rows = list(summary.shares)
    index = {(r["drafter"], r["arm"], r["measure"], r["step"]): r for r in rows}
    for (name, arm, measure, step), row in list(index.items()):
        if measure != "own":
            continue
        self_row = index[name, arm, "self", step]
        made = 0.0 if step == 1 else 1.0
        found = {"drafter": name, "arm": arm, "measure": "drafted", "step": step}
        found["value"] = made * (row["value"] + self_row["value"])
        # the sum's interval is not the intervals' sum
        found |= {"low": float("nan"), "high": float("nan")}
        both = row["control"] is not None and self_row["control"] is not None
        found["control"] = made * (row["control"] + self_row["control"]) if both else None
        rows.append(found)
    return rows


def _draw_shares(summary: Summary) -> Any:
    canvas, axes = _panels(len(summary.drafters))
    shares = drafted_shares(summary)
    for axis, name in zip(axes, summary.drafters, strict=True):
        for index, (measure, label) in enumerate(_SHOWN.items()):
            rows = [r for r in shares if (r["drafter"], r["arm"], r["measure"]) == (name, "plain", measure)]
            rows.sort(key=lambda r: r["step"])
            _line(axis, rows, "step", label, _style(index + 1))
            known = [r for r in rows if r["control"] is not None]
            style = _style(index + 1) | {"color": "#777777", "linewidth": 0.8, "markersize": 3}
            axis.plot([r["step"] for r in known], [r["control"] for r in known], **style)
        sink = summary.facts(name)["sink"]
        where = f"sink: position {sink['position']}" if sink["found"] else "no sink found"
        axis.set(title=f"{name}\n{where}", xlabel="draft step", ylabel="share of attention", ylim=(0, None))
        axis.title.set_fontsize(9)
        _whole_steps(axis)
    axes[0].legend(frameon=False, fontsize=8)
    return canvas


def _draw_norms(summary: Summary) -> Any:
    canvas, (axis,) = _panels(1, width=6.4, height=4.0)
    for index, name in enumerate(summary.drafters):
        style = _style(index)
        for quantity, change in (
            ("raw", {"linestyle": "-"}),
            ("fed_back", {"linestyle": "--", "markerfacecolor": "white"}),
        ):
            rows = [
                r
                for r in summary.norms
                if (r["drafter"], r["arm"], r["quantity"]) == (name, "plain", quantity)
            ]
            rows.sort(key=lambda r: r["step"])
            words = {"raw": "raw residual", "fed_back": "fed back"}[quantity]
            _line(axis, rows, "step", f"{name}, {words}", style | change)
        fused = next(
            r for r in summary.norms if (r["drafter"], r["arm"], r["quantity"]) == (name, "plain", "fused")
        )
        point = {k: style[k] for k in ("color", "marker", "markersize")}
        axis.plot([0.4], [fused["value"]], **point)
    axis.axvline(0.7, color="#BBBBBB", linewidth=0.6)
    axis.set(xlabel="draft step (left: fused input)", ylabel="RMS", yscale="log")
    _whole_steps(axis)
    axis.legend(frameon=False, fontsize=8)
    return canvas


def _draw_rates(summary: Summary) -> Any:
    kinds = {"rounds": "rounds (conditional)", "target": "target's tokens", "own": "own tokens"}
    canvas, axes = _panels(len(kinds), width=3.7)
    for axis, (feeding, title) in zip(axes, kinds.items(), strict=True):
        for index, name in enumerate(summary.drafters):
            rows = [r for r in summary.rates if (r["drafter"], r["feeding"]) == (name, feeding)]
            rows.sort(key=lambda r: r["step"])
            _line(axis, rows, "step", name, _style(index))
            trained = summary.facts(name)["trained_depth"]
            if trained:
                axis.axvline(
                    trained + 0.08 * index, color=COLOURS[index % len(COLOURS)], linestyle=":", linewidth=1
                )
        label = "conditional rate" if feeding == "rounds" else "share of chains that are right"
        deep = summary.record["measures"]["deep"]
        axis.set(title=title, xlabel="draft step", ylabel=label, ylim=(0, 1.02), xlim=(0.5, deep + 0.5))
        _whole_steps(axis)
    axes[0].legend(frameon=False, fontsize=7)
    return canvas


def _draw_noise(summary: Summary) -> Any:
    paths = {"hidden": "on the hidden state", "embed": "on the embedding"}
    canvas, axes = _panels(len(paths))
    for axis, (path, title) in zip(axes, paths.items(), strict=True):
        for index, name in enumerate(summary.drafters):
            rows = [r for r in summary.noise if (r["drafter"], r["path"]) == (name, path)]
            clean = {"alpha": 0.0, "value": 1.0, "low": 1.0, "high": 1.0}
            _line(axis, [clean, *rows], "alpha", name, _style(index))
        axis.set(title=title, xlabel="alpha", ylabel="retention", ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    return canvas


def _draw_lengths(summary: Summary) -> Any:
    canvas, (axis,) = _panels(1, width=6.4, height=3.8)
    edges = sorted({(r["from"], r["to"]) for r in summary.lengths})
    for index, name in enumerate(summary.drafters):
        rows = [r for r in summary.lengths if r["drafter"] == name]
        shift = (index - (len(summary.drafters) - 1) / 2) * 0.12
        places = [edges.index((r["from"], r["to"])) + shift for r in rows]
        value, low, high = (np.array([r[k] for r in rows], float) for k in ("value", "low", "high"))
        spread = np.nan_to_num(np.stack([value - low, high - value])).clip(min=0)
        axis.errorbar(places, value, yerr=spread, label=name, capsize=2, **_style(index))
        limit = summary.facts(name)["max_positions"]
        inside = [i for i, (a, b) in enumerate(edges) if limit is not None and a <= limit < b]
        if inside:
            start, end = edges[inside[0]]
            place = inside[0] - 0.5 + (limit - start) / (end - start)
            axis.axvline(place, color=COLOURS[index % len(COLOURS)], linestyle=":", linewidth=1)
    labels = [f"{a}–{b}" if b < 1 << 40 else f"{a}+" for a, b in edges]
    axis.set_xticks(range(len(edges)), labels)
    axis.set(xlabel="position at which the round starts", ylabel="accepted per round", ylim=(0, None))
    axis.set_xlim(-0.5, max(1, len(edges) - 1) + 0.5)
    axis.legend(frameon=False, fontsize=8)
    return canvas


def _draw_windows(summary: Summary) -> Any:
    canvas, axes = _panels(len(summary.drafters))
    kinds = sorted({(r["sink"], r["positions"]) for r in summary.windows if r["window"]})
    sizes = sorted({r["window"] for r in summary.windows if r["window"]})
    for axis, name in zip(axes, summary.drafters, strict=True):
        own = [r for r in summary.windows if r["drafter"] == name]
        for index, (sink, positions) in enumerate(kinds):
            rows = [r for r in own if r["window"] and (r["sink"], r["positions"]) == (sink, positions)]
            placed = [r | {"place": sizes.index(r["window"])} for r in rows]
            label = "no sink" if sink == "none" else f"{sink}, {positions}"
            _line(axis, placed, "place", label, _style(index + 1))
        full = next((r for r in own if not r["window"]), None)
        if full is not None:
            axis.axhline(full["value"], color="#000000", linewidth=1)
        axis.set_xticks(range(len(sizes)), [str(w) for w in sizes])
        axis.set(title=name, xlabel="window", ylabel="accepted per round", ylim=(0, None))
        axis.title.set_fontsize(9)
    axes[0].legend(frameon=False, fontsize=7)
    return canvas


def _draw_chain(summary: Summary) -> Any:
    from matplotlib.colors import LogNorm

    names = [n for n in summary.drafters if any(r["drafter"] == n for r in summary.chain)]
    canvas, axes = _panels(len(names), width=9.6, height=2.5, rows=len(names))
    image = None
    for axis, name in zip(axes, names, strict=True):
        rows = [r for r in summary.chain if r["drafter"] == name]
        steps, width = max(r["step"] for r in rows), max(r["position"] for r in rows) + 1
        mass = np.full((steps, width), np.nan)
        for row in rows:
            mass[row["step"] - 1, row["position"]] = max(row["mass"], _FLOOR)
        image = axis.imshow(
            mass,
            aspect="auto",
            cmap="cividis",
            norm=LogNorm(vmin=_FLOOR, vmax=1),
            interpolation="none",
            extent=(-0.5, width - 0.5, steps + 0.5, 0.5),
        )
        axis.grid(visible=False)
        last = {r["position"]: r["region"] for r in rows}
        _mark_regions(axis, [last[p] for p in range(width)])
        axis.set(ylabel="draft step", xlabel="position")
        axis.set_title(name, fontsize=9, pad=18)
        axis.set_yticks(range(1, steps + 1))
    if image is not None:
        canvas.colorbar(image, ax=axes, label="share of attention", pad=0.01)
    return canvas


def _mark_regions(axis: Any, regions: Sequence[str]) -> None:
    """Draw a strip above the map: a bracket and a name for every run of one region."""
    merged = ["own" if r == "self" else r for r in regions]
    place = axis.get_xaxis_transform()
    start = 0
    for index, (region, run) in enumerate(groupby(merged)):
        end = start + len(list(run))
        ends, shade = [start - 0.5, end - 0.5], ("#000000", "#9A9A9A")[index % 2]
        axis.plot(
            ends, [1.035, 1.035], transform=place, color=shade, lw=4, solid_capstyle="butt", clip_on=False
        )
        if start:
            axis.axvline(start - 0.5, color="#FFFFFF", linewidth=0.7)
        if region == "sink" or end - start >= max(3, len(regions) // 40):
            middle = (start + end - 1) / 2
            axis.text(middle, 1.07, _SHORT[region], transform=place, ha="center", va="bottom", fontsize=6.5)
        start = end
