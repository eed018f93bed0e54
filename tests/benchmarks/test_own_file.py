"""The user's own prompt files: three forms, every mistake named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.benchmarks.own_file import OwnFile
from specbench.errors import UserError
from specbench.types import Message, Suite, SuiteRequest

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40).filter(lambda t: t.strip())


def write(path: Path, *rows: Any) -> OwnFile:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return OwnFile(path)


def test_three_forms_by_hand(tmp_path: Path) -> None:
    suite = write(
        tmp_path / "mine.jsonl",
        {"prompt": "Hello"},
        {"turns": ["One", "Two"], "id": "pair", "category": "chat", "system": "Be brief.", "reference": "x"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "U1"},
                {"role": "assistant", "content": "A1"},
                {"role": "user", "content": "U2"},
            ],
            "question_id": 7,
        },
    )
    assert isinstance(suite, Suite)
    assert suite.info.name == "mine"
    plain, pair, talk = suite.load(SuiteRequest())
    assert (plain.id, plain.suite, plain.category, plain.turns) == ("mine/1", "mine", "mine", ("Hello",))
    assert (pair.id, pair.category, pair.turns, pair.system, pair.reference) == (
        "mine/pair",
        "chat",
        ("One", "Two"),
        "Be brief.",
        "x",
    )
    assert (talk.id, talk.system, talk.turns) == ("mine/7", "S", ("U2",))
    assert talk.history == (Message(role="user", content="U1"), Message(role="assistant", content="A1"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_texts_survive_unchanged(tmp_path: Path, data: st.DataObject) -> None:
    rows: list[dict[str, Any]] = []
    expected: list[tuple[str | None, list[str], list[str]]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        form = data.draw(st.sampled_from(["turns", "messages", "prompt"]))
        if form == "prompt":
            text = data.draw(TEXT)
            rows.append({"prompt": text})
            expected.append((None, [], [text]))
        elif form == "turns":
            turns = data.draw(st.lists(TEXT, min_size=1, max_size=4))
            rows.append({"turns": turns})
            expected.append((None, [], turns))
        else:
            system = data.draw(st.none() | TEXT)
            talk = data.draw(
                st.integers(0, 2).flatmap(lambda n: st.lists(TEXT, min_size=2 * n + 1, max_size=2 * n + 1))
            )
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)
            ]
            lead = [{"role": "system", "content": system}] if system is not None else []
            rows.append({"messages": lead + messages})
            expected.append((system, talk[:-1], talk[-1:]))
    prompts = write(tmp_path / "p.jsonl", *rows).load(SuiteRequest())
    got = [(p.system, [m.content for m in p.history], list(p.turns)) for p in prompts]
    assert got == expected
    assert len({p.id for p in prompts}) == len(rows)
    for prompt in prompts:
        assert [m.role for m in prompt.history] == ["user", "assistant"] * (len(prompt.history) // 2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "exactly one of 'turns', 'messages' and 'prompt', got the fields ['text']"),
        ({"prompt": "x", "turns": ["y"]}, "got 'turns' and 'prompt'"),
        ({"prompt": "  "}, "non-empty string"),
        ({"prompt": ["x"]}, "non-empty string"),
        ({"turns": []}, "a list of non-empty strings"),
        ({"turns": ["x", 3]}, "a list of non-empty strings"),
        ({"turns": "x"}, "a list of non-empty strings"),
        ({"messages": []}, "'messages' to be a non-empty list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 to have the role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 to be an object"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "message 1 to be the user's"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "x"}]},
            "message 2 to be the user's",
        ),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "message 2 to be the assistant's"),
        ({"messages": [{"role": "system", "content": "s"}]}, "the last message to be the user's"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "the last message to be the user's",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "system": "s"}, "no 'system' field"),
        ({"prompt": "x", "id": ["a"]}, "'id' to be a non-empty string or an integer"),
        ({"prompt": "x", "id": "first"}, "already used by"),
    ],
)
def test_mistakes_name_file_line_and_expectation(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    suite = write(tmp_path / "bad.jsonl", {"prompt": "fine", "id": "first"}, row)
    with pytest.raises(UserError) as caught:
        suite.load(SuiteRequest())
    assert "bad.jsonl, line 2: " in str(caught.value)
    assert words in str(caught.value)


def test_empty_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="empty.jsonl is empty"):
        OwnFile(tmp_path / "empty.jsonl").load(SuiteRequest())
    with pytest.raises(UserError, match="is a folder"):
        OwnFile(tmp_path).load(SuiteRequest())
