"""Figures of a run: acceptance by depth, retention by family, histogram of accepted counts.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; every line also has a marker and a
dash pattern of its own, every bar a hatch, so a grey print stays readable.

Example:
    plot_run("runs/first", "figures")    # figures/acceptance_by_depth.svg, ...
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import UserError, unknown_name
from specbench.results.aggregate import GROUP, acceptance_table, connect, make_cells, register
from specbench.results.intervals import CLEAN, OVERALL
from specbench.results.statistics import DRAWS

FORMATS = ("svg", "png", "pdf")
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
_LINE = ("drafter", "target", "runner", "sampler", "temperature", "k")
"""What makes a line of a figure."""
_FEW_LINES = 3
"""A legend of more would lie on the lines; it stands beside them."""
_FEW_CONDITIONS, _FEW_DRAFTERS = 12, 6
"""More are shown as a table in colours: marks and intervals would lie on each other."""
_FULL_COLOUR = 0.5
"""Retention this far from 1 has the full colour."""
HATCHES = ("", "//", "\\\\", "..", "xx", "++", "oo", "--")


def plot_run(
    run: str | Path,
    out: str | Path,
    *,
    form: str = "svg",
    draws: int = DRAWS,
    seed: int = 0,
    connection: Any = None,
    table: Any = None,
) -> list[Path]:
    """Draw every figure the run has data for; suites are pooled, of several depths the largest is shown.

    Args:
        run: run directory.
        out: folder for the figures; made where it does not exist.
        form: ``svg``, ``png`` or ``pdf``.
        draws: resamples behind the intervals.
        seed: of the resamples.
        connection: one that has the run's views already.
        table: the run's acceptance table, where it was made already: nothing is resampled again.

    Returns:
        The files written.

    Raises:
        UserError: unknown form, the run holds no rounds, or the folder cannot be written.
    """
    if form not in FORMATS:
        raise unknown_name("figure format", form, FORMATS)
    if connection is None:
        connection = connect()
        register(connection, run)
    if table is None:
        table = acceptance_table(connection=connection, draws=draws, seed=seed)
    else:
        make_cells(connection, GROUP)
    rows = table.to_pylist()
    overall = _deepest([r for r in rows if r["suite"] == OVERALL])
    pooled = [r for r in overall if r["answer_path"] == "free"]
    figures: dict[str, Callable[[], Any]] = {
        "acceptance_by_depth": lambda: _by_depth(pooled),
        "retention_by_family": lambda: _by_family(overall),
        "accepted_counts": lambda: _histogram(_counts(connection), pooled),
    }
    folder, written = Path(out), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in figures.items():
            figure = draw()
            if figure is not None:
                written.append(folder / f"{name}.{form}")
                figure.savefig(written[-1], dpi=160, metadata={"Date": None} if form == "svg" else None)
    except OSError as error:
        raise UserError(f"cannot write figures to {folder}: {error.strerror or error}") from error
    return written


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, side by side on one scale, without touching matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(1, panels, squeeze=False, sharex=True, sharey=True)[0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, found


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "markersize": 5,
        "linewidth": 1.5,
    }


def _names(rows: Sequence[dict[str, Any]]) -> list[tuple[tuple[Any, ...], str]]:
    """Return the key and the label of every drafter, told apart by whatever else varies."""
    varying = [f for f in _LINE if f == "drafter" or len({r[f] for r in rows}) > 1]
    found = {}
    for row in rows:
        label = " · ".join(str(row[f]) if f == "drafter" else f"{f} {row[f]}" for f in varying)
        found[_key(row)] = label
    return list(found.items())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[f] for f in _LINE)


def _by_depth(rows: Sequence[dict[str, Any]]) -> Any:
    """Conditional rate by step under the clean condition, with intervals."""
    clean = [r for r in rows if r["condition"] == CLEAN]
    if not clean:
        return None
    names = _names(clean)
    figure, (axes,) = _figure(6.4 if len(names) <= _FEW_LINES else 9.2, 4.2)
    footnote = ""
    for index, (key, label) in enumerate(names):
        (row,) = [r for r in clean if _key(r) == key]
        steps = [i for i in range(1, row["k"] + 1) if row[f"c_{i}"] is not None]
        values = [row[f"c_{i}"] for i in steps]
        ends = [[row[f"c_{i}_{end}"] for i in steps] for end in ("low", "high")]
        low, high = (np.array(e, float) for e in ends)
        style = _style(index)
        text = f"{label} ({row['accepted_per_round']:.2f} accepted per round)"
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(steps, values, label=text, **style)
        few = np.isnan(low)
        if few.any():
            hollow = style | {"linestyle": "none", "markerfacecolor": "white"}
            axes.plot(np.array(steps)[few], np.array(values)[few], **hollow)
            footnote = " (hollow: too few rounds for an interval)"
    axes.set(
        xlabel="step i" + footnote,
        ylabel="conditional rate $c_i$",
        ylim=(0, 1.02),
        title=f"Acceptance by depth, {CLEAN}",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(names) <= _FEW_LINES:
        axes.legend(frameon=False, fontsize=8)
    else:
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return figure


def _by_family(rows: Sequence[dict[str, Any]]) -> Any:
    """Retention of every condition, grouped by family: marks where they are few, else a table in colours."""
    kept = [r for r in rows if r["condition"] != CLEAN and r["retention"] is not None]
    if not kept:
        return None
    conditions = _by_loss(kept)
    drafters = _names(kept)
    paths = [p for p in ("free", "forced") if any(r["answer_path"] == p for r in kept)]
    few = len(conditions) <= _FEW_CONDITIONS and len(drafters) <= _FEW_DRAFTERS
    figure, panels = (_marks if few else _map)(kept, conditions, drafters, paths)
    for axes, path in zip(panels, paths, strict=True):
        axes.set_title(f"{path} answers" if len(paths) > 1 else "Retention by family", fontsize=10)
    for (first, _), (second, place) in itertools.pairwise(
        (family, i) for i, (family, _) in enumerate(conditions)
    ):
        if first != second:
            for axes in panels:
                axes.axhline(place - 0.5, color="#555555", linewidth=0.8)
    panels[0].set_yticks(range(len(conditions)), [c for _, c in conditions], fontsize=8)
    return figure


def _deepest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the largest depth of every drafter: the others show the first steps of the same."""
    shallow = [f for f in _LINE if f != "k"]
    depth: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in rows:
        key = tuple(row[f] for f in shallow)
        depth[key] = max(depth[key], row["k"])
    return [r for r in rows if r["k"] == depth[tuple(r[f] for f in shallow)]]


def _by_loss(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (family, condition), families by name, in each the condition that costs the drafters most first."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        values[row["family"], row["condition"]].append(row["retention"])
    return sorted(values, key=lambda c: (c[0], float(np.median(values[c]))))


def _marks(
    rows: Sequence[dict[str, Any]],
    conditions: Sequence[tuple[str, str]],
    drafters: Sequence[tuple[tuple[Any, ...], str]],
    paths: Sequence[str],
) -> tuple[Any, list[Any]]:
    """One mark with its interval a drafter."""
    height = max(2.6, 0.28 * len(conditions) * max(1, len(drafters) ** 0.5) + 1.4)
    figure, panels = _figure(2.4 + 4.8 * len(paths), height, panels=len(paths))
    for axes, path in zip(panels, paths, strict=True):
        for index, (key, label) in enumerate(drafters):
            own = {r["condition"]: r for r in rows if _key(r) == key and r["answer_path"] == path}
            shift = (index - (len(drafters) - 1) / 2) * 0.7 / len(drafters)
            places = [i + shift for i, (_, c) in enumerate(conditions) if c in own]
            found = [own[c] for _, c in conditions if c in own]
            values = np.array([r["retention"] for r in found])
            ends = [
                [r[f"retention_{e}"] if r[f"retention_{e}"] is not None else r["retention"] for r in found]
                for e in ("low", "high")
            ]
            style = _style(index) | {"linestyle": "none"}
            spread = [values - ends[0], ends[1] - values]
            axes.errorbar(values, places, xerr=spread, label=label, capsize=2, **style)
        axes.axvline(1.0, color="#555555", linewidth=1)
        axes.set(xlabel=f"retention against {CLEAN}", ylim=(len(conditions) - 0.5, -0.5))
    marks, names = panels[0].get_legend_handles_labels()
    figure.legend(
        marks, names, frameon=False, fontsize=8, loc="outside lower center", ncols=min(3, len(names))
    )
    return figure, panels


def _map(
    rows: Sequence[dict[str, Any]],
    conditions: Sequence[tuple[str, str]],
    drafters: Sequence[tuple[tuple[Any, ...], str]],
    paths: Sequence[str],
) -> tuple[Any, list[Any]]:
    """One cell a drafter and condition: its number, and a colour, red for a loss; bold where the interval misses 1."""
    width, height = 2.6 + 0.62 * len(drafters) * len(paths), 2.2 + 0.23 * len(conditions)
    figure, panels = _figure(width, height, panels=len(paths))
    names = [label for _, label in drafters]
    at = {c: i for i, (_, c) in enumerate(conditions)}
    column = {key: i for i, (key, _) in enumerate(drafters)}
    for axes, path in zip(panels, paths, strict=True):
        values = np.full((len(conditions), len(drafters)), np.nan)
        for row in rows:
            if row["answer_path"] != path:
                continue
            i, j = at[row["condition"]], column[_key(row)]
            values[i, j] = row["retention"]
            low, high = row["retention_low"], row["retention_high"]
            sure = low is not None and high is not None and not low <= 1 <= high
            dark = abs(row["retention"] - 1) > _FULL_COLOUR * 0.7
            axes.text(
                j, i, f"{row['retention']:.2f}", ha="center", va="center", fontsize=7,
                color="white" if dark else "black", fontweight="bold" if sure else "normal",
            )  # fmt: skip
        axes.imshow(values, cmap="RdBu", vmin=1 - _FULL_COLOUR, vmax=1 + _FULL_COLOUR, aspect="auto")
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
        axes.grid(visible=False)
        axes.tick_params(length=0)
    figure.supxlabel(f"retention against {CLEAN}; bold: the 95 % interval does not hold 1", fontsize=8)
    return figure, panels


def _counts(connection: Any) -> dict[tuple[Any, ...], dict[int, float]]:
    """Return the share of rounds by accepted count, clean condition, all suites."""
    rows = connection.execute(
        f"""
        SELECT {", ".join(_LINE)}, num_accepted, sum(weight)
        FROM cells WHERE condition = '{CLEAN}' AND answer_path = 'free' GROUP BY ALL ORDER BY ALL
        """
    ).fetchall()
    found: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for *key, accepted, weight in rows:
        found[tuple(key)][accepted] = weight
    return found


def _histogram(counts: dict[tuple[Any, ...], dict[int, float]], rows: Sequence[dict[str, Any]]) -> Any:
    """Share of rounds that accepted 0, 1, ..., k tokens."""
    clean = [r for r in rows if r["condition"] == CLEAN]
    if not clean:
        return None
    names = _names(clean)
    figure, (axes,) = _figure(6.4, 4.2)
    width = 0.8 / len(names)
    for index, (key, label) in enumerate(names):
        own, depth = counts[key], key[-1]
        total = sum(own.values())
        shares = [own.get(a, 0.0) / total for a in range(depth + 1)]
        places = np.arange(depth + 1) + (index - (len(names) - 1) / 2) * width
        colour, hatch = COLOURS[index % len(COLOURS)], HATCHES[index % len(HATCHES)]
        axes.bar(
            places,
            shares,
            width,
            label=label,
            facecolor=colour,
            edgecolor="white",
            hatch=hatch,
            linewidth=0.4,
        )
    axes.set(
        xlabel="accepted draft tokens of a round", ylabel="share of rounds", title=f"Accepted counts, {CLEAN}"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)
    return figure
