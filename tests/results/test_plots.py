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
