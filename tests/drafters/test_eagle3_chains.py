"""Replay, online session and a naive one-position-at-a-time drafter must tell the same story."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.drafters.chains import Packed, run_chains, sink_span
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.errors import UserError
from specbench.types import ScoreRequest

from .eagle3_reference import Naive
from .helpers import HALF, SPANS, SWITCHES, VOCAB, build, make_model, make_target, make_trace


def naive_for(model: Any, target: Any, trace: Any) -> Naive:
    weights = {n: p.detach().double() for n, p in model.state_dict().items()}
    embed = weights.get("embed_tokens.weight", target.embed.double())
    ids = model.target_ids.tolist()
    head = weights.get("lm_head.weight", target.head.double()[ids])
    spans = {"bos": (0, trace.prompt.bos_count), "first4": (0, 4), "system": (2, 5), "none": (0, 0)}
    return Naive(model.config, weights, embed, head, spans[model.config.sink])


def run_all(model: Any, trace: Any, depth: int, **options: Any) -> dict[tuple[int, int], torch.Tensor]:
    """(round, step) -> logits, from the vectorised chains."""
    drafter = Eagle3Drafter(model, make_target().info, "toy")
    packed, rows = drafter.pack([trace])
    found: dict[tuple[int, int], torch.Tensor] = {}

    def on_step(step: int, active: torch.Tensor, post: torch.Tensor) -> None:
        for i, logits in zip(active.tolist(), model.logits(post), strict=True):
            found[i, step] = logits

    with torch.no_grad():
        run_chains(model, packed, rows, depth, on_step, **options)
    return found


@settings(max_examples=12, deadline=None)
@given(switches=SWITCHES, seed=st.integers(0, 1000))
def test_chains_equal_the_naive_drafter(switches: dict[str, Any], seed: int) -> None:
    target, depth = make_target(), 3
    model = build(target, switches, seed)
    trace = make_trace((7, 5), seed, spans=SPANS, prefix=(1,))
    found = run_all(model, trace, depth, block_rows=4)
    ids, taps = list(trace.ids), [trace.taps[t].double() for t in model.config.taps]
    naive = naive_for(model, target, trace)
    answer = list(trace.answer_ids)
    expected = {}
    for s in range(len(answer) - 1):
        feed = answer[s + 1 : -1]
        for j, logits in enumerate(
            naive.chain(ids, taps, 7 + s, depth, feed, model.target_ids.tolist()), start=1
        ):
            expected[s, j] = logits
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        torch.testing.assert_close(found[key].double(), logits, rtol=2e-3, atol=2e-3)


@settings(max_examples=12, deadline=None)
@given(switches=SWITCHES, seed=st.integers(0, 1000))
def test_session_equals_the_naive_drafter(switches: dict[str, Any], seed: int) -> None:
    """Free-running: the session drafts from its own tokens, over rounds that accept different amounts."""
    target, depth = make_target(), 4
    model = build(target, switches, seed)
    trace = make_trace((7, 6), seed, spans=SPANS, prefix=(1,))
    drafter = Eagle3Drafter(model, target.info, "toy")
    session = drafter.session(trace.prompt)
    naive = naive_for(model, target, trace)
    ids, taps = list(trace.ids), {t: trace.taps[t] for t in model.config.taps}
    known = 0
    for n in (7, 8, 11):
        session.observe(ids[(known + 1 if known else 0) : n + 1], {t: x[known:n] for t, x in taps.items()})
        known = n
        proposal = session.propose(depth)
        steps = naive.chain(
            ids, [x.double() for x in taps.values()], n, depth, None, model.target_ids.tolist()
        )
        assert proposal.tokens == [model.target_ids.tolist()[int(x.argmax())] for x in steps]


@settings(max_examples=15, deadline=None)
@given(switches=SWITCHES, seed=st.integers(0, 1000))
def test_scores_equal_online_rounds(switches: dict[str, Any], seed: int) -> None:
    """Accepted counts at every round start are what an online session would have made there."""
    target, depth = make_target(), 4
    model = build(target, switches, seed)
    drafter = Eagle3Drafter(model, target.info, "toy")
    trace = follow(drafter, make_trace((7, 9), seed, spans=SPANS, prefix=(1,)))
    (scores,) = drafter.score([trace], ScoreRequest(depth=depth))
    assert scores.drafted.tolist() == [depth] * 8
    for s in range(8):
        session = drafter.session(trace.prompt)
        n = 7 + s
        session.observe(trace.ids[: n + 1], {t: x[:n] for t, x in trace.taps.items()})
        tokens = session.propose(depth).tokens
        truth = trace.answer_ids[s + 1 : s + 1 + depth]
        run = 0
        while run < len(truth) and truth[run] == tokens[run]:
            run += 1
        assert scores.accepted[s] == run


def follow(drafter: Eagle3Drafter, trace: Any) -> Any:
    """Rewrite the answer so that the drafter is often right: two of three tokens are its own."""
    ids = list(trace.ids)
    p = trace.prompt_length
    for n in range(p, len(ids) - 1):
        session = drafter.session(trace.prompt)
        session.observe(ids[: n + 1], {t: x[:n] for t, x in trace.taps.items()})
        if n % 3:
            ids[n + 1] = session.propose(1).tokens[0]
    trace.answer_ids = tuple(ids[p:])
    return trace


@pytest.mark.parametrize("feedback", ["pre", "post"])
def test_full_chains_say_the_same_as_dropped_ones(feedback: str) -> None:
    target = make_target()
    model = make_model(target, feedback=feedback, target_ids=HALF)
    drafter = Eagle3Drafter(model, target.info, "toy")
    traces = [follow(drafter, make_trace((5 + i, 12 - i), i)) for i in range(3)]
    short = drafter.score(traces, ScoreRequest(depth=5))
    full = drafter.score(traces, ScoreRequest(depth=5, full_chains=True))
    assert sum(int(s.accepted.sum()) for s in short) > 8
    for trace, a, b in zip(traces, short, full, strict=True):
        assert torch.equal(a.accepted, b.accepted)
        assert a.forced is None and b.forced is not None
        assert torch.equal((b.forced == 1).to(torch.int64).cumprod(1).sum(1), b.accepted)
        n = len(trace.answer_ids)
        for s in range(n - 1):
            for i in range(1, 6):
                assert (b.forced[s, i - 1] == -1) == (s + i > n - 1)


def test_packing_does_not_leak() -> None:
    """A trace's scores do not depend on what it is packed with."""
    target = make_target()
    model = make_model(target, windows=(4,), sink="first4", gate=True)
    drafter = Eagle3Drafter(model, target.info, "toy")
    traces = [follow(drafter, make_trace((4 + 3 * i, 10), i)) for i in range(4)]
    together = drafter.score(traces, ScoreRequest(depth=4, full_chains=True))
    for trace, scores in zip(traces, together, strict=True):
        (alone,) = drafter.score([trace], ScoreRequest(depth=4, full_chains=True))
        assert torch.equal(alone.accepted, scores.accepted)
        assert alone.forced is not None and scores.forced is not None
        assert torch.equal(alone.forced, scores.forced)


@settings(max_examples=10, deadline=None)
@given(switches=SWITCHES, seed=st.integers(0, 100), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_rejection_alpha_is_min_one_q_over_p(switches: dict[str, Any], seed: int, temperature: float) -> None:
    target, depth = make_target(), 3
    model = build(target, switches, seed)
    trace = make_trace((7, 5), seed, spans=SPANS, prefix=(1,), temperature=temperature)
    drafter = Eagle3Drafter(model, target.info, "toy")
    (scores,) = drafter.score([trace], ScoreRequest(depth=depth, sampler="rejection"))
    found = run_all(model, trace, depth)
    ids = model.target_ids.tolist()
    assert scores.alpha is not None and scores.alpha.dtype == torch.float64
    gone = set()
    for s in range(4):
        for i in range(1, depth + 1):
            if s + i > 4 or s in gone:
                assert scores.alpha[s, i - 1] == 0
                continue
            token, p = trace.answer_ids[s + i], math.exp(trace.logprobs[s + i])
            q = (
                torch.softmax(found[s, i].double() / temperature, 0)[ids.index(token)].item()
                if token in ids
                else 0.0
            )
            assert scores.alpha[s, i - 1].item() == pytest.approx(min(1.0, q / p), rel=1e-4)
            if q == 0.0:
                gone.add(s)


def test_session_draws_from_the_law_it_reports() -> None:
    target = make_target()
    model = make_model(target, target_ids=HALF, std=0.2)
    drafter = Eagle3Drafter(model, target.info, "toy")
    trace = make_trace((6, 3), 0)
    session = drafter.session()
    session.observe(trace.ids[:7], {t: x[:6] for t, x in trace.taps.items()})
    g = torch.Generator().manual_seed(0)
    draws = [session.propose(1, g, temperature=1.5) for _ in range(3000)]
    law = draws[0].probs
    assert law is not None and law.shape == (1, VOCAB)
    packed, rows = drafter.pack([trace])
    exact = torch.zeros(VOCAB)

    def on_step(step: int, active: torch.Tensor, post: torch.Tensor) -> None:
        exact[model.target_ids] = torch.softmax(model.logits(post)[0] / 1.5, 0)

    with torch.no_grad():
        run_chains(model, packed, rows[:1], 1, on_step)
    torch.testing.assert_close(law[0], exact)
    counts = torch.bincount(torch.tensor([d.tokens[0] for d in draws]), minlength=VOCAB) / 3000
    assert (counts - exact).abs().max() < 5 * (0.25 / 3000) ** 0.5


def test_gradients_equal_those_of_a_naive_sum() -> None:
    """Autograd through blocks, chains and the feedback agrees with finite differences."""
    target = make_target(dtype=torch.float64)
    model = make_model(target, feedback="post", gate=True, norm_per_tap=True, num_layers=2)
    trace = make_trace((5, 5), 0, dtype=torch.float64)
    packed, rows = Eagle3Drafter(model, target.info, "toy").pack([trace])

    def loss() -> torch.Tensor:
        total: list[torch.Tensor] = []
        run_chains(
            model,
            packed,
            rows,
            3,
            lambda step, active, post: total.append(model.logits(post).logsumexp(-1).sum() * step),
        )
        return torch.stack(total).sum()

    loss().backward()
    g = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(direction * 1e-6)
            high = loss()
            parameter.sub_(direction * 2e-6)
            low = loss()
            parameter.add_(direction * 1e-6)
        slope = (high - low) / 2e-6
        torch.testing.assert_close((parameter.grad * direction).sum(), slope, rtol=1e-4, atol=1e-5, msg=name)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_row_that_hits_is_left_out(seed: int, dtype: torch.dtype) -> None:
    model = make_model(make_target(), seed).to(dtype)
    post = torch.randn(64, model.config.hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    best = model.logits(post).argmax(-1)
    assert model.contenders(post, best).tolist() == list(range(64))
    worst = model.logits(post).argmin(-1)
    assert len(model.contenders(post, worst)) < 32
    assert not len(model.contenders(post, torch.full_like(best, -1)))


def test_nan_weights_are_counted() -> None:
    target = make_target()
    model = make_model(target)
    with torch.no_grad():
        model.fc.weight.fill_(float("nan"))
    (scores,) = Eagle3Drafter(model, target.info, "toy").score([make_trace((4, 6), 0)], ScoreRequest(depth=2))
    assert scores.num_nonfinite == 5
    model = make_model(target)
    with torch.no_grad():
        # one token no label is compared with
        model.head_weight()[-1] = float("nan")
    (scores,) = Eagle3Drafter(model, target.info, "toy").score([make_trace((4, 6), 0)], ScoreRequest(depth=2))
    assert scores.num_nonfinite == 5


def test_probe_and_perturb_see_every_step() -> None:
    target = make_target()
    model = make_model(target, feedback="pre", windows=(4,), sink="bos")
    trace = make_trace((5, 6), 0, prefix=(1,))
    drafter = Eagle3Drafter(model, target.info, "toy")
    labels = torch.tensor([0] + [1] * 4 + [2] * 5)

    class Watch:
        regions = (labels, 3)

        def __init__(self) -> None:
            self.steps: dict[int, dict[str, torch.Tensor]] = {}

        def on_step(self, step: int, tensors: Any) -> None:
            self.steps[step] = dict(tensors)

    watch = Watch()
    plain = drafter.score([trace], ScoreRequest(depth=3, full_chains=True), probe=watch)
    assert sorted(watch.steps) == [1, 2, 3]
    for step, seen in watch.steps.items():
        count = 5 - (step - 1)
        assert seen["residual"].shape == seen["hidden"].shape == seen["embeds"].shape == (count, 16)
        assert seen["mass"].shape == (count, 4, 3 + step - 1)
        torch.testing.assert_close(seen["mass"].sum(-1), torch.ones(count, 4))
        assert torch.equal(seen["state"], seen["residual"])
    rows = watch.steps[1]["rows"]
    fused = model.fuse([trace.taps[t][rows] for t in model.config.taps])
    torch.testing.assert_close(watch.steps[1]["hidden"], fused)
    torch.testing.assert_close(watch.steps[2]["hidden"], watch.steps[1]["state"][:4])

    calls = []

    def nothing(
        step: int, rows: torch.Tensor, hidden: torch.Tensor, embeds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((step, len(rows)))
        return hidden, embeds

    same = drafter.score([trace], ScoreRequest(depth=3, full_chains=True), perturb=nothing)
    assert calls == [(1, 10), (2, 4), (3, 3)]
    assert torch.equal(same[0].forced, plain[0].forced)
    blind = Watch()
    drafter.score(
        [trace],
        ScoreRequest(depth=3, full_chains=True),
        probe=blind,
        perturb=lambda s, r, h, e: (torch.zeros_like(h), e),
    )
    assert not blind.steps[2]["hidden"].any() and watch.steps[2]["hidden"].any()
    assert not torch.allclose(blind.steps[2]["residual"], watch.steps[2]["residual"])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0],
        },
    ],
    ids=lambda r: r["rope_type"],
)  # fmt: skip
def test_rope_scalings_equal_transformers(rope: dict[str, Any]) -> None:
    """Tables equal a Llama's own at positions within reach (long sequences for longrope)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = make_model(make_target(), rope=rope)
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        head_dim=6,
        max_position_embeddings=512,
        rope_parameters=dict(rope),
    )
    positions = torch.arange(500)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = model.rope.tables(positions, torch.float32)
    torch.testing.assert_close(ours[0][:, 0], cos[0])
    torch.testing.assert_close(ours[1][:, 0], sin[0])


def test_sinks() -> None:
    config = make_model(make_target(), windows=(4,), sink="bos").config
    assert sink_span(config, [1, 1, 5, 1], 1, None) == (0, 2)
    assert sink_span(config, [5, 1], 1, None) == (0, 0)
    assert sink_span(config, [5, 1], None, None) == (0, 0)
    system = make_model(make_target(), windows=(4,), sink="system").config
    assert sink_span(system, [1, 2, 3], 1, (1, 3)) == (1, 3)
    assert sink_span(system, [1, 2, 3], 1, None) == (0, 0)


def test_refusals() -> None:
    target = make_target()
    with pytest.raises(UserError, match="no effect without a window"):
        make_model(target, sink="bos")
    with pytest.raises(UserError, match="repacked has no effect"):
        make_model(target, windows=(4,), positions="repacked")
    with pytest.raises(UserError, match="tap 9 does not exist"):
        make_model(target, taps=(2, 4, 9))
    with pytest.raises(UserError, match="duplicate"):
        make_model(target, taps=(2, 4, 4))
    drafter = Eagle3Drafter(make_model(target), target.info, "toy")
    trace = make_trace((4, 4), 0)
    with pytest.raises(UserError, match="temperature"):
        drafter.score([trace], ScoreRequest(depth=2, sampler="rejection"))
    del trace.taps[4]
    with pytest.raises(UserError, match="needs tap 4"):
        drafter.score([trace], ScoreRequest(depth=2))
    system = Eagle3Drafter(make_model(target, windows=(4,), sink="system"), target.info, "toy")
    with pytest.raises(UserError, match="system"):
        system.session()


def test_one_token_answers_have_no_rounds() -> None:
    drafter = Eagle3Drafter(make_model(make_target()), make_target().info, "toy")
    for traces in ([make_trace((4, 1), 0)], [make_trace((4, 1), 0), make_trace((1, 2), 1)]):
        scores = drafter.score(traces, ScoreRequest(depth=2, full_chains=True))
        assert [len(s.accepted) for s in scores] == [len(t.answer_ids) - 1 for t in traces]


def test_packed_layout() -> None:
    packed = Packed.build(
        [(torch.tensor([5, 6, 7]), [torch.zeros(2, 3)]), (torch.tensor([8, 9]), [torch.ones(1, 3)])],
        [(0, 1), (0, 0)],
    )
    assert packed.inputs.tolist() == [6, 7, 9]
    assert packed.cu_seqlens.tolist() == [0, 2, 3]
    assert packed.positions.tolist() == [0, 1, 0]
    assert packed.last.tolist() == [1, 1, 2]
    assert packed.sink is not None and packed.sink.tolist() == [[0, 1], [2, 2]]


def test_dropping_chains_changes_nothing_for_the_others() -> None:
    model = make_model(make_target(), windows=(5,), sink="first4", num_layers=2)
    trace = make_trace((5, 12), 0)
    everything = run_all(model, trace, 6)
    packed, rows = Eagle3Drafter(model, make_target().info, "toy").pack([trace])
    found: dict[tuple[int, int], torch.Tensor] = {}

    def on_step(step: int, active: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        for i, logits in zip(active.tolist(), model.logits(post), strict=True):
            found[i, step] = logits
        return (active + step) % 4 != 0

    with torch.no_grad():
        run_chains(model, packed, rows, 6, on_step)
    assert 25 < len(found) < len(everything)
    for key, logits in found.items():
        torch.testing.assert_close(logits, everything[key])
