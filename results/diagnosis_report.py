"""The page of a diagnosis: verdict first, with numbers, then figures; one file that opens offline.

Example:
    report = write_report(Path("diag"))      # draws the figures and writes diag/report.html
    report.verdict[0]                        # "zoo:eagle3.1 accepts most: 1.21 [1.10, 1.33] draft tokens ..."
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import UserError
from specbench.results.diagnosis import Summary, Value, noise_level, summarise
from specbench.results.diagnosis_figures import Figure, draw
from specbench.results.text import Sheet, percent, render_sheets

REPORT = "report.html"
_ABOUT_ONE = 0.05
"""Growth within this of 1 counts as none."""
_SMALL_SINK = 0.05
"""A smaller change of the sink's share counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was written."""

    path: Path
    verdict: tuple[str, ...]
    figures: tuple[str, ...]


def write_report(out: Path, *, draws: int = 10_000) -> Report:
    """Summarise the tables in ``out``, draw the figures and write the page.

    Args:
        out: the diagnosis's directory.
        draws: resamples of the prompts.

    Raises:
        UserError: there is no finished diagnosis, or it cannot be written.
    """
    summary = summarise(out, draws=draws)
    figures = draw(summary, out / "figures")
    sentences = verdict(summary)
    try:
        (out / REPORT).write_text(page(summary, sentences, figures, out / "figures"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out / REPORT}: {error.strerror or error}") from error
    return Report(path=out / REPORT, verdict=tuple(sentences), figures=tuple(f.name for f in figures))


# ---- the verdict


def verdict(summary: Summary) -> list[str]:
    """Return the few sentences that matter most."""
    ranked = sorted(summary.drafters, key=lambda n: -summary.accepted[n].value)
    first = ranked[0]
    text = (
        f"{first} accepts {'most: ' if len(ranked) > 1 else ''}{summary.accepted[first].text()} draft tokens per round "
        f"at k = {summary.depth}, over {summary.record['num_prompts']} prompts"
    )
    others = "; ".join(f"{n} {summary.accepted[n].text()}" for n in ranked[1:])
    sentences = [text + (f" ({others})" if others else "") + "."]
    sentences += [_drifts(summary, name) for name in summary.drafters]
    rows = signs(summary).rows
    unseen = [f"{row[1]} ({row[0]}: {row[2]})" for row in rows if row[-1] == _yes(False)]
    if rows:
        rest = f"; not seen: {'; '.join(unseen)}" if unseen else ""
        sentences.append(
            f"Of the {len(rows)} published signs that apply, {len(rows) - len(unseen)} are seen{rest}."
        )
    return sentences


def details(summary: Summary) -> list[str]:
    """Return every finding in words, drafter by drafter."""
    found: list[str] = []
    for name in summary.drafters:
        found += [_state(summary, name), _attention(summary, name), *_depth(summary, name)]
        found += [*_noise(summary, name), *_pin(summary, name), *_window(summary, name)]
    return [sentence for sentence in found if sentence]


def _drifts(summary: Summary, name: str) -> str:
    scores = summary.drift[name]
    growth, left = scores.get("growth_fed_back"), scores.get("D_sink")
    if growth is None or left is None:
        return f"{name}: no answer is long enough for {summary.depth} steps, so drift cannot be told."
    grows, leaves = growth.above(1 + _ABOUT_ONE), left.above(0) and left.value >= _SMALL_SINK
    word = "drifts" if grows or leaves else "does not drift"
    text = (
        f"{name} {word}: from step 1 to {summary.depth} what it feeds back changes {growth.text()}-fold, and the "
        f"sink's share of its attention by {_minus(left).text(sign=True)}"
    )
    level = noise_level(summary)
    row = next(
        (r for r in summary.noise if (r["drafter"], r["path"], r["alpha"]) == (name, "hidden", level)), None
    )
    if row is not None:
        text += f"; noise of {level:g} RMS on its hidden state leaves {percent(row['value'], 0)} of its acceptance"
    return text + "."


def _minus(value: Value) -> Value:
    return Value(value=-value.value, low=-value.high, high=-value.low)


def _state(summary: Summary, name: str) -> str:
    growth = summary.drift[name].get("growth_fed_back")
    raw = summary.drift[name].get("growth_raw")
    if growth is None or raw is None:
        return ""
    kind = summary.facts(name)["settings"]["feedback"]
    if growth.above(1 + _ABOUT_ONE):
        word = f"grows {growth.text()}-fold"
    elif growth.low > 1 - _ABOUT_ONE and growth.high < 1 + _ABOUT_ONE:
        word = f"keeps its size ({growth.text()}-fold)"
    else:
        word = f"changes {growth.text()}-fold"
    also = f"; the raw residual, which is not fed back, {raw.text()}-fold" if kind == "post" else ""
    return f"{name} ({kind}-norm): what is fed back {word} from step 1 to step {summary.depth}{also}."


def _attention(summary: Summary, name: str) -> str:
    scores, sink = summary.drift[name], summary.facts(name)["sink"]
    left = scores.get("D_sink")
    near = scores.get("D_recent_8")
    if left is None or near is None:
        return ""
    if not sink["found"]:
        start = (
            f"{name} has no sink: no position holds more than {percent(sink['share'])} of prefill attention. Position "
            f"{sink['position']} "
        )
    else:
        share = percent(sink["share"])
        start = f"{name} has its sink at position {sink['position']} ({share} of prefill attention). It "
    if left.above(0) and left.value >= _SMALL_SINK:
        word = f"loses {left.text()} of the attention"
    elif left.below(0) and left.value <= -_SMALL_SINK:
        word = f"gains {Value(value=-left.value, low=-left.high, high=-left.low).text()} of the attention"
    else:
        word = f"keeps its share (change {Value(value=-left.value, low=-left.high, high=-left.low).text(sign=True)})"
    net = scores.get("D_sink_net")
    beside = (
        f", {net.text(sign=True)} of it not explained by position" if net is not None and net.known else ""
    )
    return (
        f"{start}{word} by step {summary.depth}{beside}, while the last 8 positions change by "
        f"{near.text(sign=True)}."
    )


def _depth(summary: Summary, name: str) -> list[str]:
    rows = {(r["feeding"], r["step"]): r for r in summary.rates if r["drafter"] == name}
    deep = max((step for feeding, step in rows if feeding == "target"), default=1)
    if deep < 2:
        return []
    trained = summary.facts(name)["trained_depth"]
    steps = [1, *([trained] if trained and 1 < trained < deep else []), deep]
    words = ", ".join(
        f"{percent(rows['target', s]['value'], 0)} at step {s}{' (trained depth)' if s == trained else ''}"
        for s in steps
    )
    own = rows.get(("own", deep))
    also = f"; on its own tokens {percent(own['value'], 0)} at step {deep}" if own else ""
    return [f"{name}, forced along the target's tokens, is right at {words}{also}."]


def _noise(summary: Summary, name: str) -> list[str]:
    level = noise_level(summary)
    rows = {r["path"]: r for r in summary.noise if r["drafter"] == name and r["alpha"] == level}
    if not rows:
        return []
    words = {
        path: f"{percent(r['value'], 0)} [{percent(r['low'], 0)}, {percent(r['high'], 0)}]"
        for path, r in rows.items()
    }
    return [
        f"Noise of {level:g} RMS on the hidden state leaves {name} {words['hidden']} of its acceptance, on the "
        f"embedding {words['embed']}."
    ]


def _pin(summary: Summary, name: str) -> list[str]:
    change = summary.pin.get(name)
    if change is None or not change.known:
        return []
    percents = Value(value=100 * change.value, low=100 * change.low, high=100 * change.high)
    left = summary.drift[name].get("pin:D_sink")
    plain = summary.drift[name].get("D_sink")
    also = ""
    if left is not None and plain is not None:
        also = f"; the sink then loses {left.text()} instead of {plain.text()}"
    return [
        f"Pinning what is fed back to the fused input's RMS changes {name}'s acceptance by "
        f"{percents.text(0, sign=True)} %{also}."
    ]


def _window(summary: Summary, name: str) -> list[str]:
    rows = [r for r in summary.windows if r["drafter"] == name and r["window"]]
    if not rows:
        return []
    best = max(
        rows, key=lambda r: r["relative_to_full"] if r["relative_to_full"] == r["relative_to_full"] else -1
    )
    sink = "no sink" if best["sink"] == "none" else f"sink {best['sink']} ({best['positions']})"
    return [
        f"On answers longer than the window, {name} does best with {best['window']} positions and {sink}: "
        f"{best['value']:.2f} accepted per round, {best['relative_to_full']:.2f} of full attention."
    ]


def signs(summary: Summary) -> Sheet:
    """Return the published signs and whether they are seen here, drafter by drafter and pair by pair."""
    rows: list[tuple[str, ...]] = []
    for name in summary.drafters:
        kind = summary.facts(name)["settings"]["feedback"]
        scores = summary.drift[name]
        growth, left = scores.get("growth_fed_back"), scores.get("D_sink")
        if growth is not None:
            seen = growth.above(1) if kind == "pre" else abs(growth.value - 1) < _ABOUT_ONE
            expected = "RMS fed back grows (g > 1)" if kind == "pre" else "RMS fed back stays (g about 1)"
            rows.append((name, f"{kind}-norm: {expected}", growth.text(), _yes(seen)))
        if left is not None:
            seen = left.above(0) if kind == "pre" else abs(left.value) < _SMALL_SINK
            expected = (
                "sink share falls (D_sink > 0)" if kind == "pre" else "sink share stays (D_sink about 0)"
            )
            rows.append((name, f"{kind}-norm: {expected}", left.text(3, sign=True), _yes(seen)))
    words = {
        "growth": ("RMS grows less in post-norm", -1),
        "D_sink": ("post-norm loses less of the sink", -1),
    }
    for row in summary.contrasts:
        value = Value(value=row["value"], low=row["low"], high=row["high"])
        text, sign = words.get(row["score"], ("noise on the hidden state costs post-norm less", 1))
        seen = value.above(0) if sign > 0 else value.below(0)
        rows.append((f"{row['post']} - {row['pre']}", text, value.text(3, sign=True), _yes(seen)))
    return Sheet(
        title="Published signs (arXiv 2605.09992), and whether they are seen here",
        headers=("drafter", "expected", "measured", "seen"),
        rows=tuple(rows),
        num_labels=2,
        text_last=True,
    )


def _yes(seen: bool) -> str:
    return "yes" if seen else "no"


def scores_sheet(summary: Summary) -> Sheet:
    """Return every drift score of every drafter."""
    names = list(dict.fromkeys(score for scores in summary.drift.values() for score in scores))
    return Sheet(
        title=f"Drift scores, step 1 to step {summary.depth}",
        headers=("score", *summary.drafters),
        rows=tuple(
            (
                score,
                *(
                    summary.drift[n][score].text(3) if score in summary.drift[n] else "–"
                    for n in summary.drafters
                ),
            )
            for score in names
        ),
        num_labels=1,
    )


_SCORES_LEGEND = (
    "growth: RMS at the last step over RMS at step 1; slope: of log RMS per step; D_sink: share of the sink at step 1 "
    "minus the last step; D_recent_w: share of the last w positions at the last step minus step 1; D_entropy in nats "
    "(mean of the heads' entropies); net: against step-1 queries at the same positions instead of step 1; pin: what is "
    "fed back rescaled to the fused input's RMS. 95 % intervals over prompts."
)


# ---- the page

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; } figcaption { color: #444; font-size: .9rem; }
table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .2rem .6rem; text-align: right; vertical-align: top; }
th[scope=row], th:first-child { text-align: left; font-weight: normal; }
details { margin: .6rem 0; } summary { cursor: pointer; } .small { color: #444; font-size: .9rem; }
"""


def page(summary: Summary, sentences: Sequence[str], figures: Sequence[Figure], folder: Path) -> str:
    """Return the HTML page; figures are inside it, every string is escaped."""
    record = summary.record
    title = f"Why {' and '.join(summary.drafters)} lose{'s' if len(summary.drafters) == 1 else ''} the prompt"
    about = (
        f"Target {record['target']['name']}, {record['num_prompts']} prompts, {record['num_answers']} answers, "
        f"specbench {record['versions']['specbench']}, {record['made']}. Every query's shares sum to 1 within "
        f"{record['largest_deviation']:.0e}."
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="small">{html.escape(about)}</p>',
        "<ul>",
        *(f"<li>{html.escape(sentence)}</li>" for sentence in sentences),
        "</ul>",
        signs(summary).html(),
        "<details><summary>Drafter by drafter</summary><ul>",
        *(f"<li>{html.escape(sentence)}</li>" for sentence in details(summary)),
        "</ul></details>",
    ]
    for figure in figures:
        parts += _figure_html(figure, folder)
    parts += [
        "<h2>Drift scores</h2>",
        render_sheets([scores_sheet(summary)], _SCORES_LEGEND, "html", 120),
        "<h2>Drafters</h2>",
        _drafter_sheet(summary).html(),
        *_notes(summary),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _figure_html(figure: Figure, folder: Path) -> list[str]:
    data = base64.b64encode((folder / f"{figure.name}.png").read_bytes()).decode()
    alt = f"{figure.title}; the data is in figures/{figure.name}.csv"
    shown = figure.rows if len(figure.rows) <= 200 else []
    table = []
    if shown:
        names = tuple(shown[0])
        cells = tuple(tuple(_show(row[n]) for n in names) for row in shown)
        sheet = Sheet(title=f"figures/{figure.name}.csv", headers=names, rows=cells, num_labels=1)
        table = ["<details><summary>data</summary>", sheet.html(), "</details>"]
    return [
        f"<h2>{html.escape(figure.title)}</h2>",
        f'<figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">',
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>",
        *table,
    ]


def _show(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _drafter_sheet(summary: Summary) -> Sheet:
    names = list(dict.fromkeys(k for d in summary.record["drafters"] for k in d["settings"]))
    rows = [
        (
            d["name"],
            *(str(d["settings"].get(n, "")) for n in names),
            str(d["trained_depth"] or ""),
            str(d["max_positions"] or ""),
            d["fingerprint"],
        )
        for d in summary.record["drafters"]
    ]
    return Sheet(
        title="As their checkpoints declare them",
        headers=("drafter", *names, "trained depth", "positions", "fingerprint"),
        rows=tuple(rows),
        num_labels=1,
    )


def _notes(summary: Summary) -> list[str]:
    lines = [f"{d['name']}: {note}" for d in summary.record["drafters"] for note in d["notes"]]
    if not lines:
        return []
    return ["<ul>", *(f"<li>{html.escape(line)}</li>" for line in lines), "</ul>"]
