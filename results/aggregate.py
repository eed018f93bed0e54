"""From raw rounds to acceptance rates, in DuckDB: the rows never pass through Python.

Every number is a ratio of weighted sums over rounds. Rows are first summed to ``cells``, one row a (group,
prompt, accepted count), which is small whatever the number of rounds; all tables are made from cells.

Example:
    acceptance_table("runs/first")   # pyarrow.Table, one row a suite x condition x drafter x ...
    acceptance_table(["runs/a", "runs/b"], by=("run_id", "suite", "condition", "drafter", "k"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from specbench.errors import UserError
from specbench.results.checks import ANSWER_RULES, ROUND_RULES, rule_problems
from specbench.results.intervals import CLEAN, OVERALL, interval_columns
from specbench.results.schema import ACCURACY, ANSWERS, ROUNDS, TABLES, arrow_schema
from specbench.results.statistics import DRAWS
from specbench.results.store import RunStore
from specbench.results.sums import Group, prompt_groups

GROUP = (
    "run_id",
    "suite",
    "condition",
    "answer_path",
    "target",
    "drafter",
    "runner",
    "sampler",
    "temperature",
    "k",
)  # fmt: skip
"""The columns that name a row of the acceptance table, unless others are asked for."""

Source = RunStore | str | Path
_DESCRIPTIVE = ("family", "severity", "drafter_kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """What the SQL below is made from."""

    by: tuple[str, ...]
    depth: int

    @property
    def keys(self) -> str:
        return ", ".join(self.by)

    @property
    def overall(self) -> tuple[str, ...]:
        """The keys of the rows that pool all suites."""
        return tuple(c for c in self.by if c not in ("suite", "category"))


def connect(memory: str = "2GB", threads: int | None = None) -> Any:
    """Return an in-memory DuckDB connection that spills instead of growing.

    Args:
        memory: DuckDB's ``memory_limit``.
        threads: at most this many; DuckDB's own choice otherwise.
    """
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{memory}'")
    connection.execute("SET preserve_insertion_order = false")
    if threads is not None:
        connection.execute(f"SET threads = {int(threads)}")
    return connection


def register(connection: Any, sources: Source | Iterable[Source]) -> None:
    """Make the views ``rounds``, ``answers`` and ``items`` over the whole flushes of one or several runs.

    Of several runs, ``run_id`` is replaced by the run's label (see :func:`labels`): two runs of one
    configuration have the same id and must not be pooled.

    Raises:
        UserError: a source is not a run directory, is corrupt, holds impossible values or no rounds at all.
    """
    stores = open_runs(sources)
    names = labels([s.path for s in stores])
    for store in stores:
        if not store.files("rounds"):
            raise UserError(f"{store.path} holds no rounds yet; let the run finish at least one prompt")
        if not store.files("answers"):
            raise UserError(f"{store.path} holds rounds but no answers; its files were not written together")
    # An answer that failed and was got by a resumed run has two rows.
    once = """
        QUALIFY row_number() OVER (
            PARTITION BY run_id, prompt_id, turn, condition, answer_path ORDER BY error IS NOT NULL
        ) = 1
    """
    for name, columns in TABLES.items():
        selected = ", ".join(f'"{c.name}"' for c in columns if c.name != "run_id")
        parts = []
        for store, label in zip(stores, names, strict=True):
            run = "run_id" if len(stores) == 1 else f"{_quoted(label)} AS run_id"
            parts.append(f"SELECT {run}, {selected} FROM read_parquet({_files(store, name)})")
        body = " UNION ALL ".join(parts)
        connection.execute(
            f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM ({body}) {once if name == 'answers' else ''}"
        )
    _register_accuracy(connection, stores, names)
    connection.execute("CREATE OR REPLACE TEMP TABLE cells_made (keys VARCHAR[])")
    for view, rules in (("rounds", ROUND_RULES), ("answers", ANSWER_RULES)):
        for problem in rule_problems(connection, view, rules):
            where = ", ".join(str(s.path) for s in stores)
            raise UserError(f"the {view} of {where} are impossible: {problem}; the run must be made again")


def _register_accuracy(connection: Any, stores: Sequence[RunStore], names: Sequence[str]) -> None:
    """Make the table ``accuracy`` of the runs that were scored; empty where none was."""
    import pyarrow.parquet as pq

    parts = [arrow_schema("accuracy").empty_table()]
    for store, label in zip(stores, names, strict=True):
        path = store.path / "accuracy.parquet"
        if not path.exists():
            continue
        try:
            part = pq.read_table(path).cast(arrow_schema("accuracy"))
        except (OSError, ValueError, pa.ArrowInvalid) as error:
            raise UserError(f"{path} cannot be read ({error}); score the run again") from error
        if len(stores) > 1:
            part = part.set_column(0, "run_id", pa.array([label] * part.num_rows).dictionary_encode())
        parts.append(part)
    plain = pa.schema([(c.name, pa.string() if pa.types.is_dictionary(c.type) else c.type) for c in ACCURACY])
    connection.register("accuracy_rows", pa.concat_tables([p.cast(plain) for p in parts]))
    connection.execute("CREATE OR REPLACE TEMP TABLE accuracy AS SELECT * FROM accuracy_rows")


def open_runs(sources: Source | Iterable[Source]) -> list[RunStore]:
    """Open run directories for reading; open stores stay as they are.

    Raises:
        UserError: one is not a run directory or is corrupt.
    """
    several = [sources] if isinstance(sources, (RunStore, str, Path)) else list(sources)
    return [s if isinstance(s, RunStore) else RunStore(s, readonly=True) for s in several]


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each run directory: its last part, or as many parts as tell them apart."""
    parts = [p.absolute().parts for p in paths]
    for length in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        names[index] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def acceptance_table(
    sources: Source | Iterable[Source] = (),
    by: Sequence[str] = GROUP,
    *,
    connection: Any = None,
    draws: int = 0,
    seed: int = 0,
) -> Any:
    """Return one row a group with every rate of :data:`specbench.results.schema.ACCEPTANCE_DOCS`.

    Where ``by`` holds ``suite``, rows with ``suite = 'all'`` pool every suite. Retention pairs each group
    with the one that differs from it in the condition alone (``template/regular``; a forced answer is paired
    with the clean condition's free one where the clean one was not forced), over the prompts that both have.

    Args:
        sources: run directories or open stores.
        by: columns of ``rounds`` that name a group.
        connection: a connection that has :func:`register`'s views; otherwise one is opened over ``sources``.
        draws: resamples behind the interval columns; 0 leaves these columns out.
        seed: of the resamples.

    Returns:
        pyarrow.Table, sorted by its keys, overall rows last; ``m_i``, ``c_i``, ``p_i`` (and ``f_i`` where
        measured) run to the largest depth and are null beyond a row's own.

    Raises:
        UserError: a column of ``by`` does not exist, or the sources hold no rounds.
    """
    by = tuple(by)
    _check_columns(by)
    if connection is None:
        connection = connect()
        register(connection, sources)
    depth = int(connection.execute("SELECT max(k) FROM rounds").fetchall()[0][0])
    query = _Query(by=by, depth=depth)
    make_cells(connection, by)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE pooled AS {_pooled_sql(query)}")
    connection.execute(f"CREATE OR REPLACE TEMP TABLE retained AS {_retention_sql(query)}")
    connection.execute(f"CREATE OR REPLACE TEMP TABLE answered AS {_answers_sql(query)}")
    connection.execute(f"CREATE OR REPLACE TEMP TABLE forced AS {_forced_sql(query)}")
    table = connection.sql(_final_sql(query, _forced_depth(connection))).to_arrow_table()
    table = _with_accuracy(connection, table, by)
    if not draws:
        return table
    for name, values in interval_columns(connection, by, table.select(by).to_pylist(), draws, seed).items():
        table = table.append_column(name, pa.array(values, pa.float64()))
    return table


def write_acceptance(
    run: str | Path | RunStore,
    by: Sequence[str] = GROUP,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    connection: Any = None,
) -> Path:
    """Aggregate one run, with intervals, and write ``acceptance.parquet`` into its directory.

    A ``connection`` that has the run's views saves reading it again.

    Raises:
        UserError: the run holds no rounds, or the file cannot be written.
    """
    import pyarrow.parquet as pq

    store = run if isinstance(run, RunStore) else RunStore(run, readonly=True)
    table = acceptance_table(store, by, draws=draws, seed=seed, connection=connection)
    path = store.path / "acceptance.parquet"
    partial = store.path / ".acceptance.partial"
    try:
        pq.write_table(table, partial, compression="zstd")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _with_accuracy(connection: Any, table: Any, by: Sequence[str]) -> Any:
    """Append ``accuracy`` and ``accuracy_retention`` where the runs were scored and the rows name what was."""
    keys = ("run_id", "suite", "condition", "answer_path")
    if not {"suite", "condition"} <= set(by) or "category" in by:
        return table
    used = [k for k in keys if k in by]
    values = ("accuracy", "accuracy_retention")
    rows = connection.execute(
        f'SELECT {", ".join((*used, *values))} FROM accuracy WHERE "primary"'
    ).fetchall()
    if not rows:
        return table
    found = {tuple(row[: len(used)]): row[len(used) :] for row in rows}
    wanted = list(zip(*(table.column(k).to_pylist() for k in used), strict=True))
    for i, name in enumerate(values):
        column = [found[key][i] if key in found else None for key in wanted]
        table = table.append_column(name, pa.array(column, pa.float64()))
    return table


def make_cells(connection: Any, by: Sequence[str]) -> None:
    """Make the temporary table ``cells``: weighted sums per group, prompt, accepted and drafted count.

    ``suite`` and ``prompt_id`` are always kept, so that prompts of two suites never mix. Cells that are there already,
    by the same columns, stay: the tables, the robustness score and the figures of a run are all made from one set.
    """
    keys = list(dict.fromkeys([*by, "suite", "prompt_id", "num_accepted", "num_drafted", "k"]))
    made = connection.execute("SELECT keys FROM cells_made").fetchall()
    if made == [(keys,)]:
        return
    descriptive = [c for c in _DESCRIPTIVE if c not in keys]
    connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE cells AS
        SELECT {", ".join(keys)},
               {"".join(f"any_value({c}) AS {c}, " for c in descriptive)}
               sum(weight) AS weight,
               sum(weight * num_emitted) AS emitted,
               sum(CASE WHEN cut THEN weight ELSE 0 END) AS cut,
               sum(weight * draft_ms) AS draft_ms,
               sum(CASE WHEN draft_ms IS NOT NULL THEN weight END) AS draft_weight,
               sum(weight * verify_ms) AS verify_ms,
               sum(CASE WHEN verify_ms IS NOT NULL THEN weight END) AS verify_weight
        FROM rounds GROUP BY {", ".join(keys)}
        """
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE cells_made AS SELECT ?::VARCHAR[] AS keys", [keys])


def pooled_groups(connection: Any) -> tuple[list[Group], dict[str, str]]:
    """Sum a run's rounds over its suites: the groups, one a drafter, condition and so on, and each condition's family.

    Makes ``cells``, by :data:`GROUP`.
    """
    make_cells(connection, GROUP)
    families = dict(connection.execute("SELECT DISTINCT condition, family FROM answers").fetchall())
    return prompt_groups(connection, tuple(c for c in GROUP if c != "suite")), families


def _check_columns(by: Sequence[str]) -> None:
    names = [c.name for c in ROUNDS]
    usable = [n for n in names[: names.index("k") + 1] if n != "prompt_id"]
    for name in by:
        if name not in usable:
            raise UserError(f"rounds cannot be grouped by {name!r}; take one of {', '.join(usable)}")
    if not by:
        raise UserError(f"rounds must be grouped by something; keep one of {', '.join(usable)}")


def _files(store: RunStore, name: str) -> str:
    """Return the files of one table as a SQL list."""
    return "[" + ", ".join(_quoted(str(f)) for f in store.files(name)) + "]"


def _quoted(text: str) -> str:
    """Return a SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def _level(query: _Query, overall: bool) -> str:
    """Return the SELECT items of the keys at one level: per group, or with all suites pooled."""
    pooled = ("suite", "category") if overall else ()
    return ", ".join(f"'{OVERALL}' AS {c}" if c in pooled else c for c in query.by)


def _both_levels(query: _Query, select: str, source: str) -> str:
    """Return ``select`` over ``source`` per group and, where suites are kept apart, over all suites too."""
    grouped = f"SELECT {_level(query, False)}, {select} FROM {source} GROUP BY {query.keys}"
    if "suite" not in query.by:
        return grouped
    keys = f"GROUP BY {', '.join(query.overall)}" if query.overall else ""
    return f"{grouped} UNION ALL SELECT {_level(query, True)}, {select} FROM {source} {keys}"


def _steps(query: _Query, expression: str) -> str:
    """Return ``expression`` once per step, with ``{i}`` filled in."""
    return ", ".join(expression.format(i=i) for i in range(1, query.depth + 1))


def _pooled_sql(query: _Query) -> str:
    """Sums over all rounds of a group, the per-prompt mean and the macro mean."""
    kept = [c for c in _DESCRIPTIVE if c not in query.by]
    sums = f"""
        {"".join(f"any_value({c}) AS {c}, " for c in kept if _constant(c, query))}
        sum(weight) AS rounds, sum(weight * num_accepted) AS accepted, sum(emitted) AS emitted,
        sum(weight * num_drafted) AS drafted, sum(cut) AS cut_rounds, max(k) AS depth,
        count(DISTINCT (suite, prompt_id)) AS prompts,
        sum(draft_ms) / sum(draft_weight) AS draft_ms, sum(verify_ms) / sum(verify_weight) AS verify_ms,
        {_steps(query, "coalesce(sum(weight) FILTER (num_accepted >= {i}), 0) AS w_{i}")},
        {_steps(query, "coalesce(sum(weight) FILTER (num_drafted >= {i}), 0) AS d_{i}")}
    """
    inner = list(dict.fromkeys([*query.by, "suite", "prompt_id"]))
    per_prompt = f"""
        (SELECT {", ".join(inner)}, sum(weight * num_accepted) / sum(weight) AS prompt_mean
         FROM cells GROUP BY {", ".join(inner)})
    """
    means = _both_levels(query, "avg(prompt_mean) AS prompt_mean_accepted_per_round", per_prompt)
    return f"""
        SELECT s.*, p.prompt_mean_accepted_per_round, g.macro FROM ({_both_levels(query, sums, "cells")}) s
        JOIN ({means}) p ON {_same("s", "p", query.by)}
        LEFT JOIN ({_macro_sql(query)}) g ON {_same("s", "g", query.by)}
    """


def _macro_sql(query: _Query) -> str:
    """Mean over suites of each suite's pooled rate, for the rows that hold several suites."""
    overall = "suite" in query.by
    keys = query.overall if overall else query.by
    grouped = f"GROUP BY {', '.join(keys)}" if keys else ""
    return f"""
        SELECT {_level(query, overall)}, avg(suite_mean) AS macro
        FROM (SELECT {", ".join([*keys, "suite"])}, sum(weight * num_accepted) / sum(weight) AS suite_mean
              FROM cells GROUP BY {", ".join([*keys, "suite"])})
        {grouped}
    """


def _constant(column: str, query: _Query) -> bool:
    """Whether a descriptive column follows from the keys."""
    return ("drafter" if column == "drafter_kind" else "condition") in query.by


def _same(left: str, right: str, columns: Iterable[str]) -> str:
    return " AND ".join(f"{left}.{c} IS NOT DISTINCT FROM {right}.{c}" for c in columns) or "TRUE"


def _retention_sql(query: _Query) -> str:
    """Ratio to the clean condition over the prompts that both have, per group and with all suites pooled."""
    if "condition" not in query.by:
        none = "NULL::DOUBLE AS retention, NULL::BIGINT AS retention_prompts"
        return f"SELECT {', '.join([*query.by, none])} FROM cells LIMIT 0"
    inner = list(dict.fromkeys([*query.by, "suite", "prompt_id"]))
    shared = [
        c for c in inner if c not in ("condition", "answer_path", *_DESCRIPTIVE, "template_hash", "ids_hash")
    ]
    path = "answer_path" if "answer_path" in query.by else "'free'"
    prompt = f"""
        (SELECT {", ".join(inner)}, sum(weight * num_accepted) AS a, sum(weight) AS w
         FROM cells GROUP BY {", ".join(inner)})
    """
    own_path = "x.answer_path" if "answer_path" in query.by else path
    # A forced answer under the clean condition is the clean answer itself: 'free' stands in for it.
    clean = f"""
        (SELECT {", ".join(shared)}, {path} AS path, a, w FROM {prompt} WHERE condition = '{CLEAN}')
    """
    paired = f"""
        (SELECT {", ".join(f"x.{c}" for c in inner)}, x.a, x.w,
                coalesce(same.a, free.a) AS clean_a, coalesce(same.w, free.w) AS clean_w
         FROM {prompt} x
         LEFT JOIN {clean} same ON {_same("x", "same", shared)} AND same.path = {own_path}
         LEFT JOIN {clean} free ON {_same("x", "free", shared)} AND free.path = 'free'
         WHERE coalesce(same.w, free.w) IS NOT NULL)
    """
    ratio = """
        (sum(a) / sum(w)) / nullif(sum(clean_a) / sum(clean_w), 0) AS retention,
        count(DISTINCT (suite, prompt_id)) AS retention_prompts
    """
    return _both_levels(query, ratio, paired)


def _answers_sql(query: _Query) -> str:
    """Number, degeneracy and entropy of the target answers behind each group."""
    known = {c.name for c in ANSWERS}
    keys = [c for c in query.by if c in known]
    narrowed = _Query(by=tuple(keys), depth=query.depth)
    select = """
        count(*) AS answers, avg(degenerate::INT) AS degenerate_share, avg(mean_entropy) AS mean_entropy
    """
    source = "(SELECT * FROM answers WHERE error IS NULL)"
    if not keys:
        return f"SELECT {select} FROM {source}"
    return _both_levels(narrowed, select, source)


def _forced_keys(query: _Query) -> list[str]:
    """Keys of a group that ``items`` knows; the suite is taken from the answers."""
    known = ("run_id", "suite", "condition", "answer_path", "drafter", "runner", "sampler")
    return [c for c in query.by if c in known]


def _forced_sql(query: _Query) -> str:
    """Forced-chain hits and positions per step."""
    narrowed = _Query(by=tuple(_forced_keys(query)), depth=query.depth)
    source = """
        (SELECT i.run_id, a.suite, i.condition, i.answer_path, i.drafter, i.runner, i.sampler,
                unnest(i.forced_positions) AS positions, unnest(i.forced_hits) AS hits,
                unnest(range(1, len(i.forced_positions) + 1)) AS step
         FROM items i
         JOIN (SELECT DISTINCT run_id, prompt_id, suite FROM answers) a USING (run_id, prompt_id)
         WHERE i.error IS NULL AND i.forced_positions IS NOT NULL)
    """
    select = _steps(
        query, "sum(hits) FILTER (step = {i}) / nullif(sum(positions) FILTER (step = {i}), 0) AS f_{i}"
    )
    if not narrowed.by:
        return f"SELECT {select} FROM {source}"
    return _both_levels(narrowed, select, source)


def _forced_depth(connection: Any) -> int:
    found = connection.execute("SELECT max(len(forced_positions)) FROM items WHERE error IS NULL").fetchall()[
        0
    ][0]
    return int(found or 0)


def _final_sql(query: _Query, forced_depth: int) -> str:
    """Put the columns in order; rates beyond a row's own depth are null."""
    kept = "".join(f"s.{c}, " for c in _DESCRIPTIVE if c not in query.by and _constant(c, query))
    in_answers = {c.name for c in ANSWERS}
    steps = range(1, min(forced_depth, query.depth) + 1)
    forced = "".join(f"CASE WHEN {i} <= depth THEN f.f_{i} END AS f_{i}, " for i in steps)
    return f"""
        SELECT {", ".join(f"s.{c}" for c in query.by)}, {kept}
               accepted / rounds AS accepted_per_round,
               accepted / rounds + 1 AS tokens_per_round,
               emitted / rounds AS emitted_per_round,
               r.retention, r.retention_prompts,
               prompt_mean_accepted_per_round, {_macro(query)} AS macro_accepted_per_round,
               {_steps(query, "CASE WHEN {i} <= depth THEN w_{i} / rounds END AS m_{i}")},
               {_conditional(query)},
               {_steps(query, "CASE WHEN {i} <= depth THEN d_{i} / rounds END AS p_{i}")},
               {forced}
               rounds, accepted, drafted / rounds AS drafted_per_round, cut_rounds,
               prompts, a.answers, a.degenerate_share, a.mean_entropy, draft_ms, verify_ms
        FROM pooled s
        LEFT JOIN retained r ON {_same("s", "r", query.by)}
        LEFT JOIN answered a ON {_same("s", "a", [c for c in query.by if c in in_answers])}
        LEFT JOIN forced f ON {_same("s", "f", _forced_keys(query))}
        ORDER BY {_order(query)}
    """


def _conditional(query: _Query) -> str:
    """Return the c_i; step 1 is conditioned on every round."""
    below = ["rounds", *(f"w_{i}" for i in range(1, query.depth))]
    return ", ".join(
        f"CASE WHEN {i} <= depth THEN w_{i} / nullif({w}, 0) END AS c_{i}"
        for i, w in enumerate(below, start=1)
    )


def _macro(query: _Query) -> str:
    """Per-suite rows are their own macro mean."""
    return "coalesce(macro, accepted / rounds)" if "suite" in query.by else "macro"


def _order(query: _Query) -> str:
    """Overall rows last, the clean condition first, otherwise by the keys."""
    terms = []
    for name in query.by:
        if name == "suite":
            terms.append(f"s.suite = '{OVERALL}'")
        if name == "condition":
            continue
        terms.append(f"s.{name}")
    if "condition" in query.by:
        terms += [f"s.condition <> '{CLEAN}'", "s.condition"]
    return ", ".join(terms) or "1"
