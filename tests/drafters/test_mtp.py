"""MTP heads against transformers' own decoder blocks, in every published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.drafters.chains import run_chains
from specbench.drafters.checkpoints.detect import checkpoint_kind
from specbench.drafters.checkpoints.mtp import load_mtp, save_mtp
from specbench.drafters.mtp import MtpConfig, MtpModel
from specbench.drafters.mtp_drafter import MtpDrafter, create
from specbench.drafters.resolve import load_drafter
from specbench.errors import UserError
from specbench.types import ScoreRequest, TargetWeights, Trace

from .helpers import HALF, make_trace
from .mtp_families import FAMILIES, LAYERS, VOCAB, WIDTH, make_target

DEPTH = 3
SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24}


def trace_for(seed: int, prompt: int = 5, answer: int = 6, vocab: int = VOCAB, **more: Any) -> Trace:
    return make_trace((prompt, answer), seed, width=WIDTH, vocab=vocab, **more)


def make_model(target: TargetWeights, seed: int = 0, **changes: Any) -> MtpModel:
    settings = SIZES | changes
    ids = settings.pop("target_ids", None)
    if ids is not None:
        settings["draft_vocab_size"] = len(ids)
    model = MtpModel(MtpConfig.for_target(target.info, **settings), target, ids)
    g = torch.Generator().manual_seed(seed)
    model.init_weights(g, 0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=g) + 0.5)
    return model.eval()


def chain_logits(drafter: MtpDrafter, trace: Trace) -> list[torch.Tensor]:
    """Logits [depth of the start, V] of every round start, from the packed computation."""
    packed, rows = drafter.pack([trace])
    found: list[list[torch.Tensor]] = [[] for _ in rows]

    def on_step(_step: int, active: torch.Tensor, post: torch.Tensor) -> None:
        for i, logits in zip(active.tolist(), drafter.model.logits(post), strict=True):
            found[i].append(logits)

    with torch.inference_mode():
        run_chains(drafter.model, packed, rows, DEPTH, on_step)
    return [torch.stack(one) for one in found]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers_blocks(name: str, tmp_path: Path) -> None:
    reference = FAMILIES[name](tmp_path)
    drafter = create(None, {}, reference.target)
    trace = trace_for(1)
    ids = list(trace.ids)
    tap = trace.taps[LAYERS]
    for start, logits in enumerate(chain_logits(drafter, trace)):
        expected = reference.chain(tap, ids, len(trace.prompt.token_ids) + start - 1, len(logits))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_of_one_token_has_its_first_embedding_masked(tmp_path: Path) -> None:
    reference = FAMILIES["deepseek"](tmp_path)
    trace = trace_for(2, prompt=1)
    (logits, *_rest) = chain_logits(create(None, {}, reference.target), trace)
    expected = reference.chain(trace.taps[LAYERS], list(trace.ids), 0, DEPTH)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    reference.mask_first = False
    assert (reference.chain(trace.taps[LAYERS], list(trace.ids), 0, DEPTH) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "deepseek", "deepseek-yarn", "mimo"])
def test_session_and_scores_agree_at_every_start(name: str, tmp_path: Path) -> None:
    target = FAMILIES[name](tmp_path).target
    drafter = create(None, {}, target)
    trace = trace_for(4, answer=12, vocab=6)
    (scores,) = drafter.score([trace], ScoreRequest(depth=DEPTH))
    session = drafter.session()
    size = len(trace.prompt.token_ids)
    session.observe([*trace.prompt.token_ids, trace.answer_ids[0]], {LAYERS: trace.taps[LAYERS][:size]})
    for start in range(len(trace.answer_ids) - 1):
        tokens = session.propose(DEPTH).tokens
        truth = trace.answer_ids[start + 1 : start + 1 + DEPTH]
        hits = [t == x for t, x in zip(tokens, truth, strict=False)]
        assert int(scores.accepted[start]) == next((i for i, h in enumerate(hits) if not h), len(hits))
        row = size + start
        session.observe([trace.answer_ids[start + 1]], {LAYERS: trace.taps[LAYERS][row : row + 1]})


def test_the_target_s_final_norm_can_be_left_out(tmp_path: Path) -> None:
    target = FAMILIES["mimo"](tmp_path).target
    trace = trace_for(3)
    applied = chain_logits(create(None, {}, target), trace)[0]
    skipped_drafter = create(None, {"final_norm": "skip"}, target)
    skipped = chain_logits(skipped_drafter, trace)[0]
    assert (applied - skipped).abs().max() > 1e-2
    assert "option final_norm=skip" in skipped_drafter.info.notes
    with pytest.raises(UserError, match="final_norm"):
        create(None, {"final_norm": "maybe"}, target)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"head": "target_rows", "target_ids": HALF}])
def test_own_files_hold_the_head_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    target = make_target(tmp_path)
    model = make_model(target, trained_depth=4, **changes)
    save_mtp(model, tmp_path / "head")
    assert checkpoint_kind(str(tmp_path / "head")) == "mtp"
    loaded = load_mtp(str(tmp_path / "head"), target)
    assert loaded.model.config == model.config
    assert loaded.model.fingerprint() == model.fingerprint()
    drafter = load_drafter(f"mtp={tmp_path / 'head'}", target)
    assert drafter.info.kind == "mtp" and drafter.info.reads_states and drafter.info.taps == (LAYERS,)
    assert drafter.info.settings["feedback"] == "post"


def test_a_dense_head_is_refused_behind_other_norms(tmp_path: Path) -> None:
    target = FAMILIES["qwen3-next"](tmp_path / "target").target
    save_mtp(make_model(target), tmp_path / "head")
    with pytest.raises(UserError, match=r"qwen3_next\) has \(1 \+ w\) norms"):
        create(str(tmp_path / "head"), {}, target)


def test_noise_reaches_the_head(tmp_path: Path) -> None:
    drafter = MtpDrafter(make_model(make_target(tmp_path)), make_target(tmp_path).info, "mtp")
    seen: list[int] = []

    def perturb(step: int, rows: Any, hidden: torch.Tensor, embeds: torch.Tensor) -> Any:
        seen.append(step)
        return hidden * 0, embeds * 0

    drafter.score([trace_for(1)], ScoreRequest(depth=2, full_chains=True), perturb=perturb)
    assert seen == [1, 2]


def rewrite(path: Path, *, drop: str = "", add: dict[str, torch.Tensor] | None = None, **keys: Any) -> None:
    tensors = {n: t for n, t in load_file(path / "model.safetensors").items() if not drop or drop not in n}
    save_file(tensors | (add or {}), path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("name", "drop", "keys", "message"),
    [
        ("qwen3-next", "mtp.", {}, "no mtp.\\* tensors although config.json sets num_nextn_predict_layers"),
        ("qwen3-next", "mtp.", {"num_nextn_predict_layers": 0}, "this target has no MTP head"),
        ("qwen3-next", "mtp.fc", {}, "lacks layers.0.fc.weight"),
        ("qwen3-next", "experts.2.up_proj", {}, "experts.2.up_proj"),
        ("qwen3-next", "", {"num_nextn_predict_layers": 2}, "one block that serves all steps"),
        ("qwen3-next", "", {"model_type": "llama"}, "no MTP head is known for model_type 'llama'"),
        ("qwen3-next", "", {"quantization_config": {"bits": 4}}, "quantized"),
        ("qwen3-next", "", {"vocab_size": 24}, "another tokenizer"),
        ("qwen3-next", "", {"hidden_size": 16}, "another target"),
        ("deepseek", "shared_head.norm", {}, "lacks norm.weight"),
        ("deepseek", "", {"num_hidden_layers": 3}, "stripped"),
        ("deepseek", "", {"index_topk": 4}, "indexer"),
        ("deepseek", "", {"kv_lora_rank": 11}, "kv_a_"),
    ],
)
def test_a_bad_head_is_named(
    name: str, drop: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = FAMILIES[name](tmp_path).target
    rewrite(tmp_path, drop=drop, **keys)
    with pytest.raises(UserError, match=message):
        create(None, {}, target)


def test_an_unused_tensor_is_named(tmp_path: Path) -> None:
    target = FAMILIES["mimo"](tmp_path).target
    rewrite(tmp_path, add={"model.mtp_layers.0.mlp.extra.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"holds layers.0.mlp.extra.weight"):
        create(None, {}, target)


def test_only_the_head_s_shard_is_needed(tmp_path: Path) -> None:
    target = FAMILIES["qwen3-next"](tmp_path).target
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    head = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
    save_file(head, tmp_path / "model-00002.safetensors")
    places = {n: "model-00002.safetensors" if n in head else "model-00001.safetensors" for n in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert create(None, {}, target).info.kind == "mtp"


def test_a_target_without_files_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    target.path = None
    with pytest.raises(UserError, match="mtp=PATH"):
        create(None, {}, target)
    target.norm = None
    with pytest.raises(UserError, match="no final norm"):
        make_model(target)
