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
    """Draw every figure the run has data for; suites are pooled.

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
    pooled = [r for r in rows if r["suite"] == OVERALL and r["answer_path"] == "free"]
    figures: dict[str, Callable[[], Any]] = {
        "acceptance_by_depth": lambda: _by_depth(pooled),
        "retention_by_family": lambda: _by_family(pooled),
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


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its axes without touching matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


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
    figure, axes = _figure(6.4, 4.2)
    footnote = ""
    for index, (key, label) in enumerate(_names(clean)):
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
    axes.legend(frameon=False, fontsize=8)
    return figure


def _by_family(rows: Sequence[dict[str, Any]]) -> Any:
    """Retention of every condition, grouped by family, one mark a drafter."""
    kept = [r for r in rows if r["condition"] != CLEAN and r["retention"] is not None]
    if not kept:
        return None
    families: dict[str, list[str]] = defaultdict(list)
    for row in sorted(kept, key=lambda r: (r["family"], r["condition"])):
        if row["condition"] not in families[row["family"]]:
            families[row["family"]].append(row["condition"])
    conditions = list(itertools.chain.from_iterable(families.values()))
    drafters = _names(kept)
    figure, axes = _figure(7.2, max(2.6, 0.28 * len(conditions) * max(1, len(drafters) ** 0.5) + 1.2))
    for index, (key, label) in enumerate(drafters):
        own = {r["condition"]: r for r in kept if _key(r) == key}
        shift = (index - (len(drafters) - 1) / 2) * 0.7 / len(drafters)
        places = [i + shift for i, c in enumerate(conditions) if c in own]
        found = [own[c] for c in conditions if c in own]
        values = np.array([r["retention"] for r in found])
        ends = [
            [r[f"retention_{e}"] if r[f"retention_{e}"] is not None else r["retention"] for r in found]
            for e in ("low", "high")
        ]
        style = _style(index) | {"linestyle": "none"}
        axes.errorbar(
            values, places, xerr=[values - ends[0], ends[1] - values], label=label, capsize=2, **style
        )
    borders = np.cumsum([len(c) for c in families.values()])[:-1] - 0.5
    for border in borders:
        axes.axhline(border, color="#BBBBBB", linewidth=0.6)
    axes.axvline(1.0, color="#555555", linewidth=1)
    axes.set_yticks(range(len(conditions)), conditions, fontsize=8)
    axes.set(
        xlabel=f"retention of accepted_per_round against {CLEAN}",
        title="Retention by family",
        ylim=(len(conditions) - 0.5, -0.5),
    )
    axes.legend(
        frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.12 - 0.3 / len(conditions))
    )
    return figure


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
    figure, axes = _figure(6.4, 4.2)
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
