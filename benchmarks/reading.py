"""Reading prompt files so that every complaint names the file, the line and what was expected.

Example: ``for record in read_records(Path("mt_bench.jsonl")): record.value["turns"]``
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specbench.errors import UserError
from specbench.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One JSON object of a prompt file or of a hub data set, with the words that name its place."""

    where: str
    """``mt_bench.jsonl, line 3`` or ``openai/gsm8k, row 3``."""
    index: int
    """0 for the first record."""
    value: Mapping[str, Any]

    def fail(self, expected: str) -> UserError:
        """Return the error that says what was expected here."""
        return UserError(f"{self.where}: expected {expected}")

    def text(self, *names: str) -> str:
        """Return the first of the fields ``names`` that is there; it must be a non-blank string.

        Raises:
            UserError: none of them is there, or it is no text.
        """
        value = next((self.value[name] for name in names if name in self.value), None)
        if not isinstance(value, str) or not value.strip():
            wanted = " or ".join(repr(name) for name in names)
            raise self.fail(f"a field {wanted} that is a non-empty string, got {_shown(value)}")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return the first of the fields ``names`` that is there; it must be a list of non-blank strings.

        Raises:
            UserError: none of them is there, or it is no such list.
        """
        value = next((self.value[name] for name in names if name in self.value), None)
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(t, str) and t.strip() for t in value)
        ):
            wanted = " or ".join(repr(name) for name in names)
            raise self.fail(f"a field {wanted} that is a list of non-empty strings, got {_shown(value)}")
        return tuple(value)

    def name(self, field: str) -> str | None:
        """Return the field as a string where it is a non-blank string or an integer; None where it is absent.

        Raises:
            UserError: the field is there but is neither.
        """
        value = self.value.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise self.fail(f"{field!r} to be a non-empty string or an integer, got {_shown(value)}")
        return str(value)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}; check the spelling of the path") from error
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _parse(raw: bytes, where: str, expected: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: expected UTF-8 text, but byte {error.start + 1} is not UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        detail = (
            f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
        )
        raise UserError(f"{where}: expected {expected} ({detail})") from error


def read_records(path: Path) -> Iterator[Record]:
    """Yield the JSON objects of a file: one a line, or one JSON list where the name ends in ``.json``.

    ``.gz`` files are unpacked; blank lines are skipped; lines end with a newline only, so that a Unicode line
    separator inside a string does no harm.

    Raises:
        UserError: the file is missing, unreadable, empty or malformed.
    """
    raw = _read_bytes(path)
    if not raw.strip():
        raise UserError(f"{path} is empty; expected one JSON object a line")
    if path.suffix == ".json":
        rows = _parse(raw, str(path), "one JSON list")
        if not isinstance(rows, list) or not rows:
            raise UserError(f"{path}: expected one JSON list of objects")
        numbered = ((f"{path}, item {number}", row) for number, row in enumerate(rows, 1))
    else:
        numbered = (
            (f"{path}, line {number}", _parse(line, f"{path}, line {number}", "one JSON object"))
            for number, line in enumerate(raw.split(b"\n"), 1)
            if line.strip()
        )
    for index, (where, value) in enumerate(numbered):
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected a JSON object, got {_shown(value)}")
        yield Record(where=where, index=index, value=value)


def unique(prompts: Sequence[Prompt], records: Sequence[Record]) -> list[Prompt]:
    """Return the prompts, having checked that no two share an id.

    Args:
        prompts: what the records became, in order.
        records: where each came from, for the message.

    Raises:
        UserError: two prompts have the same id.
    """
    seen: dict[str, str] = {}
    for prompt, record in zip(prompts, records, strict=True):
        if prompt.id in seen:
            raise UserError(
                f"{record.where}: the id {prompt.id!r} was already used by {seen[prompt.id]}; make ids unique"
            )
        seen[prompt.id] = record.where
    return list(prompts)


def take_in_turn(items: Sequence[T], limit: int | None, key: Callable[[T], str]) -> list[T]:
    """Return at most ``limit`` items, one of each key in turn, so that a small limit still sees every key.

    Keys come in the order of their first item, items of a key in their own order; a key that has run out is
    passed over. The chosen items keep the order they had, and a larger limit only ever adds items. With a
    single key this is the first ``limit`` items.

    Args:
        items: what to choose from.
        limit: how many; None for all.
        key: what to spread over (the category).

    Raises:
        UserError: the limit is below 1.
    """
    if limit is None:
        return list(items)
    if limit < 1:
        raise UserError(f"the limit must be at least 1, got {limit}")
    order: dict[str, int] = {}
    rank = []
    for position, item in enumerate(items):
        group = key(item)
        order[group] = order.get(group, -1) + 1
        rank.append((order[group], list(order).index(group), position))
    return [items[position] for position in sorted(position for _, _, position in sorted(rank)[:limit])]
