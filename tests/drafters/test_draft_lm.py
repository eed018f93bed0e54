"""A causal LM as drafter, judged by transformers' own forward passes and by the target's own answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.draft_lm import DraftLM, create
from specbench.drafters.resolve import load_drafter
from specbench.errors import UserError
from specbench.types import ScoreRequest, TargetWeights, Trace

from .helpers import make_target, make_trace

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 41,
    "initializer_range": 0.4,
}


def make_lm(seed: int, cls: str = "Llama", **changes: Any) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{cls}Config")(**(SMALL | changes))
    return getattr(transformers, f"{cls}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def lm() -> Any:
    return make_lm(0)


def answered(model: Any, length: tuple[int, int], seed: int, noise: int = 0) -> Trace:
    """A trace whose answer is the model's greedy one, every ``noise``-th token replaced."""
    trace = make_trace(length, seed, vocab=41)
    ids = list(trace.prompt.token_ids)
    for i in range(length[1]):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if noise and i % noise == noise - 1:
            ids[-1] = (ids[-1] + 7) % 41
    trace.answer_ids = tuple(ids[length[0] :])
    return trace


def test_the_target_itself_accepts_everything(lm: Any) -> None:
    traces = [answered(lm, (5 + 3 * i, 4 + i), i) for i in range(5)]
    for trace, scores in zip(
        traces, DraftLM(lm, "lm", "f").score(traces, ScoreRequest(depth=3)), strict=True
    ):
        n = len(trace.answer_ids)
        assert scores.accepted.tolist() == [min(3, n - 1 - s) for s in range(n - 1)]
        assert scores.drafted.tolist() == [3] * (n - 1)


@pytest.mark.parametrize("cls", ["Llama", "Gemma2", "Cohere"])
def test_scores_equal_one_forward_at_a_time(cls: str) -> None:
    """Logits behind soft caps and scales too, in batches of unequal length."""
    model = make_lm(1, cls)
    traces = [answered(model, (4 + 2 * i, 12 - i), i, noise=3) for i in range(3)] + [
        make_trace((5, 1), 9, vocab=41)
    ]
    results = DraftLM(model, "lm", "f").score(traces, ScoreRequest(depth=4, full_chains=True))
    assert any(int(s.accepted.sum()) for s in results)
    for trace, scores in zip(traces, results, strict=True):
        n = len(trace.answer_ids)
        hits = []
        for a in range(1, n):
            with torch.no_grad():
                logits = model(torch.tensor([trace.ids[: trace.prompt_length + a]])).logits[0, -1]
            hits.append(int(logits.argmax()) == trace.answer_ids[a])
        assert scores.accepted.shape == (n - 1,)
        for s in range(n - 1):
            window = hits[s : s + 4]
            assert scores.accepted[s] == (window.index(False) if False in window else len(window))
            assert scores.forced is not None
            assert scores.forced[s].tolist() == [*map(int, window), *[-1] * (4 - len(window))]


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 6, "use_sliding_window": True}], ids=["full", "sliding"]
)
def test_session_equals_scores(changes: dict[str, Any]) -> None:
    """Rounds that accept different amounts, with and without a cache that can be cut."""
    model = make_lm(2, "Mistral" if changes else "Llama", **({"sliding_window": 6} if changes else {}))
    trace = answered(model, (7, 16), 0, noise=5)
    drafter = DraftLM(model, "lm", "f")
    (scores,) = drafter.score([trace], ScoreRequest(depth=6))
    session = drafter.session()
    s, known, seen = 0, 0, []
    while s < 15:
        session.observe(trace.ids[known : 8 + s], {})
        known = 8 + s
        tokens = session.propose(6).tokens
        ids = list(trace.ids[: 8 + s])
        for token in tokens:
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)
        truth = trace.answer_ids[s + 1 : s + 7]
        run = 0
        while run < len(truth) and tokens[run] == truth[run]:
            run += 1
        assert scores.accepted[s] == run
        seen.append(run)
        s += run + 1
    assert len(set(seen)) > 1


def test_rejection(lm: Any) -> None:
    trace = make_trace((5, 4), 0, vocab=41, temperature=0.7)
    drafter = DraftLM(lm, "lm", "f")
    (scores,) = drafter.score([trace], ScoreRequest(depth=2, sampler="rejection"))
    assert scores.alpha is not None
    with torch.no_grad():
        laws = torch.softmax(lm(torch.tensor([trace.ids])).logits[0].double() / 0.7, -1)
    for s in range(3):
        for i in (1, 2):
            a = s + i
            expected = 0.0
            if a <= 3:
                expected = min(1.0, laws[5 + a - 1, trace.answer_ids[a]].item() / math.exp(trace.logprobs[a]))
            assert scores.alpha[s, i - 1].item() == pytest.approx(expected, rel=1e-4)
    greedy = make_trace((5, 4), 0, vocab=41)
    with pytest.raises(UserError, match="temperature"):
        drafter.score([greedy], ScoreRequest(depth=2, sampler="rejection"))
    session = drafter.session()
    session.observe(trace.ids[:6], {})
    proposal = session.propose(2, torch.Generator().manual_seed(0), temperature=0.7)
    assert proposal.probs is not None
    torch.testing.assert_close(proposal.probs[0].double(), laws[5], rtol=1e-4, atol=1e-6)


def test_create(lm: Any, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path / "lm")
    target = make_target(vocab=41)
    drafter = load_drafter(f"draft-lm={tmp_path / 'lm'}", target)
    assert drafter.info.kind == "draft-lm" and drafter.info.taps == ()
    assert drafter.info.num_parameters == sum(p.numel() for p in lm.parameters())
    trace = answered(lm, (5, 6), 0)
    assert drafter.score([trace], ScoreRequest(depth=2))[0].accepted.tolist() == [2, 2, 2, 2, 1]
    assert load_drafter(str(tmp_path / "lm"), target).info.kind == "draft-lm"


def test_create_refuses(lm: Any, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path / "lm")
    with pytest.raises(UserError, match="vocabulary of 41"):
        create(str(tmp_path / "lm"), {}, make_target())
    with pytest.raises(UserError, match="draft-lm=PATH"):
        create(None, {}, make_target(vocab=41))
    with pytest.raises(UserError, match="unknown draft-lm option"):
        create(str(tmp_path / "lm"), {"window": "3"}, make_target(vocab=41))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="does not load"):
        create(str(tmp_path / "empty"), {}, make_target(vocab=41))


def test_another_tokenizer_of_the_same_size_is_refused(lm: Any, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path / "lm")
    (tmp_path / "target").mkdir()
    for name, first in (("lm", "a"), ("target", "b")):
        vocab = {first: 0, **{f"t{i}": i for i in range(1, 41)}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    base = make_target(vocab=41)
    target = TargetWeights(
        info=replace(base.info), embed=base.embed, head=base.head, path=tmp_path / "target"
    )
    with pytest.raises(UserError, match="they differ at token 0"):
        create(str(tmp_path / "lm"), {}, target)
