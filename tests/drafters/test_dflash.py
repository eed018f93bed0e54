"""DFlash: packed computation, session and checkpoints against a naive one-position-at-a-time implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.drafters.checkpoints.detect import checkpoint_kind
from specbench.drafters.checkpoints.dflash import MASK_FILE, load_dflash, save_dflash
from specbench.drafters.dflash import DFlashConfig, DFlashModel, default_target_layers
from specbench.drafters.dflash_drafter import DFlashDrafter, create
from specbench.drafters.resolve import load_drafter
from specbench.errors import UserError
from specbench.types import ScoreRequest, TargetWeights, Trace

from .dflash_reference import NaiveDFlash
from .helpers import HALF, make_target, make_trace

SIZES: dict[str, Any] = {
    "taps": (2, 5, 7), "num_layers": 2, "block_size": 5, "mask_token_id": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 6, "intermediate_size": 24,
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_layers": 1, "block_size": 8},
    "draft vocabulary": {"head": "own", "target_ids": HALF},
    "target rows": {"head": "target_rows", "target_ids": HALF},
    "causal": {"causal": (True, True)},
    "windows": {"windows": (4, 4), "causal": (True, True)},
    "mixed": {"windows": (4, None), "causal": (True, False)},
    "window both ways": {"windows": (4, 4), "causal": (False, False)},
    "biases": {"qkv_bias": True, "o_bias": True},
    "value scale": {"value_scale": 0.5},
}


def make_model(target: TargetWeights, seed: int = 0, **changes: Any) -> DFlashModel:
    settings = SIZES | changes
    ids = settings.pop("target_ids", None)
    if ids is not None:
        settings["draft_vocab_size"] = len(ids)
    model = DFlashModel(DFlashConfig.for_target(target.info, **settings), target, ids)
    g = torch.Generator().manual_seed(seed)
    model.init_weights(g, 0.4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(
                    torch.rand(parameter.shape, generator=g) + (0.5 if name.endswith("weight") else -0.5)
                )
    return model.eval()


def published(model: DFlashModel, path: Path, target: TargetWeights) -> NaiveDFlash:
    """The model as an engine would read it from its files."""
    save_dflash(model, path, target=target)
    config = json.loads((path / "config.json").read_text())
    w = {n: t.double() for n, t in load_file(path / "model.safetensors").items() if n not in ("d2t", "t2d")}
    head = w["lm_head.weight"] if "lm_head.weight" in w else target.head.double()
    return NaiveDFlash(config, w, target.embed.double(), head)


def naive_logits(naive: NaiveDFlash, trace: Trace, start: int, masks: int) -> torch.Tensor:
    taps = [naive.own["target_layer_ids"][i] + 1 for i in range(len(naive.own["target_layer_ids"]))]
    rows = range(len(trace.prompt.token_ids) + start)
    states = [[trace.taps[t][p].double() for t in taps] for p in rows]
    return naive.block(states, trace.answer_ids[start], masks)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_naive_implementation(name: str, tmp_path: Path) -> None:
    target = make_target()
    model = make_model(target, **VARIANTS[name])
    naive = published(model, tmp_path, target)
    drafter = DFlashDrafter(model, target.info, "dflash")
    traces = [make_trace((6, 5), 1), make_trace((1, 4), 2)]
    masks = model.config.max_depth
    with torch.inference_mode():
        packed, rows = pack(drafter, traces)
        post = model.block(model.context(packed.taps, packed.positions), packed, rows)
        logits = model.logits(post[:, 1:].flatten(0, 1)).unflatten(0, (-1, masks))
    row = 0
    for trace in traces:
        for start in range(len(trace.answer_ids) - 1):
            expected = naive_logits(naive, trace, start, masks)
            torch.testing.assert_close(logits[row].double(), expected, atol=1e-4, rtol=1e-4)
            row += 1
    assert row == len(rows)


def pack(drafter: DFlashDrafter, traces: list[Trace]) -> Any:
    from specbench.drafters.scoring import pack_traces

    return pack_traces(traces, taps=drafter.info.taps, name="dflash", device=torch.device("cpu"))


def test_the_engine_defect_is_modelled(tmp_path: Path) -> None:
    target = make_target()
    naive = published(make_model(target), tmp_path, target)
    trace = make_trace((6, 3), 1)
    naive.defect = True
    loaded = load_dflash(str(tmp_path), target, {"context_norm": "layer0"})
    drafter = DFlashDrafter(loaded.model, target.info, "dflash")
    packed, rows = pack(drafter, [trace])
    with torch.inference_mode():
        post = loaded.model.block(loaded.model.context(packed.taps, packed.positions), packed, rows)
        logits = loaded.model.logits(post[0, 1:])
    torch.testing.assert_close(logits.double(), naive_logits(naive, trace, 0, 4), atol=1e-4, rtol=1e-4)
    naive.defect = False
    assert (logits.double() - naive_logits(naive, trace, 0, 4)).abs().max() > 1e-2
    assert any("context_norm" in note for note in loaded.notes)


@pytest.mark.parametrize("name", VARIANTS)
def test_session_and_scores_agree_at_every_start(name: str) -> None:
    target = make_target()
    model = make_model(target, seed=3, **VARIANTS[name])
    drafter = DFlashDrafter(model, target.info, "dflash")
    trace = make_trace((5, 14), 4, vocab=7)
    depth = model.config.max_depth
    (scores,) = drafter.score([trace], ScoreRequest(depth=depth, full_chains=True))
    (early,) = drafter.score([trace], ScoreRequest(depth=depth))
    assert torch.equal(scores.accepted, early.accepted)
    assert scores.forced is not None
    session = drafter.session()
    session.observe([*trace.prompt.token_ids, trace.answer_ids[0]], {t: s[:5] for t, s in trace.taps.items()})
    for start in range(len(trace.answer_ids) - 1):
        tokens = session.propose(depth).tokens
        truth = trace.answer_ids[start + 1 : start + 1 + depth]
        hits = [t == x for t, x in zip(tokens, truth, strict=False)]
        assert scores.forced[start].tolist() == [int(h) for h in hits] + [-1] * (depth - len(hits))
        assert int(scores.accepted[start]) == next((i for i, h in enumerate(hits) if not h), len(hits))
        assert session.propose(2).tokens == tokens[:2], "the block does not depend on the depth asked for"
        row = 5 + start
        session.observe([trace.answer_ids[start + 1]], {t: s[row : row + 1] for t, s in trace.taps.items()})


def test_packing_does_not_change_a_score() -> None:
    target = make_target()
    drafter = DFlashDrafter(make_model(target, seed=5), target.info, "dflash")
    traces = [make_trace((4, 9), 1, vocab=5), make_trace((3, 1), 2), make_trace((7, 12), 3, vocab=5)]
    together = drafter.score(traces, ScoreRequest(depth=4))
    for trace, one in zip(traces, together, strict=True):
        assert torch.equal(drafter.score([trace], ScoreRequest(depth=4))[0].accepted, one.accepted)
        assert one.drafted.tolist() == [4] * (len(trace.answer_ids) - 1)


def test_rejection_probabilities_are_those_of_the_block() -> None:
    target = make_target()
    model = make_model(target, head="own", target_ids=HALF)
    drafter = DFlashDrafter(model, target.info, "dflash")
    trace = make_trace((4, 6), 7, temperature=0.8)
    (scores,) = drafter.score([trace], ScoreRequest(depth=3, sampler="rejection", full_chains=True))
    assert scores.alpha is not None
    session = drafter.session()
    session.observe([*trace.prompt.token_ids, trace.answer_ids[0]], {t: s[:4] for t, s in trace.taps.items()})
    proposal = session.propose(3, torch.Generator().manual_seed(0), 0.8)
    assert proposal.probs is not None
    for step in range(3):
        token = trace.answer_ids[1 + step]
        alpha = min(1.0, float(proposal.probs[step, token]) / float(trace.logprobs[1 + step].exp()))
        assert float(scores.alpha[0, step]) == pytest.approx(alpha, abs=1e-5)
    assert torch.allclose(proposal.probs.sum(-1), torch.ones(3))


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_files_hold_the_drafter_bit_for_bit(layout: Any, tmp_path: Path) -> None:
    target = make_target()
    model = make_model(target, head="own", target_ids=HALF, windows=(4, 4), causal=(True, True))
    save_dflash(model, tmp_path, layout, target)
    assert checkpoint_kind(str(tmp_path)) == "dflash"
    loaded = load_dflash(str(tmp_path), target)
    assert loaded.model.config == model.config
    assert loaded.model.fingerprint() == model.fingerprint()
    drafter = load_drafter(str(tmp_path), target)
    assert drafter.info.kind == "dflash" and drafter.info.max_depth == 4 and not drafter.info.reads_states


def test_own_files_keep_a_shared_head_shared(tmp_path: Path) -> None:
    target = make_target()
    model = make_model(target, head="target_rows", target_ids=HALF)
    save_dflash(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_dflash(str(tmp_path), target).model.fingerprint() == model.fingerprint()


def test_a_mask_embedding_beside_the_weights_is_used(tmp_path: Path) -> None:
    target = make_target()
    model = make_model(target, own_mask=True)
    save_dflash(model, tmp_path)
    loaded = load_dflash(str(tmp_path), target).model
    assert torch.equal(loaded.block_inputs(torch.tensor([4]))[0, 1], model.mask_embedding)  # type: ignore[arg-type]
    torch.save({"mask_token_id": 9, "embedding": torch.zeros(16)}, tmp_path / MASK_FILE)
    with pytest.raises(UserError, match="mask_embedding.pt is of token 9"):
        load_dflash(str(tmp_path), target)


def test_published_layer_ids_become_taps(tmp_path: Path) -> None:
    target = make_target()
    save_dflash(make_model(target), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 4, 6]
    assert default_target_layers(36, 5) == (2, 10, 18, 26, 34)
    assert default_target_layers(36, 1) == (19,)


def change(path: Path, **keys: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in keys.items():
        place = (
            config["dflash_config"]
            if key in ("mask_token_id", "target_layer_ids", "sample_from_anchor")
            else config
        )
        if value is None:
            place.pop(key)
        else:
            place[key] = value
    file.write_text(json.dumps(config))


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"mask_token_id": None}, "mask_token_id"),
    ({"mask_token_id": 23}, "mask_token_id 23 is no token"),
    ({"block_size": None}, "block_size must be a whole number"),
    ({"block_size": 1}, "block_size must be at least 2"),
    ({"vocab_size": 24}, "another tokenizer"),
    ({"num_target_layers": 40}, "another target"),
    ({"target_layer_ids": [1, 4]}, "fc.weight reads 48 numbers"),
    ({"target_layer_ids": [1, 4, 30]}, "tap 31 does not exist"),
    ({"sample_from_anchor": True}, "sample_from_anchor"),
    ({"num_hidden_layers": 3}, "lacks layers.2"),
    ({"num_hidden_layers": 1}, "holds layers.1"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_CONFIGS)
def test_a_bad_configuration_is_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = make_target()
    save_dflash(make_model(target), tmp_path)
    change(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        load_dflash(str(tmp_path), target)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("mask_hidden", "P-EAGLE"),
        ("layers.0.self_attn.attention_sink_bias", "sinks"),
        ("layers.0.mlp.extra.weight", "holds layers.0.mlp.extra.weight"),
    ],
)
def test_an_unused_tensor_is_named(tensor: str, message: str, tmp_path: Path) -> None:
    target = make_target()
    save_dflash(make_model(target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {tensor: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_dflash(str(tmp_path), target)


def test_depth_beyond_the_block_is_refused() -> None:
    target = make_target()
    drafter = DFlashDrafter(make_model(target), target.info, "mine")
    with pytest.raises(UserError, match="'mine' has blocks of 5"):
        drafter.score([make_trace((3, 4), 1)], ScoreRequest(depth=5))


def test_another_block_size_is_an_option(tmp_path: Path) -> None:
    target = make_target()
    save_dflash(make_model(target), tmp_path)
    drafter = create(str(tmp_path), {"block": "3"}, target)
    assert drafter.info.max_depth == 2
    assert any("blocks of 5" in note for note in drafter.info.notes)
    with pytest.raises(UserError, match="option block"):
        create(str(tmp_path), {"block": "1"}, target)
