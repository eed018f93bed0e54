"""From checked entries to the numbers the page shows.

Strings are numbered once and rates are stored as thousandths, column by column, so that 200 entries stay
small.

Example:
    board = collect(["entries/a", "entries/b"])
    board.payload["columns"]["accepted"][0]    # 2345: 2.345 draft tokens accepted per round
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from specbench.errors import UserError
from specbench.results.aggregate import acceptance_table, connect, register
from specbench.results.entry import Entry, validate_entry
from specbench.results.intervals import CLEAN, OVERALL
from specbench.results.robustness import FORMULA, Robustness, robustness
from specbench.results.runinfo import DrafterFacts

DRAWS = 2_000
"""Resamples behind the page's intervals: their ends move by about a fortieth of their width."""

_SHOWN = ("suite", "condition", "answer_path", "target", "drafter", "runner", "sampler", "temperature", "k")
_MEASURED = (
    "accepted_per_round",
    "accepted_low",
    "accepted_high",
    "retention",
    "retention_low",
    "retention_high",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What the page needs."""

    payload: Mapping[str, Any]
    table: Any
    """All rows as a pyarrow table, for the download."""
    refused: Mapping[str, str]
    """Directory name -> why it is not shown."""
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class _Names:
    """Numbers for strings, in order of appearance."""

    known: dict[Any, int] = field(default_factory=dict)

    def __call__(self, value: Any) -> int:
        return self.known.setdefault(value, len(self.known))


def collect(paths: Sequence[str | Path], *, draws: int = DRAWS, seed: int = 0) -> Board:
    """Check entries and compute every number from their rounds.

    Args:
        paths: entry directories.
        draws: resamples behind the intervals.
        seed: of the resamples.

    Raises:
        UserError: not a single entry can be shown.
    """
    accepted, refused = _checked(paths)
    if not accepted:
        reasons = "; ".join(refused.values()) or "no entries were given"
        raise UserError(f"there is nothing to show: {reasons}")
    builder = _Builder(draws=draws, seed=seed)
    for entry in accepted:
        builder.add(entry)
    return Board(payload=builder.payload(), table=builder.table(), refused=refused, entries=tuple(accepted))


def _checked(paths: Sequence[str | Path]) -> tuple[list[Entry], dict[str, str]]:
    """Validate entries one by one, then against each other."""
    accepted: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    for path in sorted(map(Path, paths)):
        try:
            entry = validate_entry(path)
            if entry.digest in accepted:
                raise UserError(
                    f"entry {path.name} is refused: {accepted[entry.digest].path.name} is the same entry"
                )
            accepted[entry.digest] = entry
        except UserError as error:
            refused[path.name] = str(error)
    entries = sorted(accepted.values(), key=lambda e: (e.info.started, e.digest))
    for entry, reason in list(_other_versions(entries)):
        refused[entry.path.name] = f"entry {entry.path.name} is refused: {reason}"
        entries.remove(entry)
    return entries, refused


def _other_versions(entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
    """Find entries whose rendered prompts are not those of the others: another suite or condition version.

    For one target, a prompt under a condition has one sequence of token ids. Most entries decide which;
    the earliest where they are even. Later turns follow the target's answer and are not compared.
    """
    hashes: dict[str, dict[tuple[str, str, str], str]] = {}
    votes: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for entry in entries:
        connection = connect()
        register(connection, entry.path)
        rows = connection.execute(
            """
            SELECT DISTINCT prompt_id, condition, ids_hash FROM answers
            WHERE turn = 0 AND answer_path = 'free' AND error IS NULL
            """
        ).fetchall()
        hashes[entry.digest] = {(entry.info.target_fingerprint, p, c): h for p, c, h in rows}
        for key, value in hashes[entry.digest].items():
            votes[key][value] += 1
    found = []
    for entry in entries:
        own = hashes[entry.digest]
        # most_common keeps the order of insertion among equals: the earliest entry's.
        odd = sorted(key for key, value in own.items() if votes[key].most_common(1)[0][0] != value)
        if odd:
            _, prompt, condition = odd[0]
            found.append(
                (
                    entry,
                    f"{len(odd)} of its {len(own)} prompts (first: {prompt!r} under {condition}) have other token "
                    "ids than in the entries of the same target before it; it was run under another version of the "
                    "suite or the condition",
                )
            )
    return found


class _Builder:
    """Collects rows entry by entry."""

    def __init__(self, draws: int, seed: int) -> None:
        self.draws, self.seed = draws, seed
        self.entries: list[dict[str, Any]] = []
        self.names: dict[str, _Names] = defaultdict(_Names)
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.ranges: dict[int, list[list[float | None]]] = {}
        self.scores: list[dict[str, Any]] = []
        self.tables: list[Any] = []

    def add(self, entry: Entry) -> None:
        """Compute one entry's rows and scores."""
        connection = connect()
        register(connection, entry.path)
        by = ("run_id", *_SHOWN)
        table = acceptance_table(by=by, connection=connection, draws=self.draws, seed=self.seed)
        prompt_sets = _prompt_sets(connection)
        drafters = {name: number for number, name in enumerate(entry.info.drafters)}
        number = len(self.entries)
        self.entries.append(_entry_facts(entry))
        for row in table.to_pylist():
            self._row(number, drafters[row["drafter"]], row, prompt_sets)
        for score in robustness(connection=connection, draws=self.draws, seed=self.seed):
            address = f"{entry.digest}.{drafters[score.keys['drafter']]}"
            self.scores.append(_score_facts(score, address))
        self.tables.append(_download(table, entry))

    def _row(self, entry: int, drafter: int, row: Mapping[str, Any], prompt_sets: Mapping[Any, str]) -> None:
        columns, names = self.columns, self.names
        steps = range(1, row["k"] + 1)
        columns["entry"].append(entry)
        columns["drafter"].append(drafter)
        columns["suite"].append(names["suites"](row["suite"]))
        columns["condition"].append(names["conditions"]((row["condition"], row["family"])))
        columns["path"].append(names["paths"](row["answer_path"]))
        columns["runner"].append(names["runners"](row["runner"]))
        columns["sampling"].append(names["samplings"](_sampling(row)))
        columns["prompt_set"].append(
            names["prompt_sets"](prompt_sets[row["suite"], row["condition"], row["answer_path"]])
        )
        columns["k"].append(row["k"])
        for short, name in zip(
            ("accepted", "low", "high", "retention", "retention_low", "retention_high"),
            _MEASURED,
            strict=True,
        ):
            clean = row["condition"] == CLEAN and short.startswith("retention")
            columns[short].append(None if clean else _thousandths(row[name]))
        columns["draft_ms"].append(_thousandths(row["draft_ms"]))
        columns["verify_ms"].append(_thousandths(row["verify_ms"]))
        columns["rounds"].append(_short(row["rounds"]))
        columns["prompts"].append(row["prompts"])
        columns["at_least"].append([_short(row[f"m_{i}"] * row["rounds"]) for i in steps])
        if row["condition"] == CLEAN and row["suite"] == OVERALL:
            self.ranges[len(columns["k"]) - 1] = [
                [_rounded(row[f"c_{i}_{end}"]) for i in steps] for end in ("low", "high")
            ]

    def payload(self) -> dict[str, Any]:
        """Return everything the page reads."""
        order = sorted(self.names["conditions"].known, key=lambda c: (c[1], c[0]))
        renumbered = {condition: number for number, condition in enumerate(order)}
        by_number = {number: condition for condition, number in self.names["conditions"].known.items()}
        columns = dict(self.columns)
        columns["condition"] = [renumbered[by_number[n]] for n in columns["condition"]]
        return {
            "entries": self.entries,
            "columns": columns,
            "ranges": self.ranges,
            "scores": self.scores,
            "conditions": [list(c) for c in order],
            "formula": FORMULA,
            **{
                name: list(self.names[name].known)
                for name in ("suites", "paths", "runners", "samplings", "prompt_sets")
            },
        }

    def table(self) -> Any:
        """Return all rows for the download; columns an entry lacks (deeper steps) are null."""
        return pa.concat_tables(self.tables, promote_options="default").unify_dictionaries()


def _prompt_sets(connection: Any) -> dict[tuple[str, str, str], str]:
    """Name the prompts behind every (suite, condition, path): their number and a hash.

    The hash is over the prompts' token ids under the clean condition (their own where there is none), so
    that the same prompts under another condition have the same name.
    """
    found: dict[tuple[str, str, str], str] = {}
    for suite in ("a.suite", f"'{OVERALL}'"):
        rows = connection.execute(
            f"""
            WITH first AS (SELECT * FROM answers WHERE turn = 0 AND error IS NULL)
            SELECT {suite}, a.condition, a.answer_path, count(*),
                   md5(string_agg(a.prompt_id || ' ' || coalesce(c.ids_hash, a.ids_hash), ';' ORDER BY
                   a.prompt_id))
            FROM first a LEFT JOIN first c ON c.prompt_id = a.prompt_id AND c.condition = '{CLEAN}' AND
            c.answer_path = 'free' GROUP BY 1, 2, 3
            """
        ).fetchall()
        found |= {(s, c, p): f"{number} prompts, {digest[:6]}" for s, c, p, number, digest in rows}
    return found


def _entry_facts(entry: Entry) -> dict[str, Any]:
    info = entry.info
    return {
        "id": entry.digest,
        "run_id": info.run_id,
        "target": info.target,
        "target_fingerprint": info.target_fingerprint,
        "command": info.command,
        "started": info.started,
        "version": info.specbench_version,
        "versions": dict(info.versions),
        "prompts_hash": info.prompts_hash,
        "machine": info.machine,
        "drafters": [_drafter_facts(d) for d in info.drafters.values()],
    }


def _drafter_facts(drafter: DrafterFacts) -> dict[str, Any]:
    return {
        "name": drafter.name,
        "kind": drafter.kind,
        "fingerprint": drafter.fingerprint,
        "num_parameters": drafter.num_parameters,
        "trained_depth": drafter.trained_depth,
        "training_data": drafter.training_data,
        "settings": dict(drafter.settings),
    }


def _score_facts(score: Robustness, address: str) -> dict[str, Any]:
    return {
        "of": [
            address,
            score.keys["runner"],
            _sampling(score.keys),
            score.keys["k"],
            score.keys["answer_path"],
        ],
        "score": round(score.score, 2),
        "low": None if score.low is None else round(score.low, 2),
        "high": None if score.high is None else round(score.high, 2),
        "families": [
            [name, _rounded(f.mean), _rounded(f.worst), f.worst_condition, len(f.retentions)]
            for name, f in score.families.items()
        ],
        "sensitivity": [[name, round(value, 2)] for name, value in score.sensitivity.items()],
    }


def _sampling(keys: Mapping[str, Any]) -> str:
    if keys["sampler"] == "greedy":
        return "greedy"
    return f"{keys['sampler']}, temperature {keys['temperature']:g}"


def _thousandths(value: float | None) -> int | None:
    return None if value is None else round(1000 * value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _short(value: float) -> float | int:
    """Return a count of rounds; those of an expectation are fractional."""
    return round(value) if abs(value - round(value)) < 0.05 else round(value, 1)


def _download(table: Any, entry: Entry) -> Any:
    """Return the rows people download: keys, rates with intervals, and the counts the others follow from."""
    depth = max(int(c[2:]) for c in table.column_names if c.startswith("m_"))
    rounds = table.column("rounds").to_numpy()
    columns: dict[str, Any] = {
        "entry": pa.array([entry.digest] * table.num_rows).dictionary_encode(),
        "run_id": table.column("run_id"),
    }
    for name in _SHOWN:
        column = table.column(name).combine_chunks()
        columns[name] = column.dictionary_encode() if pa.types.is_string(column.type) else column
    for name in _MEASURED:
        rounded = [None if v is None else round(v, 4) for v in table.column(name).to_pylist()]
        columns[name] = pa.array(rounded, pa.float32())
    columns["rounds"] = pa.array(rounds.round(2), pa.float32())
    columns["prompts"] = table.column("prompts").cast(pa.int32())
    for i in range(1, depth + 1):
        rates = table.column(f"m_{i}").to_pylist()
        counts = [None if m is None else round(m * n, 2) for m, n in zip(rates, rounds, strict=True)]
        columns[f"rounds_with_{i}"] = pa.array(counts, pa.float32())
    return pa.table(columns)
