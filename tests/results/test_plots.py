"""Figures: drawn from the rows, told apart without colour."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.errors import UserError
from specbench.results import plots
from specbench.results.aggregate import acceptance_table, connect, make_cells, register
from specbench.results.plots import plot_run
from specbench.results.store import RunStore


def luminance(colour: str) -> float:
    """Relative luminance after WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.fixture
def run(tmp_path: Path, synthetic: SimpleNamespace) -> Path:
    counts = {
        "template/regular": {"a": [[4, 0, 2], [3, 1]], "b": [[0, 0, 1], [1, 2]]},
        "text/caps": {"a": [[2, 0, 2], [3, 1]], "b": [[0, 1, 0], [1, 0]]},
    }
    path: Path = synthetic.whole_run(tmp_path / "run", RunStore, counts)
    return path


def test_every_figure_is_drawn_and_names_the_drafters(run: Path, tmp_path: Path) -> None:
    written = plot_run(run, tmp_path / "figures", draws=200)
    assert [p.name for p in written] == [
        "acceptance_by_depth.svg",
        "retention_by_family.svg",
        "accepted_counts.svg",
    ]
    connection = connect()
    register(connection, run)
    table = acceptance_table(connection=connection, draws=200)
    make_cells(connection, ("condition",))  # what another table left behind
    again = plot_run(run, tmp_path / "again", connection=connection, table=table)
    for one, other in zip(written, again, strict=True):
        assert one.stat().st_size > 5000
        # Marker and clip ids are salted; the drawing is the same.
        assert one.read_text().count("<path") == other.read_text().count("<path")


def test_the_histogram_shows_the_shares(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = {}

    def keep(counts: dict, rows: list) -> None:
        drawn.update({key[0]: value for key, value in counts.items()})

    monkeypatch.setattr(plots, "_histogram", keep)
    plot_run(run, tmp_path / "figures", draws=200)
    assert drawn == {"a": {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, "b": {0: 2, 1: 2, 2: 1}}


def test_a_run_of_one_condition_has_no_retention_figure(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    run = synthetic.whole_run(tmp_path, RunStore, {"template/regular": {"a": [[1], [2]]}})
    names = [p.name for p in plot_run(run, tmp_path / "f", form="png", draws=100)]
    assert names == ["acceptance_by_depth.png", "accepted_counts.png"]


def test_neighbouring_lines_differ_without_colour() -> None:
    styles = [plots._style(i) for i in range(16)]
    looks = {(s["marker"], str(s["linestyle"])) for s in styles}
    assert len(looks) == 16
    shades = [luminance(c) for c in plots.COLOURS[:3]]
    assert min(abs(a - b) for i, a in enumerate(shades) for b in shades[:i]) > 0.05


def test_bad_requests_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown figure format 'jpg'"):
        plot_run(run, tmp_path, form="jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write figures"):
        plot_run(run, tmp_path / "file", draws=100)


def _rows(conditions: int, drafters: int, depths: tuple[int, ...] = (7,)) -> list[dict]:
    """Overall rows on both answer paths; condition i costs its part i hundredths."""
    found = []
    for path in ("free", "forced"):
        for j in range(drafters):
            for k in depths:
                own = {"drafter": f"d{j}", "target": "t", "runner": "replay", "sampler": "greedy", "k": k}
                own |= {"temperature": 0.0, "answer_path": path, "suite": "all"}
                for i in range(conditions):
                    kept = 1 - i / 100 - j / 10 + (path == "forced") * 0.001 * k
                    row = {"condition": f"text/c{i}", "family": "text", "retention": kept}
                    found.append(own | row | {"retention_low": kept - 0.05, "retention_high": kept + 0.05})
    return found


def test_many_conditions_become_a_table_of_both_answer_paths() -> None:
    figure = plots._by_family(plots._deepest(_rows(20, 3, depths=(3, 7))))
    free, forced = figure.axes
    assert (free.get_title(), forced.get_title()) == ("free answers", "forced answers")
    labels = [t.get_text() for t in free.get_yticklabels()]
    assert labels == [f"text/c{i}" for i in reversed(range(20))]  # what costs most comes first
    assert [t.get_text() for t in forced.get_xticklabels()] == ["d0", "d1", "d2"]
    cells = {(t.get_position(), t.get_text(), t.get_fontweight()) for t in forced.texts}
    assert len(forced.texts) == 60  # the largest depth alone
    assert ((0, 19), "1.01", "normal") in cells  # c0, d0: 1 + 0.007
    assert ((2, 0), "0.62", "bold") in cells  # c19, d2: 1 - 0.19 - 0.2 + 0.007, interval below 1


def test_few_conditions_are_marks_with_intervals() -> None:
    figure = plots._by_family(_rows(3, 2))
    assert [axes.get_title() for axes in figure.axes] == ["free answers", "forced answers"]
    assert not figure.axes[0].images
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["d0", "d1"]
