"""The engine and batched answering against transformers' own forward pass and ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import UserError
from specbench.runners.answers import Answerer, answer_limit
from specbench.runners.engine import Engine, Segment, UnsupportedModelError
from specbench.runners.targets import Target
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span

CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")


def rendered(ids: list[int], name: str = "t/0", limit: int | None = None) -> RenderedPrompt:
    return RenderedPrompt(
        prompt_id=name,
        suite="t",
        category="c",
        turn=0,
        condition=CLEAN,
        token_ids=tuple(ids),
        spans=(Span(kind="user", start=0, end=len(ids)),),
        bos_count=0,
        template_hash="",
        max_new_tokens=limit,
    )


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu", dtype="float32")


def random_ids(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 100))
def test_packed_prefill_equals_single_forward(target: Target, lengths: list[int], seed: int) -> None:
    sequences = [random_ids(seed + i, n) for i, n in enumerate(lengths)]
    engine = Engine(target.model, num_slots=len(lengths), max_length=64, taps=(0, 3, 8))
    total = sum(lengths)
    out = engine.forward(
        [Segment(slot=i, start=0, ids=ids) for i, ids in enumerate(sequences)], logits_at=range(total)
    )
    offset = 0
    for ids in sequences:
        with torch.no_grad():
            reference = target.model(torch.tensor([ids]), output_hidden_states=True)
        here = slice(offset, offset + len(ids))
        torch.testing.assert_close(out.logits[here], reference.logits[0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(out.taps[0][here], reference.hidden_states[0][0])
        torch.testing.assert_close(out.taps[3][here], reference.hidden_states[3][0], atol=2e-4, rtol=1e-4)
        # transformers norms its last hidden state; the tap is the stream before that norm
        normed = target.model.model.norm(out.taps[8][here])
        torch.testing.assert_close(normed, reference.hidden_states[8][0], atol=2e-4, rtol=1e-4)
        offset += len(ids)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 100))
def test_chunks_of_any_size_give_the_same_states(target: Target, chunks: list[int], seed: int) -> None:
    """Prefill, single steps and multi-token verification are one operation cut differently."""
    ids = random_ids(seed, sum(chunks))
    engine = Engine(target.model, num_slots=2, max_length=64, taps=(4,))
    logits = []
    start = 0
    for size in chunks:
        other = Segment(slot=0, start=start, ids=random_ids(seed + 99, size))
        mine = Segment(slot=1, start=start, ids=ids[start : start + size])
        out = engine.forward([other, mine], logits_at=range(size, 2 * size))
        logits.append(out.logits)
        start += size
    with torch.no_grad():
        reference = target.model(torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(torch.cat(logits), reference.logits[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        engine.slot_taps(1, len(ids))[4], reference.hidden_states[4][0], atol=2e-4, rtol=1e-4
    )


def sliding_model() -> Any:
    """A tiny model whose layers see five positions."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        initializer_range=0.2,
    )
    return MistralForCausalLM(config).eval()


def test_sliding_window_layers_equal_transformers() -> None:
    model = sliding_model()
    ids = torch.randint(0, 100, (1, 17))
    engine = Engine(model, num_slots=1, max_length=32)
    pieces = [
        engine.forward([Segment(slot=0, start=0, ids=ids[0, :9].tolist())], logits_at=range(9)).logits,
        engine.forward([Segment(slot=0, start=9, ids=ids[0, 9:16].tolist())], logits_at=range(7)).logits,
        engine.forward([Segment(slot=0, start=16, ids=ids[0, 16:].tolist())], logits_at=[0]).logits,
    ]
    with torch.no_grad():
        reference = model(ids).logits[0]
    torch.testing.assert_close(torch.cat(pieces), reference, atol=1e-4, rtol=1e-4)


def test_recurrent_layers_are_refused() -> None:
    class Config:
        layer_types = ("linear_attention", "full_attention")

        def get_text_config(self) -> Config:
            return self

    class Model:
        config = Config()

    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        Engine(Model(), num_slots=1, max_length=8)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_batched_answers_equal_generate(target: Target, batch_size: int) -> None:
    prompts = [rendered(random_ids(i, 3 + 5 * i), f"t/{i}") for i in range(7)]
    answerer = Answerer(target, taps=(2, 4, 5), max_new_tokens=24, batch_size=batch_size)
    traces = {t.prompt.prompt_id: t for t in answerer.answer(prompts)}
    assert len(traces) == 7
    for prompt in prompts:
        trace = traces[prompt.prompt_id]
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            full = target.model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=2)
            states = target.model(full[:, :-1], output_hidden_states=True)
        assert trace.answer_ids == tuple(full[0, ids.shape[1] :].tolist())
        assert trace.finish == ("stop" if trace.answer_ids[-1] == 2 else "length")
        for tap, kept in trace.taps.items():
            torch.testing.assert_close(kept, states.hidden_states[tap][0], atol=5e-4, rtol=1e-3)
        logits = states.logits[0, ids.shape[1] - 1 :]
        top = logits.topk(2, dim=-1).values
        torch.testing.assert_close(trace.margins, top[:, 0] - top[:, 1], atol=1e-3, rtol=1e-3)
        law = torch.distributions.Categorical(logits=logits)
        torch.testing.assert_close(trace.entropies, law.entropy(), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(
            trace.logprobs, law.log_prob(torch.tensor(trace.answer_ids)), atol=1e-3, rtol=1e-3
        )


def test_forced_trace_equals_free_trace(target: Target) -> None:
    prompt = rendered(random_ids(5, 20))
    answerer = Answerer(target, taps=(0, 4), max_new_tokens=20)
    (free,) = answerer.answer([prompt])
    forced = answerer.force(prompt, free.answer_ids, free.finish)
    assert forced.answer_ids == free.answer_ids
    assert forced.path == "forced"
    for tap in free.taps:
        torch.testing.assert_close(forced.taps[tap], free.taps[tap], atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(forced.margins, free.margins, atol=1e-3, rtol=1e-3)


def test_the_plain_path_equals_the_slots(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with state that slots cannot hold are answered with their own cache, one at a time."""
    prompts = [rendered(random_ids(i, 6 + i), f"t/{i}") for i in range(3)]
    answerer = Answerer(target, taps=(4,), max_new_tokens=12)
    with_slots = {t.prompt.prompt_id: t for t in answerer.answer(prompts)}

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise UnsupportedModelError("test")

    monkeypatch.setattr("specbench.runners.answers.Engine", refuse)
    for trace in answerer.answer(prompts):
        twin = with_slots[trace.prompt.prompt_id]
        assert trace.answer_ids == twin.answer_ids
        torch.testing.assert_close(trace.taps[4], twin.taps[4], atol=5e-4, rtol=1e-3)
        forced = answerer.force(trace.prompt, trace.answer_ids, trace.finish)
        torch.testing.assert_close(forced.taps[4], twin.taps[4], atol=5e-4, rtol=1e-3)


def test_samples_do_not_depend_on_the_batch(target: Target) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    prompts = [rendered(random_ids(i, 4 + i), f"t/{i}") for i in range(5)]
    by_batch = [
        {
            t.prompt.prompt_id: t.answer_ids
            for t in Answerer(target, taps=(), max_new_tokens=16, sampling=sampling, batch_size=b).answer(
                prompts
            )
        }
        for b in (1, 5)
    ]
    assert by_batch[0] == by_batch[1]
    assert len(set(by_batch[0].values())) > 1


def test_a_prompt_that_fills_the_positions_is_refused() -> None:
    with pytest.raises(UserError, match="12 tokens.*12 positions"):
        answer_limit(rendered(random_ids(0, 12)), 8, 12)
    assert answer_limit(rendered(random_ids(0, 10)), 8, 12) == 2
    assert answer_limit(rendered(random_ids(0, 2), limit=3), 8, 12) == 3


@pytest.mark.target
def test_the_demo_target_answers_as_generate_does(smollm2_path: Path) -> None:
    target = Target.load(str(smollm2_path), device="cpu", dtype="float32")
    texts = ["What is the capital of France?", "Count from one to ten.", "Write a haiku about rain."]
    prompts = []
    for i, text in enumerate(texts):
        ids = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(rendered(ids, f"t/{i}"))
    for trace in Answerer(target, taps=(), max_new_tokens=20).answer(prompts):
        ids = torch.tensor([trace.prompt.token_ids])
        with torch.no_grad():
            full = target.model.generate(ids, max_new_tokens=20, do_sample=False)
        expected = tuple(full[0, ids.shape[1] :].tolist())
        first = next(
            (i for i, (a, b) in enumerate(zip(expected, trace.answer_ids, strict=False)) if a != b), None
        )
        assert first is None or abs(float(trace.margins[first])) < 1e-3
