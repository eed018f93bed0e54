"""The leaderboard in a real browser: sorting, filtering, keyboard, no request, no message, no foreign markup."""

from __future__ import annotations

import copy
import functools
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.results.aggregate import acceptance_table
from specbench.results.entry import write_entry
from specbench.results.leaderboard.board import Board, collect
from specbench.results.leaderboard.site import build_site, entry_folders, page
from specbench.results.store import RunStore

HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'
# Answers of 14, 9 and 10 tokens after the first, walked in long, middling and short strides.
STRONG = [[4, 4, 3], [4, 3], [4, 4]]
MIDDLE = [[2, 3, 2, 2, 0], [2, 2, 2], [3, 2, 2]]
WEAK = [[0, 1, 0, 1, 0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0], [0, 0, 1, 0, 1, 0, 1]]


def entry(
    folder: Path, synthetic: SimpleNamespace, name: str, drafters: dict[str, Any], **changes: Any
) -> Path:
    counts = {
        "template/regular": drafters,
        "text/caps": {d: MIDDLE if prompts is STRONG else WEAK for d, prompts in drafters.items()},
        "system/long": drafters,
    }
    run = synthetic.whole_run(folder / f"run-{name}", RunStore, counts, changes=changes)
    write_entry(run, folder / "entries" / name)
    return folder / "entries" / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, synthetic: SimpleNamespace) -> Path:
    folder = tmp_path_factory.mktemp("board")
    entry(folder, synthetic, "one", {"strong": STRONG, "weak": WEAK})
    entry(folder, synthetic, "two", {HOSTILE: MIDDLE}, command=f"specbench run --drafter {HOSTILE}")
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Path:
    build_site(entry_folders(folder / "entries"), folder / "site", draws=200)
    return folder / "site"


def test_the_download_holds_the_rows_of_every_entry(folder: Path, site: Path) -> None:
    rows = duckdb.sql(
        f"SELECT drafter, accepted_per_round, rounds, rounds_with_1 FROM '{site}/leaderboard.parquet' "
        "WHERE suite = 'toy' AND condition = 'template/regular'"
    ).fetchall()
    found = {r[0]: r[1:] for r in rows}
    assert set(found) == {"strong", "weak", HOSTILE}
    assert found["weak"] == (pytest.approx(10 / 23, abs=1e-4), 23, 10)
    original = acceptance_table(folder / "run-two", by=("suite", "condition"))
    expected = [
        r for r in original.to_pylist() if r["suite"] == "toy" and r["condition"] == "template/regular"
    ]
    assert found[HOSTILE][0] == pytest.approx(expected[0]["accepted_per_round"], abs=1e-4)


def test_entries_of_another_version_of_a_suite_are_refused(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    entry(tmp_path, synthetic, "a", {"a": STRONG}, started="2026-01-01")
    entry(tmp_path, synthetic, "b", {"b": WEAK}, started="2026-01-02")
    other = synthetic.whole_run(
        tmp_path / "run-c", RunStore, {"template/regular": {"c": STRONG}}, version="other"
    )
    (tmp_path / "run-c" / "run.json").write_text(
        json.dumps(synthetic.run_info({"c": "ngram"}, started="2025"))
    )
    assert other.is_dir()
    write_entry(other, tmp_path / "entries" / "c")
    board = collect(entry_folders(tmp_path / "entries"), draws=100)
    assert list(board.refused) == ["c"]
    assert "3 of its 3 prompts (first: 'toy/0' under template/regular)" in board.refused["c"]
    assert len(board.entries) == 2


def test_a_bad_entry_does_not_take_the_others_along(folder: Path, tmp_path: Path) -> None:
    entries = shutil.copytree(folder / "entries", tmp_path / "entries")
    shutil.copytree(entries / "one", entries / "twin")
    (entries / "two" / "run.json").write_text("{")
    (entries / "empty").mkdir()
    (entries / "door").symlink_to("/")
    board = build_site(entry_folders(entries), tmp_path / "site", draws=100)
    assert [e.path.name for e in board.entries] == ["one"]
    assert set(board.refused) == {"two", "twin", "empty", "door"}
    assert "is the same entry" in board.refused["twin"] and "holds no SHA256SUMS" in board.refused["empty"]
    with pytest.raises(UserError, match="there is nothing to show: entry empty is refused"):
        build_site([entries / "empty"], tmp_path / "none")


def test_folders_that_are_no_site_are_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match="is no earlier site"):
        build_site([folder / "entries" / "one"], tmp_path, draws=100)
    with pytest.raises(UserError, match="holds no entries"):
        entry_folders(folder / "entries" / "one" / "rounds")


def test_nothing_of_an_entry_is_markup(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert "hacked" not in text and "onerror=" not in text
    assert "default-src &#39;none&#39;" in text


def many(board: Board, number: int) -> tuple[dict[str, Any], int]:
    """A board of ``number`` entries, each with four suites and twenty conditions at depth 8; numbers all differ."""
    rng = np.random.default_rng(0)
    payload = copy.deepcopy(dict(board.payload))
    conditions = [
        ["template/regular", "template"],
        *([f"family{i % 5}/condition-{i}", f"family{i % 5}"] for i in range(19)),
    ]
    suites = ["mtbench", "gsm8k", "humaneval", "alpaca", "all"]
    rows = number * len(suites) * len(conditions)
    position = np.arange(rows)
    accepted = rng.integers(500, 4000, rows)
    width = rng.integers(50, 300, rows)
    rounds = rng.integers(2000, 9000, rows)
    steps = np.sort(rng.integers(0, 1000, (rows, 8)), axis=1)[:, ::-1] * rounds[:, None] // 1000
    kept = rng.integers(500, 1050, rows)
    clean = position % len(conditions) == 0

    def blank(values: np.ndarray) -> list[int | None]:
        return [None if c else int(v) for c, v in zip(clean, values, strict=True)]

    payload["columns"] = {
        "entry": (position // (rows // number)).tolist(),
        "drafter": [0] * rows,
        "suite": (position // len(conditions) % len(suites)).tolist(),
        "condition": (position % len(conditions)).tolist(),
        **{name: [0] * rows for name in ("path", "runner", "sampling", "prompt_set")},
        "k": [8] * rows,
        "accepted": accepted.tolist(),
        "low": (accepted - width).tolist(),
        "high": (accepted + width).tolist(),
        "retention": blank(kept),
        "retention_low": blank(kept - 40),
        "retention_high": blank(kept + 40),
        "draft_ms": [None] * rows,
        "verify_ms": [None] * rows,
        "rounds": rounds.tolist(),
        "prompts": [80] * rows,
        "at_least": steps.tolist(),
    }
    overall = np.flatnonzero(clean & (position // len(conditions) % len(suites) == 4))
    payload["ranges"] = {int(i): rng.random((2, 8)).round(4).tolist() for i in overall}
    payload["suites"], payload["conditions"] = suites, conditions
    first = board.payload["entries"][0]
    payload["entries"] = [
        {
            **first,
            "id": f"{i:012x}",
            "drafters": [{**first["drafters"][0], "name": f"eagle3=person{i}/model-{i}"}],
        }
        for i in range(number)
    ]
    payload["scores"] = [
        {
            **board.payload["scores"][0],
            "of": [f"{i:012x}.0", "replay", "greedy", 8, "free"],
            "score": float(i % 100),
        }
        for i in range(number)
    ]
    return payload, rows


def test_200_entries_stay_below_three_megabytes(folder: Path, site: Path, tmp_path: Path) -> None:
    payload, rows = many(collect([folder / "entries" / "one"], draws=100), 200)
    size = len(page({**payload, "title": "t"}, "t").encode())
    # The download, with as many rows that all differ.
    table = pq.read_table(site / "leaderboard.parquet")
    table = table.take(np.arange(rows) % table.num_rows)
    rng = np.random.default_rng(0)
    for name in table.column_names:
        if table.schema.field(name).type == "float":
            noisy = (
                rng.random(rows).round(4)
                if "_with" not in name and name != "rounds"
                else rng.integers(0, 9000, rows)
            )
            table = table.set_column(
                table.column_names.index(name), table.schema.field(name), [noisy.astype(np.float32)]
            )
    pq.write_table(table, tmp_path / "all.parquet", compression="zstd", compression_level=15)
    size += (tmp_path / "all.parquet").stat().st_size
    assert rows == 20_000 and size < 3_000_000, size


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site as a web server shows it: a file:// page could not show that nothing else is fetched."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Any]:
    """A page that has loaded, and at the end has asked for nothing and said nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(address)
    opened.wait_for_selector("body[data-ready]")
    yield opened
    assert opened.evaluate("window.hacked") is None
    assert said == []
    assert [url for url in asked if url != address and not url.startswith("data:")] == []
    context.close()


def names(tab: Any) -> list[str]:
    return [str(n) for n in tab.locator("#results tbody th").all_inner_texts()]


def test_rows_are_ranked_and_sorted(tab: Any) -> None:
    assert names(tab) == ["strong", HOSTILE, "weak"]
    assert tab.locator("#results tbody tr").first.locator("td").first.inner_text() == "1"
    assert "tell apart" in tab.locator("#ranking").inner_text()
    header = tab.locator("#results th", has_text="accepted_per_round")
    assert header.get_attribute("aria-sort") == "descending"
    header.locator("button").click()
    assert names(tab) == ["weak", HOSTILE, "strong"]
    assert tab.locator("#results th", has_text="accepted_per_round").get_attribute("aria-sort") == "ascending"
    tab.locator("#results th button", has_text="drafter").click()
    assert names(tab) == sorted(names(tab), key=str.lower)


def test_filters_narrow_and_say_why_there_is_no_rank(tab: Any) -> None:
    tab.locator("[data-filter=condition]").select_option("text/caps")
    assert len(names(tab)) == 3
    assert "retention" in tab.locator("#results thead").inner_text()
    tab.locator("[data-filter=condition]").select_option("*")
    assert len(names(tab)) == 9
    assert "differ in condition" in tab.locator("#ranking").inner_text()
    assert tab.locator("#results tbody tr").first.locator("td").first.inner_text() == "–"
    tab.locator("[data-filter=search]").fill("STRONG")
    assert set(names(tab)) == {"strong"}
    tab.locator("[data-filter=search]").fill("nothing like it")
    assert "No result matches" in tab.locator("#ranking").inner_text()
    tab.get_by_role("button", name="Reset").click()
    assert len(names(tab)) == 3


def test_a_view_can_be_linked_to(tab: Any, address: str) -> None:
    tab.locator("[data-filter=condition]").select_option("system/long")
    tab.locator("#results th button", has_text="drafter").click()
    link, before = tab.url, names(tab)
    tab.goto(address + "#")
    tab.goto(link)
    tab.reload()
    tab.wait_for_selector("body[data-ready]")
    assert names(tab) == before
    assert tab.locator("[data-filter=condition]").input_value() == "system/long"


def test_the_keyboard_reaches_everything(tab: Any) -> None:
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the table"
    for _ in range(40):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.dataset.sort") == "name":
            break
    tab.keyboard.press("Enter")
    assert names(tab) == sorted(names(tab), key=str.lower)
    assert tab.evaluate("document.activeElement.dataset.sort") == "name"
    for _ in range(20):
        tab.keyboard.press("Tab")
        if (tab.evaluate("document.activeElement.getAttribute('href')") or "").startswith("#drafter="):
            break
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#command")
    assert tab.evaluate("document.activeElement.id") == "title"


def test_a_drafters_page_shows_where_it_comes_from(tab: Any) -> None:
    tab.get_by_role("link", name=HOSTILE).first.click()
    tab.wait_for_selector("#command")
    assert tab.locator("#title").inner_text() == HOSTILE
    assert tab.locator("#command").inner_text() == f"specbench run --drafter {HOSTILE}"
    text = tab.locator("#view").inner_text()
    for part in (
        "t" * 16,
        "d" * 16,
        "2026-01-02",
        "torch 2.11",
        "toy",
        "text/caps",
        "worst only",
    ):
        assert part in text, part
    assert tab.locator("canvas").count() == 2
    painted = "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return d.some((v) => v > 0); }"
    assert all(tab.locator("canvas").nth(i).evaluate(painted) for i in range(2))
    tab.go_back()
    tab.wait_for_selector("#results")
    assert len(names(tab)) == 3


def test_the_heat_map_colours_losses(tab: Any) -> None:
    row = tab.locator("#heatmap tbody tr", has_text="strong")
    cells = row.locator("td")
    assert [cells.nth(i).inner_text() for i in range(2)][0] == "1.00"
    lost = cells.nth(1).evaluate("c => getComputedStyle(c).backgroundColor")
    kept = cells.nth(0).evaluate("c => getComputedStyle(c).backgroundColor")
    assert lost.startswith("rgba(213, 94, 0") and lost != kept


def test_dark_and_light(tab: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    tab.emulate_media(color_scheme="dark")
    dark = tab.evaluate(paper)
    tab.emulate_media(color_scheme="light")
    light = tab.evaluate(paper)
    assert dark != light
    tab.locator("#theme").click()
    assert tab.evaluate(paper) == dark
    tab.reload()
    tab.wait_for_selector("body[data-ready]")
    assert tab.evaluate(paper) == dark


def test_a_phone_scrolls_tables_and_not_the_page(tab: Any) -> None:
    tab.set_viewport_size({"width": 360, "height": 740})
    tab.reload()
    tab.wait_for_selector("body[data-ready]")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.locator("details.box").get_attribute("open") is None
    tab.get_by_role("link", name="strong").first.click()
    tab.wait_for_selector("#command")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_200_entries_are_shown(browser: Any, folder: Path, tmp_path: Path) -> None:
    payload, _ = many(collect([folder / "entries" / "one"], draws=100), 200)
    (tmp_path / "index.html").write_text(page({**payload, "title": "t"}, "t"))
    opened = browser.new_page()
    opened.goto((tmp_path / "index.html").as_uri())
    opened.wait_for_selector("body[data-ready]")
    assert opened.locator("#results tbody tr").count() == 200
    opened.locator("[data-filter=suite]").select_option("*")
    assert opened.locator("#results tbody tr").count() == 200
    opened.get_by_role("button", name="Show 200 more of 1000").click()
    assert opened.locator("#results tbody tr").count() == 400
    opened.close()
