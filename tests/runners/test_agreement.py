"""One judge: replay and decode make the same rounds on the same ids; sampling keeps the target's law."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.draft_lm import DraftLM
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model, default_taps
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.ngram import NgramDrafter
from specbench.runners.agreement import Agreement
from specbench.runners.answers import Answerer
from specbench.runners.decode import DecodeRunner, verify
from specbench.runners.replay import ReplayRunner, walk_rounds
from specbench.runners.runner import RunSettings, Work
from specbench.runners.targets import Target
from specbench.types import (
    ConditionInfo,
    Drafter,
    Proposal,
    RenderedPrompt,
    Sampler,
    Sampling,
    ScoreRequest,
    Span,
    Trace,
)

VOCAB = 13
CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")


def prompts(count: int, length: int = 12) -> list[RenderedPrompt]:
    made = []
    for i in range(count):
        g = torch.Generator().manual_seed(i)
        ids = (1, *torch.randint(3, VOCAB, (length + 3 * i,), generator=g).tolist())
        spans = (
            Span(kind="bos", start=0, end=1),
            Span(kind="system", start=1, end=4),
            Span(kind="user", start=4, end=len(ids)),
        )
        made.append(
            RenderedPrompt(
                prompt_id=f"t/{i}", suite="t", category="", turn=0, condition=CLEAN, token_ids=ids, spans=spans,
                bos_count=1, template_hash="",
            )
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A tiny vocabulary, so that random drafters are accepted now and then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("agreement") / "target"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)

    class Tokenizer:
        bos_token_id, eos_token_id = 1, 2

    return Target.wrap(model, Tokenizer(), name="tiny", path=path)


def eagle3(target: Target, name: str, options: dict[str, Any], seed: int) -> Eagle3Drafter:
    """A random drafter that leans on the target's head, so that some drafts are right."""
    weights = target.weights()
    sizes = {"intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "head": "target"}
    model = Eagle3Model(Eagle3Config.for_target(weights.info, **(sizes | options)), weights)
    model.init_weights(torch.Generator().manual_seed(seed), std=0.5)
    return Eagle3Drafter(model, weights.info, name)


VARIANTS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"feedback": "post", "norm_per_tap": True},
    "joint": {"norm_joint": True, "norm_before_residual": True},
    "gated": {"gate": True, "feedback": "post"},
    "two-layers": {"num_layers": 2},
    "window-bos": {"windows": (6,), "sink": "bos"},
    "window-system": {"windows": (6,), "sink": "system", "positions": "repacked"},
}


def drafters(target: Target) -> dict[str, Drafter]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(8)
    small = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, initializer_range=0.3)
    ).eval()  # fmt: skip
    found: dict[str, Drafter] = {
        "ngram": NgramDrafter(1, 3),
        "self": DraftLM(target.model, "self", ""),
        "small": DraftLM(small, "small", ""),
    }
    answerer = Answerer(target, taps=default_taps(target.info.num_layers), max_new_tokens=24)
    traces = list(answerer.answer(prompts(3)))
    for name, options in VARIANTS.items():
        found[name] = next(d for d in lucky(target, name, options) if num_accepted(d, traces) > 1)
    return found


def lucky(target: Target, name: str, options: dict[str, Any]) -> Iterator[Eagle3Drafter]:
    """Random drafters until one is right now and then: rounds without a hit would prove nothing."""
    return (eagle3(target, name, options, seed) for seed in range(60))


def num_accepted(drafter: Drafter, traces: list[Trace]) -> int:
    """Accepted draft tokens over the rounds of all traces."""
    return sum(
        entry.num_accepted
        for trace, scores in zip(traces, drafter.score(traces, ScoreRequest(depth=4)), strict=True)
        for entry in walk_rounds(scores, len(trace.answer_ids), 4)
    )


def settings(
    sampler: Sampler, depths: tuple[int, ...] = (4,), seed: int = 0, tokens: int = 24
) -> RunSettings:
    temperature = 0.0 if sampler == "greedy" else 0.9
    return RunSettings(
        depths=depths,
        sampling=Sampling(temperature=temperature, seed=seed),
        sampler=sampler,
        max_new_tokens=tokens,
        batch_size=4,
    )


@pytest.mark.parametrize("sampler", ["greedy", "match"])
def test_replay_equals_decode_round_by_round(target: Target, sampler: Sampler) -> None:
    made = drafters(target)
    work = [Work(prompt=p, drafters=tuple(made)) for p in prompts(3)]
    chosen = settings(sampler)
    replayed = {o.work.prompt.key: o for o in ReplayRunner(target, chosen).run(work, made, lambda _n: None)}
    accepted: dict[str, int] = defaultdict(int)
    for decoded in DecodeRunner(target, chosen).run(work, made, lambda _n: None):
        assert not decoded.errors
        outcome = replayed[decoded.work.prompt.key]
        assert not outcome.errors
        for name in made:
            for k in chosen.depths:
                assert Agreement().add(outcome, decoded, name, k) is None
                accepted[name] += sum(r.num_accepted for r in decoded.rounds[name, k])
                emitted = sum(r.num_emitted for r in decoded.rounds[name, k])
                assert 1 + emitted == len(decoded.answer_ids)
    if sampler == "greedy":
        for name in ("ngram", "small", *VARIANTS):
            assert accepted[name] > 0, f"{name} never had a draft accepted: this test would prove nothing"


def test_the_target_as_its_own_drafter_accepts_everything(target: Target) -> None:
    made: dict[str, Drafter] = {"self": DraftLM(target.model, "self", "")}
    work = [Work(prompt=p, drafters=("self",)) for p in prompts(4)]
    for outcome in ReplayRunner(target, settings("greedy", (4,))).run(work, made, lambda _n: None):
        for entry in outcome.rounds["self", 4]:
            left = len(outcome.answer_ids) - 1 - entry.start
            assert entry.num_accepted == min(4, left)


def test_match_sampling_gives_the_tokens_of_plain_sampling(target: Target) -> None:
    chosen = settings("match", (3,), seed=5)
    made: dict[str, Drafter] = {"ngram": NgramDrafter(1, 3)}
    plain = {
        t.prompt.key: t.answer_ids
        for t in Answerer(target, taps=(), max_new_tokens=24, sampling=chosen.sampling).answer(prompts(5))
    }
    work = [Work(prompt=p, drafters=("ngram",)) for p in prompts(5)]
    for outcome in DecodeRunner(target, chosen).run(work, made, lambda _n: None):
        assert outcome.answer_ids == plain[outcome.work.prompt.key]


class Grid:
    """Stands in for a random stream: yields given grid points, and says when it has none left."""

    def __init__(self, points: tuple[int, ...], size: int) -> None:
        self.points, self.size, self.used = points, size, 0

    def random(self) -> float:
        if self.used == len(self.points):
            raise LookupError
        self.used += 1
        return (self.points[self.used - 1] + 0.5) / self.size


def every_path(size: int, body: Any) -> Iterator[tuple[float, Any]]:
    """Run ``body(random)`` under every sequence of grid points it asks for: (probability, result)."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        points = waiting.pop()
        try:
            result = body(Grid(points, size))
        except LookupError:
            waiting.extend((*points, i) for i in range(size))
            continue
        yield size ** -len(points), result


@pytest.mark.parametrize("sampler", ["match", "rejection"])
def test_one_round_has_exactly_the_law_of_the_target(sampler: Sampler) -> None:
    """All randomness of a two-draft round enumerated: every probability here is a multiple of 1/6.

    The emitted tokens, completed with tokens from the target, must be distributed as the target's own sequences.
    """
    size = 6
    p = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0]]) / size  # row: position
    q = torch.tensor([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]) / size
    sampling = Sampling(temperature=1.0)

    def body(random: Grid) -> tuple[int, ...]:
        drafts = [min(int(random.random() * 3), 2) for _ in range(2)] if sampler == "rejection" else [0, 1]
        proposal = Proposal(tokens=drafts, probs=q if sampler == "rejection" else None)
        _count, tokens = verify(p.log(), proposal, sampling, sampler, random)  # type: ignore[arg-type]
        return tuple(tokens)

    law: dict[tuple[int, ...], float] = defaultdict(float)
    total = 0.0
    for probability, tokens in every_path(size, body):
        total += probability
        tails: list[tuple[tuple[int, ...], float]] = [(tokens, probability)]
        for position in range(len(tokens), 3):
            tails = [((*t, x), w * float(p[position, x])) for t, w in tails for x in range(3)]
        for sequence, weight in tails:
            law[sequence] += weight
    assert total == pytest.approx(1.0)
    for a in range(3):
        for b in range(3):
            for c in range(3):
                assert law[a, b, c] == pytest.approx(float(p[0, a] * p[1, b] * p[2, c]), abs=1e-6)


def test_a_one_hot_draft_under_rejection_sampling_keeps_the_law() -> None:
    p = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0]]) / 6

    def body(random: Grid) -> int:
        _count, tokens = verify(p.log(), Proposal(tokens=[1]), Sampling(temperature=1.0), "rejection", random)  # type: ignore[arg-type]
        return tokens[0]

    law: dict[int, float] = defaultdict(float)
    for probability, token in every_path(60, body):
        law[token] += probability
    for token in range(3):
        assert law[token] == pytest.approx(float(p[0, token]), abs=1e-6)


def test_expected_rejection_counts_equal_decoding(target: Target) -> None:
    """Replay's expectation over many sampled answers against decode's mean, within its standard error."""
    made: dict[str, Drafter] = {
        "small": drafters(target)["small"],
        "post": eagle3(target, "post", VARIANTS["post"], seed=1),
    }
    per_seed: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for seed in range(60):
        chosen = settings("rejection", (3,), seed=seed, tokens=16)
        work = [Work(prompt=prompts(1)[0], drafters=tuple(made))]
        for runner in (ReplayRunner(target, chosen), DecodeRunner(target, chosen)):
            for outcome in runner.run(work, made, lambda _n: None):
                assert not outcome.errors
                for name in made:
                    rounds = outcome.rounds[name, 3]
                    accepted = sum(r.weight * r.num_accepted for r in rounds)
                    per_seed[runner.name, name].append((accepted, sum(r.weight for r in rounds)))
    for name in made:
        replay = torch.tensor(per_seed["replay", name])
        decode = torch.tensor(per_seed["decode", name])
        error = float(decode[:, 0].std() / len(decode) ** 0.5)
        assert abs(float(replay[:, 0].mean() - decode[:, 0].mean())) < 4 * error
        error = float(decode[:, 1].std() / len(decode) ** 0.5)
        assert abs(float(replay[:, 1].mean() - decode[:, 1].mean())) < 4 * error


def test_the_demo_target_is_needed_only_where_named(smollm2_path: Path) -> None:
    assert (smollm2_path / "checksums.json").is_file()
