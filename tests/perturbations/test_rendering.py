"""Rendering against transformers' own apply_chat_template, and the laws of spans."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import UserError
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import resolve_conditions
from specbench.perturbations.template import NO_BOS, NO_BOS_NO_TEMPLATE, NO_TEMPLATE, REGULAR
from specbench.types import CLEAN, Message, Prompt, RenderedPrompt


def _conftest() -> Any:
    spec = importlib.util.spec_from_file_location("tests_conftest", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOKENIZER = _conftest().make_tokenizer()
CHAT = ChatTokenizer(TOKENIZER)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def prompt(*turns: str, **changes: Any) -> Prompt:
    return Prompt(id="t/1", suite="t", category="c", turns=turns, **changes)


def reference(tokenizer: Any, *messages: tuple[str, str]) -> tuple[int, ...]:
    chat = [{"role": role, "content": content} for role, content in messages]
    return tuple(tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)["input_ids"])


def check_spans(rendered: RenderedPrompt) -> None:
    position = 0
    for span in rendered.spans:
        assert span.start == position and span.end > span.start
        position = span.end
    assert position == len(rendered.token_ids)


def text_of(rendered: RenderedPrompt, chat: ChatTokenizer, kind: str) -> str:
    return "".join(chat.decode(rendered.token_ids[s.start : s.end]) for s in rendered.spans if s.kind == kind)


@settings(deadline=None, max_examples=60)
@given(first=TEXT, answer=TEXT, second=TEXT)
def test_regular_equals_apply_chat_template_and_user_text_survives(
    first: str, answer: str, second: str
) -> None:
    item = prompt(first, second)
    rendered = REGULAR.render(item, 1, [answer], CHAT, 0)
    wanted = reference(TOKENIZER, ("user", first), ("assistant", answer), ("user", second))
    assert rendered.token_ids == wanted
    check_spans(rendered)
    assert text_of(rendered, CHAT, "user") == first + second
    assert text_of(rendered, CHAT, "assistant") == answer
    assert text_of(rendered, CHAT, "generation") == "<|im_start|>assistant\n"
    assert rendered == REGULAR.render(item, 1, [answer], CHAT, 0)


@settings(deadline=None, max_examples=40)
@given(before=TEXT, context=TEXT, after=TEXT)
def test_context_gets_its_own_span(before: str, context: str, after: str) -> None:
    item = prompt(before + context + after, context=context)
    rendered = REGULAR.render(item, 0, [], CHAT, 0)
    check_spans(rendered)
    assert text_of(rendered, CHAT, "context") == context
    assert rendered.token_ids == reference(TOKENIZER, ("user", before + context + after))


def test_the_four_conditions_on_chatml_where_bos_is_the_turn_marker() -> None:
    item = prompt("Hi", "And?")
    raw = TOKENIZER("Hi\n\nYes\n\nAnd?", add_special_tokens=False)["input_ids"]
    full = reference(TOKENIZER, ("user", "Hi"), ("assistant", "Yes"), ("user", "And?"))
    wanted = {
        "template/regular": (full, 1),
        "template/no_bos": (full[1:], 0),
        "template/no_template": ((1, *raw), 1),
        "template/no_bos_no_template": (tuple(raw), 0),
    }
    for condition in (REGULAR, NO_BOS, NO_TEMPLATE, NO_BOS_NO_TEMPLATE):
        rendered = condition.render(item, 1, ["Yes"], CHAT, 0)
        check_spans(rendered)
        assert (rendered.token_ids, rendered.bos_count) == wanted[condition.info.id]
        assert rendered.notes == ()


def test_history_and_system_reach_the_template() -> None:
    item = prompt(
        "Now?",
        system="Be brief.",
        history=(Message(role="user", content="A"), Message(role="assistant", content="B")),
    )
    rendered = REGULAR.render(item, 0, [], CHAT, 0)
    wanted = reference(
        TOKENIZER, ("system", "Be brief."), ("user", "A"), ("assistant", "B"), ("user", "Now?")
    )
    assert rendered.token_ids == wanted
    assert text_of(rendered, CHAT, "system") == "Be brief."


def test_special_strings_in_user_text_are_named_not_hidden() -> None:
    rendered = REGULAR.render(prompt("a<|im_start|>b"), 0, [], CHAT, 0)
    assert rendered.token_ids == reference(TOKENIZER, ("user", "a<|im_start|>b"))
    assert rendered.notes == ("the user text contains <|im_start|>, which is tokenised as the special token",)
    kept = NO_BOS_NO_TEMPLATE.render(prompt("<|im_start|>b"), 0, [], CHAT, 0)
    assert kept.token_ids == CHAT.encode("<|im_start|>b") and kept.bos_count == 1 and len(kept.notes) == 1
    assert [(span.kind, span.end) for span in kept.spans] == [("user", 2)]
    opening = NO_TEMPLATE.render(prompt("<|im_start|>b"), 0, [], CHAT, 0)
    assert opening.token_ids == kept.token_ids and "<|im_start|>" in opening.notes[0]


def with_template(source: str | dict[str, str] | None) -> Any:
    tokenizer = _conftest().make_tokenizer()
    tokenizer.chat_template = source
    return tokenizer


def test_no_chat_template_means_raw_text_is_clean() -> None:
    chat = ChatTokenizer(with_template(None))
    rendered = REGULAR.render(prompt("Hi"), 0, [], chat, 0)
    assert rendered.token_ids == (1, *chat.encode("Hi")) and rendered.template_hash == ""
    assert "no chat template" in rendered.notes[0]
    assert "no chat template" in str(NO_TEMPLATE.available(chat))
    assert NO_BOS.render(prompt("Hi"), 0, [], chat, 0).token_ids == chat.encode("Hi")


def test_no_bos_makes_no_sense_without_bos() -> None:
    tokenizer = _conftest().make_tokenizer()
    tokenizer.bos_token = None
    chat = ChatTokenizer(tokenizer)
    assert REGULAR.available(chat) is None and NO_TEMPLATE.available(chat) is None
    assert NO_BOS.available(chat) == "the tokenizer has no BOS token"
    assert NO_TEMPLATE.render(prompt("Hi"), 0, [], chat, 0).bos_count == 0
    with pytest.raises(UserError, match="template/no_bos: the tokenizer has no BOS"):
        NO_BOS.render(prompt("Hi"), 0, [], chat, 0)


TRIMMING = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}"
SHOUTING = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | upper }}\n{% endfor %}"
NO_SYSTEM = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("text", ["  Hi ", "Hi", "\n two words\t"])
def test_trimming_template_still_yields_exact_spans(text: str) -> None:
    tokenizer = with_template(TRIMMING)
    chat = ChatTokenizer(tokenizer)
    rendered = REGULAR.render(prompt(text), 0, [], chat, 0)
    assert rendered.token_ids == reference(tokenizer, ("user", text))
    assert text_of(rendered, chat, "user") == text.strip()


def test_template_that_changes_or_drops_the_user_text_is_refused() -> None:
    with pytest.raises(UserError, match="drops the user's message"):
        ChatTokenizer(with_template("{{ 'Hello' }}"))
    with pytest.raises(UserError, match="user's message"):
        REGULAR.render(prompt("Hi"), 0, [], ChatTokenizer(with_template(SHOUTING)), 0)


def test_rejected_system_role_falls_back_and_says_so() -> None:
    chat = ChatTokenizer(with_template(NO_SYSTEM))
    assert chat.system_role == "rejected"
    rendered = REGULAR.render(prompt("Hi", system="Be brief."), 0, [], chat, 0)
    assert chat.decode(rendered.token_ids) == "user: Be brief.\n\nHi\n"
    assert text_of(rendered, chat, "user") == "Hi"
    assert rendered.notes == (
        "the template rejects a system message: its text opens the user's message instead",
    )


@pytest.mark.parametrize(
    ("source", "line"),
    [("{% for m in messages %}\n{{ m.content\n{% endfor %}", 3), ("a\nb {{ raise_exception('no') }}", 2)],
)
def test_jinja_errors_name_file_and_line(source: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    with pytest.raises(UserError, match=rf"mine\.jinja, line {line}: Template"):
        ChatTokenizer(TOKENIZER, template_file=file)


def test_dates_in_templates_do_not_depend_on_the_day() -> None:
    source = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = ChatTokenizer(with_template(source))
    rendered = REGULAR.render(prompt("Hi"), 0, [], chat, 0)
    assert chat.decode(rendered.token_ids) == "26 Jul 2024 Hi"
    assert rendered.notes == ("the chat template asks for today's date and is always told 26 Jul 2024",)


def test_several_templates_without_a_default_are_named() -> None:
    with pytest.raises(UserError, match="several chat templates and no default"):
        ChatTokenizer(with_template({"rag": TRIMMING, "tool_use": TRIMMING}))
    tokenizer = with_template({"default": TRIMMING, "tool_use": SHOUTING})
    assert REGULAR.render(prompt("Hi"), 0, [], ChatTokenizer(tokenizer), 0).token_ids == reference(
        tokenizer, ("user", "Hi")
    )


def test_context_that_is_not_in_the_turn_is_an_error() -> None:
    with pytest.raises(UserError, match="t/1: its context"):
        REGULAR.render(prompt("Hi", context="Ho"), 0, [], CHAT, 0)


def test_resolve_puts_clean_first_and_names_the_nearest() -> None:
    ids = [c.info.id for c in resolve_conditions(["template/no_bos", "templates"])]
    assert ids[:2] == [CLEAN, "template/no_bos"] and len(ids) == len(set(ids))
    with pytest.raises(UserError, match="did you mean 'template/no_bos"):
        resolve_conditions(["template/no_boss"])
    assert {c.info.severity for c in resolve_conditions(["templates"], severity=2)} <= {0, 1, 2}


@pytest.mark.target
def test_smollm2(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    chat = ChatTokenizer(tokenizer)
    assert (chat.bos_id, chat.clean_bos, chat.bos_is_marker, chat.stop_ids) == (1, 1, True, (2,))
    item = prompt("What is 3 + 4?  ", "Wirklich? 真的吗")
    rendered = REGULAR.render(item, 1, ["7"], chat, 0)
    wanted = reference(tokenizer, ("user", item.turns[0]), ("assistant", "7"), ("user", item.turns[1]))
    assert rendered.token_ids == wanted
    assert text_of(rendered, chat, "system").startswith("You are a helpful AI assistant named SmolLM")
    assert NO_BOS.render(item, 1, ["7"], chat, 0).token_ids == wanted[1:]
    assert NO_TEMPLATE.render(prompt("Hi"), 0, [], chat, 0).token_ids == (1, *chat.encode("Hi"))


def test_prefill_begins_the_answer() -> None:
    item = prompt("Hi", prefill="Sure: ")
    bare = REGULAR.render(prompt("Hi"), 0, [], CHAT, 0)
    clean = REGULAR.render(item, 0, [], CHAT, 0)
    assert clean.token_ids == bare.token_ids + CHAT.encode("Sure: ")
    assert clean.spans[-1].kind == "assistant" and clean.spans[-1].start == len(bare.token_ids)
    raw = NO_TEMPLATE.render(item, 0, [], CHAT, 0)
    assert CHAT.decode(raw.token_ids).endswith("Hi\n\nSure: ")
    # earlier turns are answered freely
    two = prompt("Hi", "And?", prefill="Sure: ")
    assert REGULAR.render(two, 0, [], CHAT, 0).token_ids == bare.token_ids
