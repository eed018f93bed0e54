"""What no honest table can hold: impossible counts, rows twice, rounds that do not add up to their answer.

``round_problems`` is one cheap pass, made on every write and every load; ``identity_problems`` compares
rows with each other and is made on what strangers hand in.

Example:
    list(round_problems(table))  ->  ["num_accepted is above num_drafted in 1 row (prompt 'toy/1', round 3)"]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

ROUND_RULES: Mapping[str, str] = {
    "k is below 1": "k < 1",
    "num_accepted is negative": "num_accepted < 0",
    "num_accepted is above num_drafted": "num_accepted > num_drafted",
    "num_drafted is above k": "num_drafted > k",
    "num_emitted is neither num_accepted nor num_accepted + 1": "num_emitted - num_accepted NOT IN (0, 1)",
    "weight is not above 0 and at most 1": "NOT (isfinite(weight) AND weight > 0 AND weight <= 1 + 1e-9)",
    "round is negative": '"round" < 0',
    "start is negative": '"start" < 0',
    "turn is negative": "turn < 0",
    "temperature is negative or not finite": "NOT (temperature >= 0 AND isfinite(temperature))",
    "engine_accepted is below num_accepted": "engine_accepted < num_accepted",
    "draft_ms is negative or not finite": "NOT (draft_ms >= 0 AND isfinite(draft_ms))",
    "verify_ms is negative or not finite": "NOT (verify_ms >= 0 AND isfinite(verify_ms))",
    "margin is NaN": "isnan(margin)",
    "answer_path is neither free nor forced": "answer_path NOT IN ('free', 'forced')",
}
"""What is wrong, and the SQL condition that finds it.

Rules on floats ask isfinite first: Parquet statistics leave NaN out, so DuckDB may decide a bare
comparison from the statistics and never see the NaN.
"""

ANSWER_RULES: Mapping[str, str] = {
    "turn is negative": "turn < 0",
    "prompt_tokens is below 1": "prompt_tokens < 1 AND error IS NULL",
    "answer_tokens is below 1": "answer_tokens < 1 AND error IS NULL",
    "bos_count is negative": "bos_count < 0",
    "temperature is negative or not finite": "NOT (temperature >= 0 AND isfinite(temperature))",
    "mean_entropy is negative or not finite": "NOT (mean_entropy >= 0 AND isfinite(mean_entropy))",
    "distinct_bigrams is outside 0..1": "NOT (isfinite(distinct_bigrams) AND distinct_bigrams BETWEEN 0 AND 1)",
    "trace_seconds is negative or not finite": "NOT (trace_seconds >= 0 AND isfinite(trace_seconds))",
    "answer_path is neither free nor forced": "answer_path NOT IN ('free', 'forced')",
}

_ITEM = "run_id, suite, prompt_id, turn, condition, answer_path, drafter, runner, sampler, k"

IDENTITIES: Mapping[str, str] = {
    "one answer is there twice": """
        SELECT prompt_id FROM answers WHERE error IS NULL
        GROUP BY run_id, prompt_id, turn, condition, answer_path HAVING count(*) > 1
    """,
    "the same round is there twice": f"""
        SELECT prompt_id FROM rounds
        GROUP BY {_ITEM}, seed, temperature, "round", "start", num_accepted HAVING count(*) > 1
    """,
    "the rounds of an answer do not follow each other": f"""
        SELECT prompt_id FROM (
            SELECT prompt_id, "start", coalesce(sum(num_emitted) OVER (
                PARTITION BY {_ITEM} ORDER BY "round" ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
                0) AS walked, min(weight) OVER (PARTITION BY {_ITEM}) AS least
            FROM rounds)
        WHERE least = 1 AND walked <> "start"
    """,
    "the rounds of an answer do not add up to its length": f"""
        SELECT r.prompt_id FROM (
            SELECT {_ITEM}, sum(weight * num_emitted) AS emitted FROM rounds WHERE runner = 'replay' GROUP
            BY {_ITEM}) r
        JOIN answers a USING (run_id, prompt_id, turn, condition, answer_path)
        WHERE a.error IS NULL AND abs(1 + r.emitted - a.answer_tokens) > 1e-6 * a.answer_tokens
    """,
    "rounds belong to no answer": """
        SELECT r.prompt_id FROM (
            SELECT DISTINCT run_id, suite, prompt_id, turn, condition, answer_path, ids_hash FROM rounds) r
        ANTI JOIN answers a USING (run_id, suite, prompt_id, turn, condition, answer_path, ids_hash)
    """,
    "one prompt belongs to two suites": """
        SELECT prompt_id FROM answers GROUP BY run_id, prompt_id HAVING count(DISTINCT suite) > 1
    """,
    "a condition has two families": """
        SELECT min(prompt_id) FROM answers GROUP BY run_id, condition HAVING count(DISTINCT family) > 1
    """,
}
"""What is wrong, and the query over ``rounds`` and ``answers`` that returns the prompts where it is."""


def round_problems(table: Any) -> Iterator[str]:
    """Yield one sentence for every rule that rows of ``rounds`` break.

    Args:
        table: pyarrow table of the ``rounds`` schema.
    """
    if table.num_rows:
        with _scratch().cursor() as connection:
            connection.register("rounds", table)
            yield from rule_problems(connection, "rounds", ROUND_RULES)


@functools.cache
def _scratch() -> Any:
    """One in-memory database for all small checks: opening one takes longer than a check."""
    import duckdb

    return duckdb.connect(config={"threads": 1})


def rule_problems(connection: Any, view: str, rules: Mapping[str, str]) -> Iterator[str]:
    """Yield one sentence for every rule that rows of a view break, each with one example."""
    counts = ", ".join(f"count_if({broken})" for broken in rules.values())
    found = connection.execute(f"SELECT {counts} FROM {view}").fetchall()[0]
    for (sentence, broken), count in zip(rules.items(), found, strict=True):
        if count:
            index = '"round"' if view == "rounds" else "turn"
            # Not WHERE: Parquet statistics leave NaN out, so a filter would skip the very row groups that hold it.
            query = f"SELECT any_value((prompt_id, {index})) FILTER ({broken}) FROM {view}"
            prompt, number = connection.execute(query).fetchall()[0][0]
            rows = "1 row" if count == 1 else f"{count} rows"
            yield f"{sentence} in {rows} (prompt {prompt!r}, {index.strip(chr(34))} {number})"


def identity_problems(connection: Any) -> Iterator[str]:
    """Yield one sentence for every identity between rows that does not hold.

    Args:
        connection: DuckDB connection with the views ``rounds`` and ``answers``.
    """
    for sentence, query in IDENTITIES.items():
        found = connection.execute(f"SELECT * FROM ({query}) LIMIT 1").fetchall()
        if found:
            yield f"{sentence} (prompt {found[0][0]!r})"
