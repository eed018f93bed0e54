"""Prompts that begin alike: the common part runs once, and nothing an answer holds changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.runners.answers import Answerer, GivenAnswer, common_length, kv_bytes_per_token
from specbench.runners.engine import Engine, Prefix, Segment
from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import RunSettings, Work
from specbench.runners.targets import Target
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span, Trace

from .test_engine import sliding_model

TAPS = (0, 3, 8)


def rendered(ids: list[int], name: str, condition: str = "system/long") -> RenderedPrompt:
    return RenderedPrompt(
        prompt_id=name,
        suite="t",
        category="c",
        turn=0,
        condition=ConditionInfo(id=condition, family="system", severity=2, description=""),
        token_ids=tuple(ids),
        spans=(Span(kind="user", start=0, end=len(ids)),),
        bos_count=0,
        template_hash="",
    )


def random_ids(seed: int, length: int, vocab: int = 259) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu", dtype="float32")


@contextmanager
def counted(target: Target) -> Iterator[list[int]]:
    """The token counts of the target's passes."""
    sizes: list[int] = []

    def note(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
        sizes.append(args[0].numel())

    handle = target.model.get_input_embeddings().register_forward_pre_hook(note)
    try:
        yield sizes
    finally:
        handle.remove()


def reference(model: Any, ids: list[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits and the taps below the last (that one transformers norms) of a plain pass."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], {tap: out.hidden_states[tap][0] for tap in (0, 3)}


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_slots_behind_prefixes_equal_whole_passes(
    target: Target, rows: list[tuple[int | None, int]], steps: int, seed: int
) -> None:
    """Slots with either prefix and with none, in one batch: a prefill, then steps of one token each."""
    beginnings = [random_ids(seed, 23), random_ids(seed + 1, 70)]
    prefixes = [Prefix(target.model, ids, taps=TAPS, chunk=16) for ids in beginnings]
    engine = Engine(target.model, num_slots=len(rows), max_length=16, taps=TAPS)
    whole, prefill = [], []
    for slot, (which, size) in enumerate(rows):
        first = [] if which is None else beginnings[which]
        ids = first + random_ids(seed + 10 + slot, size + steps)
        engine.begin(slot, None if which is None else prefixes[which])
        prefill.append(Segment(slot=slot, start=len(first), ids=ids[len(first) : len(ids) - steps]))
        whole.append(ids)
    engine.forward(prefill, logits_at=[0])
    logits = []
    for step in range(steps, 0, -1):
        batch = [Segment(slot=i, start=len(ids) - step, ids=[ids[-step]]) for i, ids in enumerate(whole)]
        logits.append(engine.forward(batch, logits_at=range(len(batch))).logits)
    for slot, ids in enumerate(whole):
        expected, states = reference(target.model, ids)
        torch.testing.assert_close(
            torch.stack([row[slot] for row in logits]), expected[-steps:], atol=2e-4, rtol=1e-4
        )
        kept = engine.slot_taps(slot, len(ids))
        for tap, state in states.items():
            torch.testing.assert_close(kept[tap], state, atol=1e-4, rtol=1e-4)


def test_a_moved_sequence_takes_its_prefix_along(target: Target) -> None:
    first, own = random_ids(1, 40), random_ids(2, 9)
    engine = Engine(target.model, num_slots=3, max_length=16, taps=(3,))
    engine.begin(2, Prefix(target.model, first, taps=(3,)))
    other = Segment(slot=0, start=0, ids=random_ids(3, 12))
    engine.forward([other, Segment(slot=2, start=40, ids=own[:8])], logits_at=[0])
    engine.move(2, 0, 48)
    assert engine.prefix_of(2) is None
    out = engine.forward([Segment(slot=0, start=48, ids=own[8:])], logits_at=[0])
    expected, states = reference(target.model, first + own)
    torch.testing.assert_close(out.logits[0], expected[-1], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(engine.slot_taps(0, 49)[3], states[3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [3, 9])
def test_a_sliding_window_hides_the_start_of_a_prefix(length: int) -> None:
    model = sliding_model()
    ids = random_ids(0, length + 6, vocab=100)
    engine = Engine(model, num_slots=1, max_length=8)
    engine.begin(0, Prefix(model, ids[:length]))
    several = engine.forward(
        [Segment(slot=0, start=length, ids=ids[length : length + 3])], logits_at=range(3)
    )
    pieces = [several.logits]
    for at in range(length + 3, length + 6):
        pieces.append(engine.forward([Segment(slot=0, start=at, ids=[ids[at]])], logits_at=[0]).logits)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, length:]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=1e-4)


def test_half_precision_stays_as_close_as_without_a_prefix(tiny_target_path: Path, target: Target) -> None:
    half = Target.load(str(tiny_target_path), device="cpu", dtype="bfloat16")
    ids = random_ids(4, 90)
    exact, _states = reference(target.model, ids)
    errors = []
    for shared in (0, 80):
        engine = Engine(half.model, num_slots=1, max_length=90)
        engine.begin(0, Prefix(half.model, ids[:shared]) if shared else None)
        engine.forward([Segment(slot=0, start=shared, ids=ids[shared:89])], logits_at=[0])
        step = engine.forward([Segment(slot=0, start=89, ids=ids[89:])], logits_at=[0])
        errors.append(float((step.logits[0] - exact[-1]).square().mean().sqrt()))
    assert errors[1] < 1.5 * errors[0]


def same(trace: Trace, twin: Trace) -> None:
    assert trace.answer_ids == twin.answer_ids
    assert trace.finish == twin.finish
    assert trace.taps.keys() == twin.taps.keys()
    for tap, states in trace.taps.items():
        torch.testing.assert_close(states, twin.taps[tap], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(trace.logprobs, twin.logprobs, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(trace.entropies, twin.entropies, atol=1e-3, rtol=1e-3)


def two_conditions() -> list[RenderedPrompt]:
    """Five prompts under a system prompt of 200 tokens, three under one of 90, two under none, mixed."""
    long, short = random_ids(100, 200), random_ids(101, 90)
    prompts = [rendered(long + random_ids(i, 4 + 3 * i), f"t/{i}") for i in range(5)]
    prompts += [rendered(short + random_ids(i, 20 - i), f"t/{i}", "system/short") for i in range(3)]
    prompts += [rendered(random_ids(20 + i, 70), f"t/{i}", "template/regular") for i in range(2)]
    return prompts[::2] + prompts[1::2]


@pytest.mark.parametrize("batch_size", [2, 16])
def test_answers_equal_those_of_each_prompt_alone(target: Target, batch_size: int) -> None:
    prompts = two_conditions()
    answerer = Answerer(target, taps=TAPS, max_new_tokens=20, batch_size=batch_size)
    alone = {p.key: next(iter(answerer.answer([p]))) for p in prompts}
    with counted(target) as sizes:
        traces = list(answerer.answer(prompts))
    assert len(traces) == len(prompts)
    for trace in traces:
        same(trace, alone[trace.prompt.key])
    # whatever is not a shared system prompt: the rest of each prompt, and every answer token but the last
    own = sum(len(p.token_ids) for p in prompts) - 5 * 200 - 3 * 90
    assert sum(sizes) == 200 + 90 + own + sum(len(t.answer_ids) - 1 for t in traces)


def test_prefixes_beyond_the_budget_wait_for_each_other(target: Target) -> None:
    """Room for a slot and the longer prefix, not for both prefixes."""
    prompts = two_conditions()
    small = (200 + 60) * kv_bytes_per_token(target.model)
    answerer = Answerer(target, taps=(), max_new_tokens=6, kv_budget=small)
    roomy = Answerer(target, taps=(), max_new_tokens=6)
    expected = {t.prompt.key: t for t in roomy.answer(prompts)}
    with counted(target) as sizes:
        traces = list(answerer.answer(prompts))
    assert len(traces) == len(prompts)
    for trace in traces:
        same(trace, expected[trace.prompt.key])
    assert sizes.count(200) == sizes.count(90) == 1


def test_equal_prompts_and_prompts_within_prompts_keep_a_token_of_their_own(target: Target) -> None:
    ids = random_ids(7, 100)
    prompts = [rendered(ids, "t/0"), rendered(ids, "t/1"), rendered(ids[:80], "t/2")]
    answerer = Answerer(target, taps=(3,), max_new_tokens=8)
    alone = {p.key: next(iter(answerer.answer([p]))) for p in prompts}
    for trace in answerer.answer(prompts):
        same(trace, alone[trace.prompt.key])


def test_forced_answers_share_what_they_begin_with(target: Target) -> None:
    prompts = [*sorted(two_conditions(), key=lambda p: p.condition.id), rendered(random_ids(7, 30), "t/9")]
    answers = [random_ids(50 + i, 3 + 2 * i) for i in range(len(prompts))]
    alone = [
        Answerer(target, taps=TAPS, max_new_tokens=8).force(p, ids, "length")
        for p, ids in zip(prompts, answers, strict=True)
    ]
    answerer = Answerer(target, taps=TAPS, max_new_tokens=8)
    with counted(target) as sizes:
        traces = [answerer.force(p, ids, "length") for p, ids in zip(prompts, answers, strict=True)]
    for trace, twin in zip(traces, alone, strict=True):
        same(trace, twin)
    own = sum(len(p.token_ids) + len(ids) - 1 for p, ids in zip(prompts, answers, strict=True))
    assert sum(sizes) == own - 4 * 200 - 2 * 90


@pytest.mark.parametrize(("batch_size", "rows"), [(2, 256), (16, 256), (16, 7)])
def test_given_answers_go_on_from_the_prompts_of_free_ones(
    target: Target, monkeypatch: pytest.MonkeyPatch, batch_size: int, rows: int
) -> None:
    """Fewer tokens than a free answer has, more, and more than a pass takes; the last prompt has none."""
    monkeypatch.setattr("specbench.runners.answers._LOGIT_ROWS", rows)
    prompts = two_conditions()
    answers = {
        p.key: GivenAnswer(tuple(random_ids(50 + i, 3 + 4 * i)), ("stop", "length")[i % 2])
        for i, p in enumerate(prompts[:-1])
    }
    free = {p.key: next(iter(Answerer(target, taps=TAPS, max_new_tokens=12).answer([p]))) for p in prompts}
    forced = {
        p.key: Answerer(target, taps=TAPS, max_new_tokens=12).force(p, *answers[p.key]) for p in prompts[:-1]
    }
    answerer = Answerer(target, taps=TAPS, max_new_tokens=12, batch_size=batch_size)
    with counted(target) as sizes:
        traces = list(answerer.answer(prompts, answers))
    assert {(t.prompt.key, t.path) for t in traces} == {(key, "free") for key in free} | {
        (key, "forced") for key in forced
    }
    for trace in traces:
        same(trace, (free if trace.path == "free" else forced)[trace.prompt.key])
        assert trace.margins.shape == trace.logprobs.shape == (len(trace.answer_ids),)
    own = sum(len(p.token_ids) for p in prompts) - 5 * 200 - 3 * 90
    told = sum(len(answer.ids) for answer in answers.values())
    assert sum(sizes) == 200 + 90 + own + sum(len(t.answer_ids) - 1 for t in free.values()) + told


def test_a_given_answer_that_fails_costs_itself_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = two_conditions()
    work = [Work(prompt=p, drafters=()) for p in prompts]
    work += [Work(prompt=p, drafters=(), path="forced", answer_ids=(5, 6, 7)) for p in prompts]
    describe, bad = Answerer._describe, prompts[3].key

    def picky(self: Answerer, request: Any, *rest: Any) -> None:
        if request.prompt.key == bad:
            raise MemoryError("too much")
        describe(self, request, *rest)

    monkeypatch.setattr(Answerer, "_describe", picky)
    plain = RunSettings(depths=(2,), sampling=Sampling(), sampler="greedy", max_new_tokens=6, batch_size=16)
    runner = ReplayRunner(target, plain)
    told: list[int] = []
    outcomes = list(runner.run(work, {}, told.append))
    assert [(o.work.prompt.key, o.work.path, o.errors) for o in outcomes if o.errors] == [
        (bad, "forced", {"": "MemoryError: too much"})
    ]
    done = [(o.work.prompt.key, o.work.path) for o in outcomes]
    assert sorted(done) == sorted((p.key, path) for p in prompts for path in ("free", "forced"))
    lengths = [len(o.answer_ids) for o in outcomes if not o.errors and o.work.path == "forced"]
    assert lengths == [3] * (len(prompts) - 1)
    assert sum(told) >= sum(len(o.answer_ids) for o in outcomes)


def test_a_forced_answer_that_fails_leaves_nothing_behind(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (rendered(random_ids(1, 120) + random_ids(i, 9), f"t/{i}") for i in (2, 3))
    answerer = Answerer(target, taps=(3,), max_new_tokens=8)
    expected = answerer.force(second, [5, 6, 7], "length")
    answerer.force(first, [8, 9, 10], "length")
    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "_describe", lambda *_args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            answerer.force(replace(second, token_ids=first.token_ids[:125] + (4,)), [5, 6], "length")
    same(answerer.force(second, [5, 6, 7], "length"), expected)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_length_is_that_of_the_longest_common_slice(one: list[int], other: list[int]) -> None:
    assert common_length(one, other) == max(n for n in range(7) if one[:n] == other[:n] and len(one[:n]) == n)


@pytest.mark.target
def test_the_demo_target_says_the_same_under_a_shared_system_prompt(smollm2_path: Path) -> None:
    target = Target.load(str(smollm2_path), device="cpu", dtype="float32")
    system = " ".join(f"Rule {i}: answer question {i} kindly, briefly and in English." for i in range(8))
    questions = ["What is the capital of France?", "Count from one to ten.", "Name a colour."]
    prompts = []
    for i, text in enumerate(questions):
        ids = target.tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        prompts.append(rendered(ids, f"t/{i}"))
    length = min(common_length(prompts[0].token_ids, p.token_ids) for p in prompts[1:])
    assert length > 64
    answerer = Answerer(target, taps=(2, 15), max_new_tokens=12)
    alone = {p.key: next(iter(answerer.answer([p]))) for p in prompts}
    with counted(target) as sizes:
        traces = list(answerer.answer(prompts))
    assert sizes[0] == length
    for trace in traces:
        twin = alone[trace.prompt.key]
        assert trace.answer_ids == twin.answer_ids
        forced = answerer.force(trace.prompt, trace.answer_ids, trace.finish)
        for tap, states in trace.taps.items():
            scale = float(twin.taps[tap].abs().max())
            torch.testing.assert_close(states, twin.taps[tap], atol=1e-5 * scale, rtol=1e-3)
            torch.testing.assert_close(forced.taps[tap], twin.taps[tap], atol=1e-5 * scale, rtol=1e-3)
