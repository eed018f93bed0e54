"""Size of a leaderboard and the time it takes to load, with as many entries as you like.

Example:
    python perf/leaderboard.py site --entries 200

Takes the numbers of a built site, repeats its entries with random changes until there are enough, and
prints the size of page and download and the median time from opening the page in headless Chromium until
its table stands.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from specbench.results.leaderboard.site import page


def read_payload(site: Path) -> dict[str, Any]:
    """Return the numbers inside a site's page."""
    packed = re.search(r'id="data">([^<]*)<', (site / "index.html").read_text())
    assert packed is not None
    payload: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return payload


def repeated(payload: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a payload of ``number`` entries, no two with the same numbers."""
    rng = np.random.default_rng(0)
    own = len(payload["entries"])
    columns: dict[str, list[Any]] = {name: [] for name in payload["columns"]}
    entries, scores, ranges = [], [], {}
    for copy in range(-(-number // own)):
        start = len(columns["k"])
        for name, values in payload["columns"].items():
            columns[name] += [_changed(name, v, copy * own, rng) for v in values]
        ranges |= {int(row) + start: value for row, value in payload["ranges"].items()}
        entries += [{**e, "id": f"{copy * own + i:012x}"} for i, e in enumerate(payload["entries"])]
        known = {e["id"]: f"{copy * own + i:012x}" for i, e in enumerate(payload["entries"])}
        for score in payload["scores"]:
            entry, _, drafter = score["of"][0].partition(".")
            scores.append({**score, "of": [f"{known[entry]}.{drafter}", *score["of"][1:]]})
    return {**payload, "columns": columns, "entries": entries, "scores": scores, "ranges": ranges}


def _changed(name: str, value: Any, shift: int, rng: np.random.Generator) -> Any:
    """Shift entry numbers, jitter measurements, keep the rest."""
    if name == "entry":
        return value + shift
    if name in ("accepted", "low", "high", "retention", "retention_low", "retention_high", "rounds"):
        return None if value is None else round(value * rng.uniform(0.9, 1.1))
    return value


def load_times(address: str, times: int = 5) -> list[tuple[float, float]]:
    """Return (seconds from opening the page to the finished table, processor seconds of its main thread)."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(times):
            tab = browser.new_page()
            session = tab.context.new_cdp_session(tab)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            start = time.perf_counter()
            tab.goto(address)
            tab.wait_for_selector("body[data-ready]")
            seconds = time.perf_counter() - start
            measured = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
            found.append((seconds, measured["ThreadTime"]))
            tab.close()
        browser.close()
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--entries", type=int, default=200)
    options = parser.parse_args()
    payload = repeated(read_payload(options.site), options.entries)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "index.html"
        target.write_text(page(payload, payload["title"]))
        table = pq.read_table(options.site / "leaderboard.parquet")
        times = -(-options.entries // len(set(table.column("entry").to_pylist())))
        size = target.stat().st_size + (options.site / "leaderboard.parquet").stat().st_size * times
        seconds = load_times(target.as_uri())
        print(
            f"{len(payload['entries'])} entries, {len(payload['columns']['k'])} rows: page "
            f"{target.stat().st_size / 1e6:.2f} MB, with the download at most {size / 1e6:.2f} MB; loads in "
            f"{statistics.median(s for s, _ in seconds):.2f} s, of which the main thread works "
            f"{statistics.median(t for _, t in seconds):.2f} s (medians of {len(seconds)})"
        )


if __name__ == "__main__":
    main()
