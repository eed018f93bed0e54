"""The tables a run leaves behind: every column with its type and its meaning.

Three tables are stored as Parquet; everything printed is derived from them.

``rounds``   one row a draft + verify cycle
``answers``  one row a target answer
``items``    one row a (answer, drafter, runner, sampler), finished or failed; a run resumes from it

Example of a ``rounds`` row (some columns):
    {"suite": "mtbench", "prompt_id": "mtbench/81", "turn": 0, "condition": "template/regular",
     "drafter": "ngram", "k": 8, "round": 3, "start": 11, "num_drafted": 8, "num_accepted": 2,
     "num_emitted": 3, "weight": 1.0}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from specbench.errors import UserError

SCHEMA_VERSION = 1
"""Raised whenever a column changes its name, type or meaning; ``migrate`` knows the older ones."""

_VERSION_KEY = b"specbench.schema_version"
_TABLE_KEY = b"specbench.table"
_DOCS_KEY = b"specbench.columns"

KEY = pa.dictionary(pa.int32(), pa.string())
"""Strings that repeat from row to row are stored once per file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One documented column."""

    name: str
    type: Any
    """A pyarrow type."""
    doc: str
    nullable: bool = False


def _column(name: str, type: Any, doc: str, nullable: bool = False) -> Column:
    return Column(name=name, type=type, doc=doc, nullable=nullable)


_ANSWER_KEYS = (
    _column("run_id", KEY, "names the run; the same in run.json"),
    _column("suite", KEY, "prompt set, such as mtbench"),
    _column("category", KEY, "the suite's own division, such as writing"),
    _column("prompt_id", KEY, "suite/name; the unit of all statistics"),
    _column("turn", pa.int32(), "0 for the first user turn of the prompt"),
    _column("condition", KEY, "family/name; template/regular is the clean one"),
    _column("family", KEY, "the condition's family, such as template"),
    _column("severity", pa.int32(), "0 clean, 1 seen daily, 2 a common mistake, 3 stress"),
    _column(
        "answer_path",
        KEY,
        "free: the condition's own target answer; forced: the clean answer replayed under it",
    ),
    _column("target", KEY, "name of the model whose output is reproduced"),
    _column("seed", pa.int64(), "seed of the run"),
    _column("temperature", pa.float64(), "of the target's sampling law; 0 is greedy"),
    _column(
        "ids_hash",
        KEY,
        "first 16 hex digits of the SHA-256 over the prompt's token ids (little-endian int64)",
    ),
    _column("template_hash", KEY, "hash of the chat template text that was used; empty where none was"),
)

_DRAFTER_KEYS = (
    _column("drafter", KEY, "as the user wrote it; unique within a run"),
    _column("drafter_kind", KEY, "ngram, draft-lm, eagle3, mtp, dflash, ..."),
    _column("runner", KEY, "what counted the round: replay, decode, vllm, ..."),
    _column("sampler", KEY, "how drafts are accepted: greedy, match (one-hot drafts) or rejection"),
)

ROUNDS = (
    *_ANSWER_KEYS,
    *_DRAFTER_KEYS,
    _column("k", pa.int32(), "depth: draft tokens proposed in one round at most"),
    _column("round", pa.int32(), "index of the round within its answer, from 0"),
    _column("start", pa.int32(), "index within the answer of the newest known token when the round starts"),
    _column("num_drafted", pa.int32(), "draft tokens proposed in this round, 0..k"),
    _column(
        "num_accepted", pa.int32(), "a: draft tokens of this round that the user receives, 0..num_drafted"
    ),
    _column(
        "num_emitted", pa.int32(), "a + 1 (the target's own token), or a where the answer ended before it"
    ),
    _column("cut", pa.bool_(), "the answer's end limited the round: fewer than k tokens were left to accept"),
    _column(
        "weight",
        pa.float64(),
        "1 for a round that happened; the probability of (start, a) where a row is a term of an expectation "
        "over rejection sampling. Every sum is weighted by it",
    ),
    _column(
        "engine_accepted", pa.int32(), "the engine's own count, tokens after the answer's end included", True
    ),
    _column("draft_ms", pa.float64(), "time to propose, milliseconds", True),
    _column("verify_ms", pa.float64(), "time of the target's pass over the drafts, milliseconds", True),
    _column(
        "margin", pa.float64(), "target's top-1 minus top-2 logit at the token that ended the round", True
    ),
)

ANSWERS = (
    *_ANSWER_KEYS,
    _column("bos_count", pa.int32(), "BOS tokens in the prompt as rendered"),
    _column("prompt_tokens", pa.int32(), "length of the prompt in target tokens"),
    _column("answer_tokens", pa.int32(), "length of the answer in target tokens"),
    _column("answer_ids", pa.list_(pa.int32()), "token ids of the answer"),
    _column(
        "finish", KEY, "stop: the last token is a stop token; length: cut by the limit; empty after a failure"
    ),
    _column("mean_entropy", pa.float64(), "mean entropy in nats of the target's law over the answer", True),
    _column(
        "distinct_bigrams", pa.float64(), "different token pairs / token pairs of the answer, 0..1", True
    ),
    _column("degenerate", pa.bool_(), "the answer repeats itself so much that its acceptance says little"),
    _column(
        "notes", pa.list_(pa.string()), "declared fallbacks of the rendering and anything else worth knowing"
    ),
    _column(
        "trace_seconds", pa.float64(), "time the target took for this answer (its share of a batch)", True
    ),
    _column("error", pa.string(), "why there is no answer; null where there is one", True),
)

ITEMS = (
    _column("run_id", KEY, "names the run"),
    _column("prompt_id", KEY, "suite/name"),
    _column("turn", pa.int32(), "0 for the first user turn of the prompt"),
    _column("condition", KEY, "family/name"),
    _column("answer_path", KEY, "free or forced"),
    *(c for c in _DRAFTER_KEYS if c.name != "drafter_kind"),
    _column("num_rows", pa.int64(), "rows of this item in rounds, all depths together"),
    _column("num_nonfinite", pa.int64(), "positions whose drafter logits held a NaN or an infinity"),
    _column(
        "forced_positions",
        pa.list_(pa.int64()),
        "per step 1..k: positions at which a chain fed with the target's own tokens was scored; null where "
        "not asked for",
        True,
    ),
    _column(
        "forced_hits",
        pa.list_(pa.int64()),
        "per step 1..k: those where the drafter's token was the target's",
        True,
    ),
    _column("seconds", pa.float64(), "time the drafter took for this item (its share of a batch)", True),
    _column("error", pa.string(), "why the item failed; null where it is complete", True),
)

_SCORE_KEYS = (
    *(c for c in _ANSWER_KEYS if c.name in ("run_id", "suite", "condition", "family", "answer_path")),
    _column("task", KEY, "what scored: a task of lm-eval, or specbench's own scorer of the suite"),
    _column("version", KEY, "of that task"),
    _column("filter", KEY, "how the answer was read before it was compared, by lm-eval's name"),
    _column("metric", KEY, "what was compared, by lm-eval's name"),
    _column("primary", pa.bool_(), "the one pair of filter and metric that stands beside acceptance"),
)

SCORES = (
    *_SCORE_KEYS,
    _column("prompt_id", KEY, "suite/name"),
    _column("turn", pa.int32(), "0 for the first user turn of the prompt"),
    _column("num_fewshot", pa.int32(), "solved examples in the prompt, where the task has them", True),
    _column("fewshot_seed", pa.int64(), "seed of their choice", True),
    _column("value", pa.float64(), "the metric of this answer; null where it exists over many only", True),
    _column("text", pa.string(), "the answer as it was scored: special tokens out, cut at the stop string"),
)

ACCURACY = (
    *_SCORE_KEYS,
    _column("higher_is_better", pa.bool_(), "whether more is better"),
    _column("accuracy", pa.float64(), "the metric over all answers, aggregated as the task says"),
    _column("accuracy_low", pa.float64(), "lower end of its 95 % interval: bootstrap over prompts", True),
    _column("accuracy_high", pa.float64(), "upper end", True),
    _column("scored", pa.int64(), "answers scored"),
    _column(
        "accuracy_retention",
        pa.float64(),
        "accuracy / the same under template/regular, over the prompts scored under both; null under the clean one",
        True,
    ),
    _column("accuracy_retention_low", pa.float64(), "lower end of its 95 % interval, paired by prompt", True),
    _column("accuracy_retention_high", pa.float64(), "upper end", True),
)

SCORED: Mapping[str, tuple[Column, ...]] = {"scores": SCORES, "accuracy": ACCURACY}
"""One file each, written when a run is scored: ``scores.parquet`` and ``accuracy.parquet``."""

TABLES: Mapping[str, tuple[Column, ...]] = {"rounds": ROUNDS, "answers": ANSWERS, "items": ITEMS}

ACCEPTANCE_DOCS: Mapping[str, str] = {
    "accepted_per_round": "accepted draft tokens / rounds, pooled over all rounds; the target's own token is "
    "NOT counted. Equals m_1 + ... + m_k",
    "tokens_per_round": "accepted_per_round + 1: what EAGLE, vLLM, SGLang and DFlash call acceptance length",
    "emitted_per_round": "tokens the user receives / rounds; below tokens_per_round where an answer ends "
    "inside accepted tokens",
    "retention": "accepted_per_round under the condition / the same under template/regular, each over the "
    "prompts present in both",
    "retention_prompts": "prompts that retention is paired on",
    "prompt_mean_accepted_per_round": "mean over prompts of each prompt's own accepted_per_round",
    "macro_accepted_per_round": "mean over suites of each suite's pooled accepted_per_round",
    "m_i": "marginal rate: rounds with at least i accepted / ALL rounds, those that drafted fewer included",
    "c_i": "conditional rate: rounds with at least i accepted / rounds with at least i-1 accepted",
    "p_i": "proposal rate: rounds that drafted at least i tokens / all rounds; m_i / p_i is the marginal "
    "rate among rounds that drafted that far",
    "f_i": "forced-chain rate: step i right in a chain fed with the target's own tokens, whatever the "
    "earlier steps did; only where full chains were asked for",
    "rounds": "number of rounds (sum of weights)",
    "accepted": "accepted draft tokens (weighted)",
    "drafted_per_round": "draft tokens proposed / rounds",
    "cut_rounds": "rounds limited by the answer's end (weighted); they are counted like all others",
    "prompts": "prompts with at least one round",
    "answers": "target answers under this condition",
    "degenerate_share": "share of those answers that repeat themselves",
    "mean_entropy": "mean over those answers of the target's mean entropy, nats",
    "draft_ms": "mean time to propose per round, where measured",
    "verify_ms": "mean time of the target's pass per round, where measured",
    "accepted_low": "lower end of the 95 % interval of accepted_per_round (bootstrap over prompts)",
    "accepted_high": "upper end",
    "retention_low": "lower end of the 95 % interval of retention: bootstrap over the paired prompts",
    "retention_high": "upper end",
    "retention_detectable": "smallest change of retention that these prompts show with probability 0.8",
    "c_i_low": "lower end of the 95 % interval of c_i",
    "c_i_high": "upper end",
    "accuracy": "score of the same answers, where the run was scored: accuracy.parquet's primary metric",
    "accuracy_retention": "accuracy under the condition / under template/regular, over the prompts of both",
}
"""What the columns of ``acceptance.parquet`` mean, its keys aside."""


def arrow_schema(table: str) -> Any:
    """Return the Arrow schema of one table, with the docs in the fields and the version in the metadata.

    Args:
        table: ``rounds``, ``answers``, ``items``, ``scores`` or ``accuracy``.
    """
    columns = {**TABLES, **SCORED}[table]
    fields = [pa.field(c.name, c.type, nullable=c.nullable, metadata={"doc": c.doc}) for c in columns]
    metadata = {
        _VERSION_KEY: str(SCHEMA_VERSION).encode(),
        _TABLE_KEY: table.encode(),
        _DOCS_KEY: json.dumps({c.name: c.doc for c in columns}).encode(),
    }
    return pa.schema(fields, metadata=metadata)


def schema_version(schema: Any) -> int | None:
    """Return the version an Arrow schema was written under, or None where it is not one of ours."""
    value = (schema.metadata or {}).get(_VERSION_KEY)
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


def to_table(name: str, columns: Mapping[str, Any]) -> Any:
    """Build an Arrow table of the schema ``name`` from columns of one length; missing nullable ones are null.

    Raises:
        UserError: a column is missing, unknown, of another type, or null where it must not be.
    """
    schema = arrow_schema(name)
    unknown = sorted(set(columns) - set(schema.names))
    if unknown:
        raise UserError(f"{name} has no column {unknown[0]!r}; `specbench schema` lists them")
    length = len(next(iter(columns.values()))) if columns else 0
    arrays = []
    for field in schema:
        if field.name not in columns and not field.nullable:
            raise UserError(f"{name} needs the column {field.name!r}; `specbench schema` lists them")
        values = columns.get(field.name)
        array = pa.nulls(length, field.type) if values is None else _array(name, field, values)
        if array.null_count and not field.nullable:
            raise UserError(f"the column {field.name!r} of {name} must not be null")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(name: str, field: Any, values: Any) -> Any:
    """Convert one column, dictionaries included."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    try:
        if isinstance(values, pa.Array):
            return values if values.type == field.type else values.cast(field.type)
        if pa.types.is_dictionary(field.type):
            return pa.array(values, type=field.type.value_type).dictionary_encode()
        return pa.array(values, type=field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise UserError(
            f"the column {field.name!r} of {name} must be {_type_name(field.type)}: {error}"
        ) from error


def _type_name(type: Any) -> str:
    return "string" if pa.types.is_dictionary(type) else str(type).replace("item: ", "")


def schema_text() -> str:
    """Return every table and column with type and meaning, as ``specbench schema`` prints it."""
    lines = [f"schema version {SCHEMA_VERSION}"]
    for table, columns in TABLES.items():
        lines += ["", f"{table}/*.parquet"]
        for c in columns:
            kind = _type_name(c.type) + (", may be null" if c.nullable else "")
            lines.append(f"  {c.name:<17} {kind}")
            lines.append(f"  {'':<17} {c.doc}")
    for table, columns in SCORED.items():
        lines += ["", f"{table}.parquet (runs with --score)"]
        for c in columns:
            kind = _type_name(c.type) + (", may be null" if c.nullable else "")
            lines += [f"  {c.name:<17} {kind}", f"  {'':<17} {c.doc}"]
    lines += ["", "acceptance.parquet (derived; also holds the keys of its rows)"]
    for column, doc in ACCEPTANCE_DOCS.items():
        lines += [f"  {column}", f"  {'':<17} {doc}"]
    return "\n".join(lines) + "\n"
