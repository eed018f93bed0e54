"""The built-in prompts: enough of each kind, ids unique, references right where they can be computed."""

from __future__ import annotations

from collections import Counter

from specbench.benchmarks.mini import MINI
from specbench.types import SuiteRequest


def test_categories_and_two_turn_prompts() -> None:
    prompts = MINI.load(SuiteRequest())
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == {"chat", "math", "code", "rewriting", "dialogue"}
    assert min(counts.values()) >= 6 and 38 <= len(prompts) <= 45
    assert sum(len(prompt.turns) == 2 for prompt in prompts) >= 8
    assert all(len(prompt.turns) == (2 if prompt.category == "dialogue" else 1) for prompt in prompts)
    assert str(len(prompts)) in MINI.info.description


def test_texts_are_distinct_and_short() -> None:
    prompts = MINI.load(SuiteRequest())
    texts = [turn for prompt in prompts for turn in prompt.turns]
    assert len(set(texts)) == len(texts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(15 <= len(text) <= 600 for text in texts)


def test_references_by_arithmetic() -> None:
    reference = {prompt.id: prompt.reference for prompt in MINI.load(SuiteRequest())}
    assert reference["mini/math-1"] == str(6 * 9 - 5)
    assert reference["mini/math-2"] == str((17 * 60 + 20) - (14 * 60 + 35))
    assert reference["mini/math-3"] == str(30 * 7 + 45 * 4)
    assert reference["mini/math-4"] == str(240 * 15 // 100)
    assert reference["mini/math-5"] == f"{2 * (12 + 7)} metres; {12 * 7} square metres"
    assert reference["mini/math-6"] == str((38 - 11) // 3)
    assert reference["mini/math-7"] == f"{86 / 4 + 2:.2f}"
    assert reference["mini/math-8"] == str(54 // 3 * 20 // 60)
    assert reference["mini/dialogue-4"] == str(40 // 8 * 6 * 90 // 100)


def test_limit_sees_every_category() -> None:
    assert {prompt.category for prompt in MINI.load(SuiteRequest(limit=5))} == {
        "chat",
        "math",
        "code",
        "rewriting",
        "dialogue",
    }
