"""Malformed files are named with their line; limits see every category."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.benchmarks.reading import read_records, take_in_turn
from specbench.errors import UserError


def test_lines_are_counted_from_one_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [(r.index, r.value["a"], r.where) for r in read_records(path)] == [
        (0, 1, f"{path}, line 1"),
        (1, 2, f"{path}, line 3"),
    ]


def test_gz_and_json_list(tmp_path: Path) -> None:
    packed, listed = tmp_path / "a.jsonl.gz", tmp_path / "a.json"
    packed.write_bytes(gzip.compress(b'{"a": 1}\n'))
    listed.write_text('[{"a": 1}]')
    assert [r.value for r in read_records(packed)] == [r.value for r in read_records(listed)] == [{"a": 1}]


def test_unicode_line_separator_inside_a_string_is_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\u2028y\x85z"}\n{"a": "w"}\n', encoding="utf-8")
    assert [r.value["a"] for r in read_records(path)] == ["x\u2028y\x85z", "w"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", ("is empty", "one JSON object a line")),
        ("a.jsonl", b" \n\n", ("is empty",)),
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n', ("a.jsonl, line 2", "one JSON object")),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', ("a.jsonl, line 2", "a JSON object", "[1, 2]")),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}\n', ("a.jsonl, line 3", "UTF-8")),
        ("a.json", b'{"a": 1}', ("a.json", "one JSON list")),
        ("a.json", b"[1]", ("a.json, item 1", "a JSON object")),
        ("a.jsonl.gz", b"not packed", ("a.jsonl.gz", "cannot be read")),
    ],
)
def test_malformed_files_name_place_and_expectation(
    tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_records(tmp_path / name))
    for word in words:
        assert word in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file .*nowhere.jsonl"):
        list(read_records(tmp_path / "nowhere.jsonl"))


def test_take_in_turn_by_hand() -> None:
    items = ["a1", "a2", "a3", "b1", "c1", "c2"]
    assert take_in_turn(items, 3, lambda item: item[0]) == ["a1", "b1", "c1"]
    # Second round: a2, then b has run out, then c2.
    assert take_in_turn(items, 5, lambda item: item[0]) == ["a1", "a2", "b1", "c1", "c2"]
    assert take_in_turn(items, None, lambda item: item[0]) == items
    assert take_in_turn(items, 3, lambda item: "same") == ["a1", "a2", "a3"]
    with pytest.raises(UserError, match="at least 1"):
        take_in_turn(items, 0, lambda item: item[0])


@given(st.lists(st.tuples(st.integers(), st.sampled_from("abcd")), max_size=30), st.integers(1, 40))
def test_take_in_turn_properties(pairs: list[tuple[int, str]], limit: int) -> None:
    items = [(position, letter) for position, (_, letter) in enumerate(pairs)]
    chosen = take_in_turn(items, limit, lambda item: item[1])
    assert len(chosen) == min(limit, len(items))
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(take_in_turn(items, limit + 1, lambda item: item[1]))
    # Fair: no category is two ahead of one that still has items left.
    counts = {letter: sum(1 for _, c in chosen if c == letter) for _, letter in items}
    left = {letter: sum(1 for _, c in items if c == letter) - counts[letter] for letter in counts}
    if waiting := [counts[letter] for letter in counts if left[letter]]:
        assert max(counts.values()) <= min(waiting) + 1
