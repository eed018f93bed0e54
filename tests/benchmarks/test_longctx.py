"""Long prompts: exact to the token under tokenizers of different kinds, the same questions at every length."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.benchmarks.filler import Excerpt, Generated, sentences_of_file, town
from specbench.benchmarks.longctx import LONGCTX, _approach
from specbench.errors import SpecbenchWarning, UserError
from specbench.types import Prompt, SuiteRequest

Count = Callable[[Prompt], int]


def rendered(prompt: Prompt) -> str:
    talk = [*((m.role, m.content) for m in prompt.history), ("user", prompt.turns[0])]
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in talk) + "<|im_start|>assistant\n"
    )


def counter(tokenizer: Any) -> Count:
    return lambda prompt: len(
        tokenizer(rendered(prompt), add_special_tokens=False, verbose=False)["input_ids"]
    )


@pytest.fixture(scope="module")
def byte_count(tiny_target_path: Path) -> Count:
    from transformers import AutoTokenizer

    return counter(AutoTokenizer.from_pretrained(tiny_target_path))


@pytest.fixture(scope="module")
def merging_count() -> Count:
    """A byte-level BPE trained on other text than the filler: words split in odd places, punctuation merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    prose = [Path(__file__).read_text(), Path(__file__).with_name("test_published.py").read_text()]
    tokenizer.train_from_iterator(prose, trainer)
    return lambda prompt: len(tokenizer.encode(rendered(prompt)).ids)


def word_count(prompt: Prompt) -> int:
    """A tokenizer by words and signs: closed form, no library."""
    return len(re.findall(r"\w+|[^\w\s]", rendered(prompt)))


def check(prompts: list[Prompt], count: Count) -> None:
    for prompt in prompts:
        assert count(prompt) == int(prompt.meta["length"]), prompt.id
        text = rendered(prompt)
        if prompt.category == "dialogue":
            assert prompt.context is None and prompt.history
            assert [m.role for m in prompt.history] == ["user", "assistant"] * (len(prompt.history) // 2)
        else:
            assert prompt.context is not None and prompt.turns[0].count(prompt.context) == 1
            assert not prompt.history
        assert prompt.reference is not None and prompt.reference in text


@pytest.mark.parametrize("length", [1100, 1537, 4096])
def test_exact_with_bytes(byte_count: Count, length: int) -> None:
    prompts = LONGCTX.load(SuiteRequest(lengths=(length,), count_tokens=byte_count))
    assert len(prompts) == 12
    check(prompts, byte_count)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(450, 3000), seed=st.integers(0, 1000))
def test_exact_with_merges(merging_count: Count, length: int, seed: int) -> None:
    request = SuiteRequest(lengths=(length,), limit=3, seed=seed, count_tokens=merging_count)
    check(LONGCTX.load(request), merging_count)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(160, 5000), seed=st.integers(0, 1000))
def test_exact_with_words(length: int, seed: int) -> None:
    check(
        LONGCTX.load(SuiteRequest(lengths=(length,), limit=3, seed=seed, count_tokens=word_count)), word_count
    )


@pytest.mark.target
def test_exact_with_the_demo_target(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer

    count = counter(AutoTokenizer.from_pretrained(smollm2_path))
    prompts = LONGCTX.load(SuiteRequest(lengths=(512, 777, 4096), count_tokens=count))
    assert len(prompts) == 36
    check(prompts, count)


def test_every_task_at_every_small_length() -> None:
    # Each residue of the search (no sentence, a sentence, a new document, a new exchange) is met along the way.
    for length in range(180, 420, 7):
        check(LONGCTX.load(SuiteRequest(lengths=(length,), limit=3, count_tokens=word_count)), word_count)


def test_few_calls_even_for_long_prompts() -> None:
    calls = 0

    def count(prompt: Prompt) -> int:
        nonlocal calls
        calls += 1
        return word_count(prompt)

    prompts = LONGCTX.load(SuiteRequest(lengths=(131072,), limit=3, count_tokens=count))
    check(prompts, word_count)
    assert calls <= 20 * len(prompts)


def test_the_same_question_at_every_length() -> None:
    prompts = LONGCTX.load(SuiteRequest(lengths=(2000, 500), count_tokens=word_count))
    by_id = {prompt.id: prompt for prompt in prompts}
    assert len(by_id) == 24
    for task in ("needle", "multidoc", "dialogue"):
        for item in range(4):
            short, long = by_id[f"longctx/{task}-{item}@500"], by_id[f"longctx/{task}-{item}@2000"]
            assert short.reference == long.reference
            assert short.meta["question"] == long.meta["question"] == f"{task}-{item}"
            assert short.category == long.category == task
            assert short.turns[0].split("Question:")[-1] == long.turns[0].split("Question:")[-1]


def test_answers_stand_where_depth_says() -> None:
    for prompt in LONGCTX.load(SuiteRequest(lengths=(6000,), count_tokens=word_count)):
        text = prompt.context or "\n".join(m.content for m in prompt.history)
        if prompt.category != "multidoc":
            assert abs(text.index(str(prompt.reference)) / len(text) - float(prompt.meta["depth"])) < 0.06


def test_multidoc_answer_is_the_earlier_keeper() -> None:
    for prompt in LONGCTX.load(SuiteRequest(lengths=(3000,), count_tokens=word_count)):
        if prompt.category != "multidoc":
            continue
        asked = re.search(r"the keeper at ([\w ]+) or the keeper at ([\w ]+)\?", prompt.turns[0])
        facts = re.findall(
            r"lighthouse of ([\w ]+) was given to the keeper ([\w ]+) in the year (\d+)", str(prompt.context)
        )
        assert asked is not None and len(facts) > 5 and len({place for place, _, _ in facts}) == len(facts)
        years = {place: (int(year), keeper) for place, keeper, year in facts}
        assert prompt.reference == min(years[asked[1]], years[asked[2]])[1]


def test_needle_stands_once() -> None:
    for prompt in LONGCTX.load(SuiteRequest(lengths=(3000,), count_tokens=word_count)):
        if prompt.category == "needle":
            assert (
                str(prompt.context).count("access code")
                == str(prompt.context).count(str(prompt.reference))
                == 1
            )


def test_seeded_and_order_free() -> None:
    def load(seed: int, lengths: tuple[int, ...]) -> dict[str, Prompt]:
        prompts = LONGCTX.load(SuiteRequest(lengths=lengths, seed=seed, count_tokens=word_count))
        return {prompt.id: prompt for prompt in prompts}

    one = load(3, (400, 900))
    assert one == load(3, (900, 400, 400))
    assert load(3, (900,)).items() <= one.items()
    other = load(4, (400, 900))
    assert one.keys() == other.keys() and all(
        one[name].turns != other[name].turns for name in one if "needle" in name
    )


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (3, 2), (6, 6), (8, 8), (40, 40)])
def test_limit_counts_prompts_and_keeps_pairs(limit: int, expected: int) -> None:
    prompts = LONGCTX.load(SuiteRequest(lengths=(300, 400), limit=limit, count_tokens=word_count))
    assert len(prompts) == expected
    if limit > 1:
        assert {p.meta["question"] for p in prompts if p.meta["length"] == "300"} == {
            p.meta["question"] for p in prompts if p.meta["length"] == "400"
        }
    if limit >= 6:
        assert {p.category for p in prompts} == {"needle", "multidoc", "dialogue"}


def test_bad_requests(tmp_path: Path) -> None:
    def message(**changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            LONGCTX.load(SuiteRequest(**{"lengths": (300,), "count_tokens": word_count, **changes}))
        return str(caught.value)

    assert "name a target" in message(count_tokens=None)
    too_short = message(lengths=(20,))
    least = int(re.search(r"takes (\d+) tokens", too_short)[1])  # type: ignore[index]
    assert "longctx/needle-0@20" in too_short
    check(LONGCTX.load(SuiteRequest(lengths=(least,), limit=1, count_tokens=word_count)), word_count)
    assert "at least one length" in message(lengths=())
    assert "above 0, got -5" in message(lengths=(-5,))
    assert "limit must be at least 1" in message(limit=0)
    assert "cannot be read" in message(text_file=tmp_path / "gone.txt")
    (tmp_path / "blank.txt").write_text(" \n ")
    assert "holds no words" in message(text_file=tmp_path / "blank.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "UTF-8" in message(text_file=tmp_path / "latin.txt")
    # Two tokens a character: no odd length can be hit.
    assert "cannot be brought to exactly 4001 tokens" in message(
        lengths=(4001,), count_tokens=lambda prompt: 2 * len(rendered(prompt))
    )


def test_text_file_fills_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text(" ".join(f"Line {i} of the story has a number." for i in range(2000)))
    prompts = LONGCTX.load(SuiteRequest(lengths=(1000,), text_file=path, count_tokens=word_count))
    check(prompts, word_count)
    for prompt in prompts:
        text = prompt.context or "\n".join(m.content for m in prompt.history)
        numbers = [int(n) for n in re.findall(r"Line (\d+) of the story", text)]
        assert "cooper" not in rendered(prompt)
        assert len(numbers) > 40 and len(set(numbers)) == len(numbers)
    assert len({re.findall(r"Line (\d+) of", rendered(prompt))[0] for prompt in prompts}) > 6


def test_short_text_file_repeats_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("One sentence. And another one!")
    with pytest.warns(SpecbenchWarning, match="has 2 sentences and was repeated"):
        check(
            LONGCTX.load(SuiteRequest(lengths=(500,), limit=3, text_file=path, count_tokens=word_count)),
            word_count,
        )


@pytest.mark.data
def test_book_as_filler(data_dir: Path) -> None:
    request = SuiteRequest(
        lengths=(2048,), text_file=data_dir / "book_public_domain.txt", count_tokens=word_count
    )
    check(LONGCTX.load(request), word_count)


def test_sentences_of_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One\nline. \u201cTwo!\u201d  Three? (Four.)\n\n" + "word " * 130)
    found = sentences_of_file(path)
    assert found[:-3] == ("One line.", "\u201cTwo!\u201d", "Three?", "(Four.)")
    assert [len(sentence.split()) for sentence in found[-3:]] == [60, 60, 10]


def test_filler_hardly_repeats_and_is_stable() -> None:
    # 128k tokens take about 6,000 sentences.
    filler = Generated("0/needle/0/filler")
    sentences = [filler.sentence(i) for i in range(6000)]
    assert len(set(sentences)) > 5900
    assert all(s == s.strip() and "{" not in s and s[-1] in ".\u201d'\"" for s in sentences)
    again = Generated("0/needle/0/filler")
    assert again.sentence(5999) == sentences[5999] and again.sentence(0) == sentences[0]
    assert len({town(i) for i in range(5120)}) == 5120


def test_excerpt_goes_round_and_counts() -> None:
    excerpt = Excerpt(("a", "b", "c"), 2)
    assert [excerpt.sentence(i) for i in range(5)] == ["c", "a", "b", "c", "a"]
    assert excerpt.num_used == 5


@given(st.lists(st.integers(0, 400), min_size=1, max_size=300), st.integers(0, 9000), st.integers(0, 50))
def test_search_ends_within_slack_or_at_the_last_that_fits(steps: list[int], target: int, slack: int) -> None:
    # Far from even growth: flat stretches and cliffs; the answer is checked by looking at every n.
    sizes = [0, *itertools.accumulate(steps)]
    calls: list[int] = []

    def size(n: int) -> int:
        calls.append(n)
        return sizes[n]

    n, got = _approach(size, target, start=0, slack=slack, most=len(steps))
    assert got == sizes[n] <= target
    assert target - got <= slack or n == len(steps) or sizes[n + 1] > target
    assert len(calls) < 40


def test_search_halves_where_interpolation_crawls() -> None:
    calls: list[int] = []

    def size(n: int) -> int:
        calls.append(n)
        return 0 if n < 5000 else 10**6 * (n - 4999)

    assert _approach(size, 10**6 - 1, start=0, slack=0, most=10_000) == (4999, 0)
    assert len(calls) < 30
