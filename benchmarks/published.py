"""Suites in published formats: the data directory first, then the Hugging Face hub, else one clear sentence.

Example: ``MTBENCH.load(SuiteRequest(data_dir=Path("data"), limit=8))`` reads ``data/mt_bench.jsonl`` and
returns one prompt of each of its eight categories.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.benchmarks.reading import Record, read_records, take_in_turn, unique
from specbench.errors import SpecbenchWarning, UserError
from specbench.types import Prompt, SuiteInfo, SuiteRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A data set on the Hugging Face hub, at one commit."""

    dataset: str
    revision: str
    """The full 40-digit commit: a branch name would let the prompts change under a repeated run."""
    config: str | None = None
    splits: tuple[str, ...] = ("test",)
    """Read in this order and joined."""
    data_file: str | None = None
    """One file of a repository whose files differ in their columns."""
    order_by: str | None = None
    """Field that restores the published order where the splits shuffle it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSuite:
    """A public prompt set: where it is and how a row of it becomes a prompt."""

    info: SuiteInfo
    size: int
    """How many prompts the published set has."""
    parse: Callable[[Record], Prompt]
    hub: HubSource | None = None
    url: str = ""
    """Where the published file can be had."""

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return the prompts; ``limit`` takes categories in turn.

        ``meta["source"]`` of each says which file, or which hub commit, it came from.

        Raises:
            UserError: no source has the set, or a row is malformed (file, line, what was expected).
        """
        source, records = self._records(request.data_dir)
        prompts = unique([self._prompt(record, source) for record in records], records)
        if len(prompts) != self.size:
            warnings.warn(
                f"{source} holds {len(prompts)} prompts, the published {self.info.name} has {self.size}; "
                f"download it again if you did not mean to change it",
                SpecbenchWarning,
                stacklevel=2,
            )
        return take_in_turn(prompts, request.limit, lambda prompt: prompt.category)

    def _prompt(self, record: Record, source: str) -> Prompt:
        prompt = self.parse(record)
        return Prompt(
            id=prompt.id,
            suite=prompt.suite,
            category=prompt.category,
            turns=prompt.turns,
            reference=prompt.reference,
            meta={**prompt.meta, "source": source},
        )

    def _records(self, data_dir: Path | None) -> tuple[str, list[Record]]:
        """Return (what to call the source, its rows)."""
        if data_dir is not None:
            if not data_dir.is_dir():
                raise UserError(
                    f"the data directory {data_dir} does not exist; check --data-dir or SPECBENCH_DATA"
                )
            for name in self.info.files:
                if (data_dir / name).is_file():
                    return name, list(read_records(data_dir / name))
        if self.hub is None:
            raise UserError(self._missing(data_dir, "no copy on the Hugging Face hub is known"))
        try:
            records = list(_hub_records(self.hub))
        except _Unavailable as error:
            raise UserError(self._missing(data_dir, str(error))) from error
        return f"{self.hub.dataset}@{self.hub.revision}", records

    def _missing(self, data_dir: Path | None, hub: str) -> str:
        looked = f"not in {data_dir}" if data_dir is not None else "no data directory was given"
        names = " or ".join(self.info.files)
        put = f"put {self.info.files[0]}" + (f" (from {self.url})" if self.url else "")
        return (
            f"the suite {self.info.name!r} needs the file {names}: {looked}, and {hub}; {put} in a folder "
            f"and name the folder with --data-dir or SPECBENCH_DATA"
        )


class _Unavailable(Exception):
    """The hub did not give the data set; the message completes "..., and ...; put the file ..."."""


def _hub_records(hub: HubSource) -> Iterator[Record]:
    """Yield the rows of a hub data set.

    Raises:
        _Unavailable: ``datasets`` is not installed, the hub is out of reach, or it asks for a login.
    """
    try:
        import datasets
    except ImportError as error:
        raise _Unavailable(
            f"{hub.dataset} cannot be fetched from the Hugging Face hub without the 'datasets' package "
            f"(pip install 'specbench[hub]')"
        ) from error
    rows: list[dict[str, Any]] = []
    for split in hub.splits:
        try:
            data = datasets.load_dataset(
                hub.dataset, hub.config, split=split, revision=hub.revision, data_files=hub.data_file
            )
        # The library lets through whatever its HTTP client, its cache and its parsers raise; there is no
        # common base.
        except Exception as error:
            raise _Unavailable(_reason(hub, error)) from error
        rows.extend(dict(row) for row in data)
    order_by = hub.order_by
    if order_by is not None:
        rows.sort(key=lambda row: row[order_by])
    for index, row in enumerate(rows):
        yield Record(where=f"{hub.dataset}, row {index + 1}", index=index, value=row)


def _reason(hub: HubSource, error: Exception) -> str:
    name = f"{hub.dataset} at {hub.revision[:12]}"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return f"{name} is not in the Hugging Face cache and HF_HUB_OFFLINE is set (unset it to download)"
    detail = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"{name} could not be fetched from the Hugging Face hub ({detail}; a gated set needs 'hf auth login')"
    )
