"""A broken export must be named: decode on the broken files plays the other engine, replay has the true drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.drafters.chains import run_chains
from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.save import export_model
from specbench.drafters.dflash import DFlashConfig, DFlashModel
from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.ngram import NgramDrafter
from specbench.errors import UserError
from specbench.runners.agreement import first_difference
from specbench.runners.answers import Answerer
from specbench.runners.cross_check import Pair, Results, compare, cross_check
from specbench.runners.decode import DecodeRunner
from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.targets import Target
from specbench.runners.verdict import Judge, draft_facts
from specbench.types import ConditionInfo, RenderedPrompt, Round, Sampling, ScoreRequest, Span

VOCAB, DEPTH = 40, 4
CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="clean")
SETTINGS = RunSettings(
    depths=(DEPTH,), sampling=Sampling(), sampler="greedy", max_new_tokens=24, batch_size=4
)


def prompts(count: int = 6) -> list[RenderedPrompt]:
    made = []
    for i in range(count):
        g = torch.Generator().manual_seed(i)
        ids = (1, *torch.randint(3, VOCAB, (10 + 2 * i,), generator=g).tolist())
        made.append(
            RenderedPrompt(
                prompt_id=f"t/{i}", suite="t", category="", turn=0, condition=CLEAN, token_ids=ids,
                spans=(Span(kind="user", start=0, end=len(ids)),), bos_count=1, template_hash="",
            )
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("verdict") / "target"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4, bos_token_id=1, eos_token_id=None,
        pad_token_id=0, rope_theta=1e5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)

    class Tokenizer:
        bos_token_id, eos_token_id = 1, None

    return Target.wrap(model, Tokenizer(), name="tiny", path=path)


def trained(target: Target, **options: Any) -> Eagle3Drafter:
    """A drafter that has learnt these very answers: where nothing is accepted, nothing can be told apart."""
    weights = target.weights()
    config = Eagle3Config.for_target(
        weights.info, taps=(2, 4, 5), intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8,
        draft_vocab_size=30, **options,
    )  # fmt: skip
    answerer = Answerer(target, taps=config.taps, max_new_tokens=24)
    traces = list(answerer.answer(prompts()))
    model = Eagle3Model(config, weights, target_ids=[i for i in range(VOCAB) if i % 4 != 3])
    model.init_weights(torch.Generator().manual_seed(0), std=0.2)
    drafter = Eagle3Drafter(model, weights.info, "drafter")
    packed, rows = drafter.pack(traces)
    rows = rows[rows + DEPTH <= packed.last[rows]]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(45):
        losses: list[torch.Tensor] = []

        def on_step(
            step: int, active: torch.Tensor, post: torch.Tensor, losses: list[torch.Tensor] = losses
        ) -> None:
            labels = model.draft_ids[packed.inputs[rows[active] + step]]
            losses.append(torch.nn.functional.cross_entropy(model.logits(post), labels, ignore_index=-1))

        run_chains(model, packed, rows, DEPTH, on_step)
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()
    return Eagle3Drafter(model.requires_grad_(False), weights.info, "drafter")


def run(kind: Any, target: Target, drafter: Any) -> list[Outcome]:
    work = [Work(prompt=p, drafters=("drafter",)) for p in prompts()]
    return list(kind(target, SETTINGS).run(work, {"drafter": drafter}, lambda _n: None))


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text())
        for name, value in changes.items():
            config[name] = value
            if name in config.get("eagle_config", {}):
                config["eagle_config"][name] = value
        file.write_text(json.dumps(config))

    return edit


def shift_map(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    ids = torch.arange(len(tensors["d2t"]))
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    tensors["d2t"] = (ids + tensors["d2t"] + 1) % vocab - ids
    del tensors["t2d"]
    save_file(tensors, file, metadata={"format": "pt"})


def remove_fc_norm(path: Path) -> None:
    file = path / "model.safetensors"
    save_file(
        {n: t for n, t in load_file(file).items() if not n.startswith("fc_norm")},
        file,
        metadata={"format": "pt"},
    )
    edit_config(fc_norm=False)(path)


BREAKS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "taps up": (edit_config(eagle_aux_hidden_state_layer_ids=[3, 5, 6]), "taps", "taps (3, 5, 6)"),
    "taps down": (edit_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "taps", "taps (1, 3, 4)"),
    "d2t": (shift_map, "vocabulary map", "d2t off by +1"),
    "norm_output": (edit_config(norm_output=False), "norm flags", "norm_output read as false"),
    "fc_norm": (remove_fc_norm, "norm flags", "fc_norm not applied"),
    "rope": (edit_config(rope_theta=1e4, rope_parameters=None), "positions", "RoPE base 10000"),
}


@pytest.fixture(scope="module")
def drafter(target: Target) -> Eagle3Drafter:
    return trained(target, feedback="post", norm_per_tap=True)


@pytest.mark.parametrize("name", list(BREAKS))
def test_a_broken_export_gets_the_right_verdict(
    target: Target, drafter: Eagle3Drafter, tmp_path: Path, name: str
) -> None:
    break_it, kind, text = BREAKS[name]
    export_model(drafter.model, "vllm", tmp_path, target.weights())
    break_it(tmp_path)
    broken = Eagle3Drafter(load_checkpoint(str(tmp_path), target.weights()).model, target.info, "drafter")
    pair = Pair(reference="replay", other="decode", drafter="drafter", k=DEPTH)
    expected = {o.work.prompt.key: o for o in run(ReplayRunner, target, drafter)}
    found = {o.work.prompt.key: o for o in run(DecodeRunner, target, broken)}
    compare(pair, expected, found, drafter, Judge(target))
    assert pair.agreement.equal < pair.agreement.rounds, (
        "the break changed nothing: this test would prove nothing"
    )
    assert not pair.agrees
    wrong = [d for d in pair.differences if not d.explained]
    assert {d.kind for d in wrong} == {kind}
    assert all(text in d.verdict for d in wrong)
    assert all(d.step >= 1 and d.tokens[0] is not None and d.margin is not None for d in wrong)


def test_context_keys_with_another_layers_norm_are_named(target: Target) -> None:
    """What a known engine does to DFlash: the keys of every layer go through layer 0's norm."""
    weights = target.weights()

    def dflash(norm: Any) -> DFlashDrafter:
        config = DFlashConfig.for_target(
            weights.info, taps=(2, 5), num_layers=2, block_size=DEPTH + 1, mask_token_id=3, num_heads=4,
            num_kv_heads=2, head_dim=8, intermediate_size=24, context_norm=norm,
        )  # fmt: skip
        model = DFlashModel(config, weights)
        model.init_weights(torch.Generator().manual_seed(1), std=0.4)
        with torch.no_grad():
            model.layers[1].self_attn.k_norm.weight.mul_(-3.0)  # type: ignore[union-attr, operator]
        return DFlashDrafter(model.requires_grad_(False), weights.info, "drafter")

    asked = dflash("own")
    pair = Pair(reference="replay", other="decode", drafter="drafter", k=DEPTH)
    expected = {o.work.prompt.key: o for o in run(ReplayRunner, target, asked)}
    found = {o.work.prompt.key: o for o in run(DecodeRunner, target, dflash("layer0"))}
    compare(pair, expected, found, asked, Judge(target))
    assert pair.differences and {d.kind for d in pair.differences} == {"norm flags"}
    assert all("normed by layer 0's k_norm" in d.verdict for d in pair.differences)


def test_the_same_drafter_agrees(target: Target, drafter: Eagle3Drafter) -> None:
    made = {"drafter": drafter}
    runners = {kind.name: kind(target, SETTINGS) for kind in (ReplayRunner, DecodeRunner)}
    (pair,) = cross_check(target, prompts(), made, SETTINGS, runners)
    assert pair.agrees and not pair.differences
    assert pair.agreement.rounds == pair.agreement.equal > 20


def test_a_failed_drafter_is_not_agreement(target: Target) -> None:
    expected = {o.work.prompt.key: o for o in run(ReplayRunner, target, NgramDrafter(1, 3))}
    found = {
        key: Outcome(work=o.work, errors={"drafter": "vLLM does not start"}) for key, o in expected.items()
    }
    pair = Pair(reference="replay", other="vllm", drafter="drafter", k=DEPTH)
    compare(pair, expected, found, NgramDrafter(1, 3), Judge(target))
    assert pair.failures == {"": "vLLM does not start"}
    assert not pair.agrees


def test_another_bos_in_the_prompt_is_named(target: Target) -> None:
    """The other engine puts a second BOS before the ids; its answers are those of that prompt."""
    drafter = NgramDrafter(1, 3)
    expected = {o.work.prompt.key: o for o in run(ReplayRunner, target, drafter)}
    doubled = [replace(p, token_ids=(1, *p.token_ids)) for p in prompts()]
    work = [Work(prompt=p, drafters=("drafter",)) for p in doubled]
    found = {}
    for outcome in DecodeRunner(target, SETTINGS).run(work, {"drafter": drafter}, lambda _n: None):
        asked = next(p for p in prompts() if p.prompt_id == outcome.work.prompt.prompt_id)
        outcome.work = replace(outcome.work, prompt=asked)
        found[asked.key] = outcome
    pair = Pair(reference="replay", other="decode", drafter="drafter", k=DEPTH)
    compare(pair, expected, found, drafter, Judge(target))
    assert {d.kind for d in pair.differences} == {"BOS"}
    assert not pair.agrees


def outcome_of(
    target: Target, drafter: Any, change: Callable[[list[Round]], list[Round]]
) -> tuple[Outcome, Outcome]:
    one = run(ReplayRunner, target, drafter)[0]
    other = replace(one, rounds={("drafter", DEPTH): change(one.rounds["drafter", DEPTH])})
    return one, other


def test_counting_behind_the_end_is_named(target: Target, drafter: Eagle3Drafter) -> None:
    def change(rounds: list[Round]) -> list[Round]:
        left = rounds[-1].num_emitted
        return [*rounds[:-1], replace(rounds[-1], num_accepted=left + 2)]

    difference = first_difference(*outcome_of(target, drafter, change), "drafter", DEPTH)
    assert difference is not None and difference.kind == "after-EOS counting" and not difference.explained


def test_a_round_for_the_prefill_is_named(target: Target, drafter: Eagle3Drafter) -> None:
    def change(rounds: list[Round]) -> list[Round]:
        first = replace(rounds[0], num_accepted=0, num_emitted=1, start=0)
        return [first, *(replace(r, start=r.start + 1) for r in rounds)]

    difference = first_difference(*outcome_of(target, drafter, change), "drafter", DEPTH)
    assert difference is not None and difference.kind == "prefill counted"


def test_draft_facts_are_the_sessions_drafts(target: Target, drafter: Eagle3Drafter) -> None:
    """The token at a step, read from the chains, against the sequential session."""
    answerer = Answerer(target, taps=drafter.info.taps, max_new_tokens=20)
    trace = next(iter(answerer.answer(prompts(1))))
    scores = drafter.score([trace], ScoreRequest(depth=DEPTH))
    length = trace.prompt_length
    for start in range(len(trace.answer_ids) - 1):
        session = drafter.session(trace.prompt)
        seen = length + start
        session.observe(trace.ids[: seen + 1], {t: states[:seen] for t, states in trace.taps.items()})
        step = int(scores[0].accepted[start]) + 1
        facts = draft_facts(drafter, trace, start, min(step, DEPTH))
        if facts is not None:
            assert facts[0] == session.propose(DEPTH).tokens[min(step, DEPTH) - 1]
            assert facts[1] >= 0


def test_samples_are_not_compared(target: Target) -> None:
    sampled = replace(SETTINGS, sampling=Sampling(temperature=1.0), sampler="match")
    with pytest.raises(UserError, match="temperature 0"):
        list(cross_check(target, prompts(), {}, sampled, {}))


def test_results_keep_one_outcome_per_drafter(target: Target) -> None:
    made = {"a": NgramDrafter(1, 3), "b": NgramDrafter(2, 3)}
    work = [Work(prompt=p, drafters=("a", "b")) for p in prompts(2)]
    found = Results.of(ReplayRunner(target, SETTINGS), work, made, lambda _n: None)
    assert set(found.by_drafter) == {"a", "b"}
    assert all(set(o) == {p.key for p in prompts(2)} for o in found.by_drafter.values())
