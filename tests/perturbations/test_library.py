"""What each family of conditions does, hand-computed, on tokenizers that need no file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.errors import SpecbenchWarning, UserError
from specbench.perturbations import language, markup, noise, prose, template, text
from specbench.perturbations.condition import UNCHANGED
from specbench.perturbations.foreign import FORMATS
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import all_conditions, resolve_conditions
from specbench.perturbations.stages import Staged, compose
from specbench.perturbations.turns import random_for
from specbench.types import CLEAN, Prompt, RenderedPrompt

DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SWITCHES = (
    "{% if tools %}TOOLS {{ tools[0]['function']['name'] }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def prompt(*turns: str, **changes: Any) -> Prompt:
    return Prompt(id="t/1", suite="t", category="c", turns=turns, **changes)


@cache
def by_id(name: str) -> Staged:
    found = {condition.info.id: condition for condition in all_conditions()}[name]
    assert isinstance(found, Staged)
    return found


def chat_with(tokenizer: Any, source: str) -> ChatTokenizer:
    tokenizer.chat_template = source
    return ChatTokenizer(tokenizer)


def text_under(name: str, chat: ChatTokenizer, item: Prompt, *answers: str) -> str:
    return chat.decode(by_id(name).render(item, len(answers), answers, chat, 0).token_ids)


@pytest.fixture(scope="module")
def chat(make_byte_tokenizer: Callable[[], Any]) -> ChatTokenizer:
    return ChatTokenizer(make_byte_tokenizer())


@pytest.fixture(scope="module")
def default_chat(make_byte_tokenizer: Callable[[], Any]) -> ChatTokenizer:
    return chat_with(make_byte_tokenizer(), DEFAULT)


# ---- templates

U, A, G = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
STRUCTURE = {
    "double_bos": f"<|im_start|>{U}Hi{G}{A}Yes{G}{U}And?{G}{A}",
    "no_generation": f"{U}Hi{G}{A}Yes{G}{U}And?{G}",
    "no_eot": f"{U}Hi\n{A}Yes\n{U}And?\n{A}",
    "extra_newline": f"{U}\nHi{G}{A}\nYes{G}{U}\nAnd?{G}{A}\n",
    "missing_newline": f"{U[:-1]}Hi{G}{A[:-1]}Yes{G}{U[:-1]}And?{G}{A[:-1]}",
    "newline_after_text": f"{U}Hi\n{G}{A}Yes{G}{U}And?\n{G}{A}",
    "trailing_space": f"{U}Hi{G}{A}Yes{G}{U}And?{G}{A} ",
    "roles_renamed": (f"{U}Hi{G}{A}Yes{G}{U}And?{G}{A}").replace("user", "human").replace("assistant", "bot"),
    "date": f"<|im_start|>system\nToday's date: 26 Jul 2024{G}{U}Hi{G}{A}Yes{G}{U}And?{G}{A}",
}
FOREIGN = {
    "llama2": "<|im_start|>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST] Yes </s><s>[INST] And? [/INST]",
    "llama3": "<|im_start|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<|im_start|>[INST]Hi[/INST]Yes</s>[INST]S\n\nAnd?[/INST]",
    "gemma": "<|im_start|><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
    "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
    "phi": "<|im_start|><|system|>\nS<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes<|end|>\n<|user|>\nAnd?<|end|>\n"
    "<|assistant|>\n",
    "zephyr": "<|im_start|><|system|>\nS</s>\n<|user|>\nHi</s>\n<|assistant|>\nYes</s>\n<|user|>\nAnd?</s>\n<|assistant|>\n",
    "vicuna": "<|im_start|>S USER: Hi ASSISTANT: Yes</s>USER: And? ASSISTANT:",
    "deepseek": "<|im_start|>S<｜User｜>Hi<｜Assistant｜>Yes<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜>",
    "plain": "<|im_start|>S\n\nUser: Hi\nAssistant: Yes\nUser: And?\nAssistant:",
    "chatml": f"<|im_start|>system\nS{G}{U}Hi{G}{A}Yes{G}{U}And?{G}{A}",
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_conditions(chat: ChatTokenizer, name: str) -> None:
    assert text_under(f"template/{name}", chat, prompt("Hi", "And?"), "Yes") == STRUCTURE[name]


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_formats_as_their_authors_write_them(chat: ChatTokenizer, name: str) -> None:
    assert text_under(f"template/{name}", chat, prompt("Hi", "And?", system="S"), "Yes") == FOREIGN[name]
    assert set(FOREIGN) == set(FORMATS)


def test_gemma_rejects_a_system_message_and_the_fallback_is_named(chat: ChatTokenizer) -> None:
    notes = by_id("template/gemma").render(prompt("Hi", system="S"), 0, [], chat, 0).notes
    assert notes == ("the template rejects a system message: its text opens the user's message instead",)


def test_plain_markup_keeps_one_bos_and_no_other_special_token(chat: ChatTokenizer) -> None:
    rendered = by_id("template/plain_markup").render(prompt("Hi"), 0, [], chat, 0)
    assert chat.decode(rendered.token_ids) == f"<|im_start|>{U}Hi{G}{A}"
    assert rendered.token_ids[0] == 1 and not {0, 1, 2} & set(rendered.token_ids[1:])


def test_default_system_prompt_is_found_and_dropped(default_chat: ChatTokenizer, chat: ChatTokenizer) -> None:
    clean = by_id(CLEAN).render(prompt("Hi"), 0, [], default_chat, 0)
    span = next(span for span in clean.spans if span.kind == "system")
    assert default_chat.decode(clean.token_ids[span.start : span.end]) == "Be nice."
    assert text_under("template/no_default_system", default_chat, prompt("Hi")) == f"{U}Hi{G}{A}"
    assert text_under("system/none", default_chat, prompt("Hi", system="S")) == f"{U}Hi{G}{A}"
    assert "no default system prompt" in str(by_id("template/no_default_system").available(chat))
    assert text_under("system/in_user", default_chat, prompt("Hi")) == f"{U}Be nice.\n\nHi{G}{A}"
    dated = text_under("template/date", default_chat, prompt("Hi"))
    assert dated == f"<|im_start|>system\nToday's date: 26 Jul 2024\n\nBe nice.{G}{U}Hi{G}{A}"


def test_switches_are_used_where_the_template_knows_them(
    make_byte_tokenizer: Callable[[], Any], chat: ChatTokenizer
) -> None:
    known = chat_with(make_byte_tokenizer(), SWITCHES)
    assert text_under("template/think_on", known, prompt("Hi")) == "user: Hi\nassistant: <think>\n"
    off = by_id("template/think_off").render(prompt("Hi"), 0, [], known, 0)
    assert known.decode(off.token_ids) == "user: Hi\nassistant: " and off.notes[0].startswith(UNCHANGED)
    empty = text_under("template/think_empty", known, prompt("Hi"))
    assert empty == "user: Hi\nassistant: <think>\n\n</think>\n\n"
    assert text_under("template/tools", known, prompt("Hi")) == "TOOLS get_forecast\nuser: Hi\nassistant: "
    for name in ("think_on", "think_off", "think_empty", "tools"):
        assert by_id(f"template/{name}").available(chat) is not None


def test_metaspace_tokenizer_is_tokenised_whole(make_metaspace_tokenizer: Callable[[], Any]) -> None:
    tokenizer = make_metaspace_tokenizer()
    chat = ChatTokenizer(tokenizer)
    item = prompt("Hi there", "And in?")
    dialogue = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "I see"}]
    dialogue.append({"role": "user", "content": "And in?"})
    wanted = tokenizer.apply_chat_template(dialogue, tokenize=True, add_generation_prompt=True)["input_ids"]
    rendered = by_id(CLEAN).render(item, 1, ["I see"], chat, 0)
    assert list(rendered.token_ids) == wanted and rendered.bos_count == 1
    users = [
        chat.decode(rendered.token_ids[s.start : s.end]).strip() for s in rendered.spans if s.kind == "user"
    ]
    assert users == ["Hi there", "And in?"]
    raw = by_id("template/no_template").render(prompt("Hi"), 0, [], chat, 0)
    assert list(raw.token_ids) == [1, *tokenizer("Hi", add_special_tokens=False)["input_ids"]]


# ---- system, long context


def test_system_text_of_the_task_follows_the_conditions_own(chat: ChatTokenizer) -> None:
    shown = text_under("system/one_line", chat, prompt("Hi", system="S"))
    assert shown == f"<|im_start|>system\nYou are a helpful assistant.\n\nS{G}{U}Hi{G}{A}"


@pytest.mark.parametrize(
    "kind", ["unrelated_start", "unrelated_middle", "unrelated_end", "related_end", "turns"]
)
def test_padding_is_exact_and_stays_for_later_turns(chat: ChatTokenizer, kind: str) -> None:
    condition = by_id(f"longctx/{kind}_1k")
    item = prompt("Which bridge is older, the stone one or the wooden one?", "Why?")
    first = condition.render(item, 0, [], chat, 5)
    assert len(first.token_ids) == 1024
    second = chat.decode(condition.render(item, 1, ["The stone one."], chat, 5).token_ids)
    opening = chat.decode(first.token_ids).removesuffix(A)
    assert second == f"{opening}{A}The stone one.{G}{U}Why?{G}{A}"
    other = condition.render(item, 0, [], chat, 6)
    assert other.token_ids != first.token_ids and len(other.token_ids) == 1024


def test_position_of_the_question(chat: ChatTokenizer) -> None:
    question = "Which bridge is older?"
    at = {}
    for place in ("start", "middle", "end"):
        shown = (
            text_under(f"longctx/related_{place}_1k", chat, prompt(question))
            .removeprefix(U)
            .removesuffix(G + A)
        )
        at[place] = shown.index(question) / (len(shown) - len(question))
        assert "bridge" in shown.replace(question, "")
    assert at["start"] == 0 and at["end"] == 1 and 0.3 < at["middle"] < 0.7


def test_padding_counts_the_layout_it_is_composed_with(chat: ChatTokenizer) -> None:
    both = compose(by_id("longctx/turns_512"), by_id("template/llama3"))
    assert len(both.render(prompt("Hi"), 0, [], chat, 0).token_ids) == 512


def test_prompts_that_are_long_already_are_left_alone_and_said_so(chat: ChatTokenizer) -> None:
    notes = by_id("longctx/turns_512").render(prompt("word " * 200), 0, [], chat, 0).notes
    assert any("512 tokens or longer" in note for note in notes) and notes[-1].startswith(UNCHANGED)


def test_lengths_beyond_the_target_are_not_available(make_byte_tokenizer: Callable[[], Any]) -> None:
    small = ChatTokenizer(make_byte_tokenizer(), max_positions=1024)
    assert by_id("longctx/turns_512").available(small) is None
    assert "1,024 positions" in str(by_id("longctx/turns_1k").available(small))
    assert "1,024 positions" in str(by_id("system/long_2k").available(small))
    with pytest.raises(UserError, match="longctx/turns_1k"):
        by_id("longctx/turns_1k").render(prompt("Hi"), 0, [], small, 0)


@settings(deadline=None, max_examples=20)
@given(length=st.integers(60, 2000), seed=st.integers(0, 50), per=st.integers(1, 7))
def test_fit_is_exact_for_any_way_of_counting(length: int, seed: int, per: int) -> None:
    found = prose.fit(prose.Prose("policy", seed=seed), lambda t: -(-len(t) // per), length, "x")
    assert -(-len(found) // per) == length


# ---- text and language


def test_typos_are_seeded_and_at_the_rate_asked_for() -> None:
    words = "harbour window letter morning copper stone " * 400
    once = text.with_typos(words, random_for(1), 0.1)
    assert once == text.with_typos(words, random_for(1), 0.1) != text.with_typos(words, random_for(2), 0.1)
    changed = sum(a != b for a, b in zip(words.split(), once.split(), strict=True)) / len(words.split())
    assert 0.07 < changed < 0.13


def test_random_for_is_the_same_on_every_machine() -> None:
    # SHA-256 and the Mersenne Twister fix this number.
    assert (
        random_for(0, "a").random()
        == random_for("0", "a").random()
        == pytest.approx(0.535421969195, abs=1e-12)
    )


def test_typos_of_a_turn_do_not_change_when_the_dialogue_goes_on(chat: ChatTokenizer) -> None:
    item = prompt("Explain harbour windows and copper letters every morning.", "Explain stone bridges.")
    condition = by_id("text/typos_25")
    first = chat.decode(condition.render(item, 0, [], chat, 1).token_ids).removesuffix(A)
    assert chat.decode(condition.render(item, 1, ["Yes"], chat, 1).token_ids).startswith(first)


def test_text_conditions_leave_context_and_answers_alone(chat: ChatTokenizer) -> None:
    item = prompt("Long Document. Who Wrote It?", "And When?", context="Long Document.")
    shown = text_under("text/uppercase", chat, item, "A Friend")
    assert shown == f"{U}Long Document. WHO WROTE IT?{G}{A}A Friend{G}{U}AND WHEN?{G}{A}"


CODE = "def f(x):\n    # say why\n    y = x  # twice\n    return '# not this'\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CODE, "def f(x):\n    y = x\n    return '# not this'\n"),
        (f"Mend it:\n```python\n{CODE}```\n# Heading", "Mend it:\n```python\ndef f(x):\n    y = x\n    return '# not this'\n```\n# Heading"),
        ("```js\nlet a = 1; // one\n// two\nf('http://x'); /* z */\n```", "```js\nlet a = 1;\nf('http://x'); \n```"),
        ("# Heading\nNo code here.", "# Heading\nNo code here."),
        ("def f():\n    '''Doc # kept'''\n    # open end", "def f():\n    '''Doc # kept'''"),
    ],
)  # fmt: skip
def test_comments_are_removed_from_code_only(before: str, after: str) -> None:
    assert text.without_comments(before, random_for()) == after


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("lowercase", "Who IS it?", "who is it?"),
        ("one_line", " a\n\n b\tc ", "a b c"),
        ("no_punctuation", "Well, is 3.5 more? Yes.", "Well is 3.5 more Yes"),
        ("extra_punctuation", "Is 3.5 more? Yes.", "Is 3.5 more??? Yes..."),
        (
            "paraphrase",
            "Please explain `Write` and write. Write it.",
            "Kindly explain `Write` and write. Compose it.",
        ),
    ],
)
def test_plain_edits(chat: ChatTokenizer, name: str, before: str, after: str) -> None:
    assert text_under(f"text/{name}", chat, prompt(before)) == f"{U}{after}{G}{A}"


def test_lookalikes_look_alike() -> None:
    import unicodedata

    before = "aceijopsxyABCEHIKMOPTXY"
    after = text.with_lookalikes(before, random_for(), 1.0)
    assert all(unicodedata.name(letter).startswith("CYRILLIC") for letter in after)
    assert len(after) == len(before)


def test_answer_in_another_language_is_asked_in_every_turn(chat: ChatTokenizer) -> None:
    shown = text_under("language/answer_fr", chat, prompt("Hi", "And?"), "Oui")
    ask = "\n\nAnswer in French."
    assert shown == f"{U}Hi{ask}{G}{A}Oui{G}{U}And?{ask}{G}{A}"


def test_translations_belong_to_the_mini_prompts_of_today() -> None:
    file = resources.files("specbench.benchmarks") / "data" / "mini.jsonl"
    mini = {
        f"mini/{row['id']}": row["turns"] for row in map(json.loads, file.read_text("utf-8").splitlines())
    }
    table = language.translations()
    assert len(table) >= 12 and len(language.TRANSLATED) >= 6
    for name, row in table.items():
        assert list(row["en"]) == mini[name], name
        for code in language.TRANSLATED:
            assert len(row[code]) == len(row["en"]) and list(row[code]) != list(row["en"])


def test_translated_prompts(chat: ChatTokenizer) -> None:
    row = language.translations()["mini/dialogue-4"]
    item = Prompt(id="mini/dialogue-4", suite="mini", category="dialogue", turns=tuple(row["en"]))
    rendered = by_id("language/ask_de").render(item, 1, ["30 Euro."], chat, 0)
    assert chat.decode(rendered.token_ids) == f"{U}{row['de'][0]}{G}{A}30 Euro.{G}{U}{row['de'][1]}{G}{A}"
    other = by_id("language/ask_de").render(prompt("Hi"), 0, [], chat, 0)
    assert other.notes[0] == "there is no translation of this prompt" and other.notes[1].startswith(UNCHANGED)


# ---- composition, resolution, noise, plug-ins


def test_composed_stages_run_in_order_whatever_the_order_of_the_names(chat: ChatTokenizer) -> None:
    a, b = by_id("template/llama3"), by_id("system/one_line")
    first, second = compose(a, b), compose(b, a)
    item = prompt("Hi")
    assert first.render(item, 0, [], chat, 0).token_ids == second.render(item, 0, [], chat, 0).token_ids
    assert first.info.id == "template/llama3+system/one_line" and first.info.severity == 3
    assert first.info.family == "template+system"


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("template/llama3", "template/phi", "both decide the layout"),
        ("system/none", "system/persona", "both decide the system prompt"),
        ("template/no_template", "template/no_eot", "both decide the turn ends"),
        ("longctx/turns_1k", "longctx/turns_2k", "both decide the context"),
        ("template/no_bos", "template/double_bos", "both decide the BOS"),
        ("text/uppercase", "text/lowercase", "both decide the words"),
    ],
)
def test_conditions_that_cannot_be_composed_say_why(one: str, other: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"{one} and {other} do not compose: {reason}"):
        compose(by_id(one), by_id(other))


def test_products_leave_out_what_does_not_compose_and_say_so() -> None:
    with pytest.warns(SpecbenchWarning, match=r"templates\*system: \d+ of \d+ pairs are left out"):
        ids = {c.info.id for c in resolve_conditions(["templates*system"])}
    assert CLEAN in ids and "system/persona" in ids and "template/llama3+system/persona" in ids
    assert "template/date+system/persona" not in ids
    with pytest.raises(UserError, match="do not compose"):
        resolve_conditions(["template/llama3*template/phi"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (_, one) = resolve_conditions(["template/llama3+system/persona"])
    assert one.info.id == "template/llama3+system/persona"


def test_severity_limits_families_but_not_names() -> None:
    ids = {c.info.id: c.info.severity for c in resolve_conditions(["all", "template/llama3"], severity=1)}
    assert {name for name, severity in ids.items() if severity > 1} == {"template/llama3"}


def test_unknown_names() -> None:
    for spec, near in (
        ("sistem", "system"),
        ("template/llama4", "template/llama3"),
        ("text*lenguage", "language"),
    ):
        with pytest.raises(UserError, match=f"did you mean .*{near}"):
            resolve_conditions([spec])


def test_noise_keeps_the_ids_and_declares_itself(chat: ChatTokenizer) -> None:
    clean = by_id(CLEAN).render(prompt("Hi"), 0, [], chat, 0)
    for condition in noise.conditions():
        rendered = condition.render(prompt("Hi"), 0, [], chat, 0)
        assert condition.same_ids and rendered.token_ids == clean.token_ids and rendered.notes == ()
        assert set(condition.info.parameters) == {"noise_path", "noise_alpha"}


def test_infos_are_complete_and_ids_match_families() -> None:
    for condition in all_conditions():
        info = condition.info
        assert info.id.startswith(f"{info.family}/") and 0 <= info.severity <= 3
        assert info.description.endswith(".") and info.reason.endswith(".")
        assert (info.severity == 0) == (info.id == CLEAN)


def shouting() -> Staged:
    return text.text_condition("mine/shout", lambda t, r: t.upper() + "!", severity=2, description="Shouted.")


def forgetful() -> Staged:
    condition = text.text_condition("mine/forget", lambda t, r: "", severity=2, description="Forgotten.")
    return Staged(info=condition.info, messages=condition.messages, keeps_text=True)


def test_outside_packages_add_a_condition_with_one_function(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbench import registry

    entries = {"mine": shouting, "bad": lambda: 7}
    real = registry.load
    builtin = registry.names("perturbations")
    monkeypatch.setattr(registry, "names", lambda kind: (*builtin, "mine"))
    monkeypatch.setattr(
        registry, "load", lambda kind, name: entries[name] if name in entries else real(kind, name)
    )
    (_, condition) = resolve_conditions(["mine"])
    assert chat.decode(condition.render(prompt("Hi"), 0, [], chat, 0).token_ids) == f"{U}HI!{G}{A}"
    monkeypatch.setattr(registry, "names", lambda kind: (*builtin, "bad"))
    with pytest.raises(UserError, match="'bad' gives int"):
        resolve_conditions(["templates"])


def test_a_condition_that_loses_the_users_text_is_refused(chat: ChatTokenizer) -> None:
    with pytest.raises(UserError, match="mine/forget loses or changes the user's text of t/1"):
        forgetful().render(prompt("Hi"), 0, [], chat, 0)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([c.info.id for c in template.conditions()]),
    turns=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=3),
    seed=st.integers(0, 3),
)
def test_user_text_survives_every_template_condition(
    default_chat: ChatTokenizer, name: str, turns: list[str], seed: int
) -> None:
    condition = by_id(name)
    if condition.available(default_chat) is not None:
        return
    item = prompt(*turns)
    answers = ["An answer."] * (len(turns) - 1)
    rendered: RenderedPrompt = condition.render(item, len(answers), answers, default_chat, seed)
    assert rendered == condition.render(item, len(answers), answers, default_chat, seed)
    ids = [i for s in rendered.spans if s.kind == "user" for i in rendered.token_ids[s.start : s.end]]
    trims = name.removeprefix("template/") in ("llama2", "llama3", "gemma")
    shown = default_chat.decode(ids)
    assert shown == "".join(turn.strip() if trims else turn for turn in turns)


def test_roles_are_renamed_in_the_case_of_the_template() -> None:
    assert markup.renamed("<|USER|> Assistant model system") == "<|HUMAN|> Bot bot context"
