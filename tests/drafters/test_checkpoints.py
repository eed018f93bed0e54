"""Published layouts, written here by hand from their descriptions, load to the same computation; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specbench.drafters.checkpoints.detect import checkpoint_kind
from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.save import export, save_drafter
from specbench.drafters.eagle3 import Eagle3Model, default_taps
from specbench.drafters.eagle3_drafter import create
from specbench.errors import SpecbenchWarning, UserError
from specbench.types import ScoreRequest, TargetWeights

from .helpers import HALF, SWITCHES, build, make_model, make_target, make_trace

TARGET = make_target()
SAFEAILAB = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.51.0",
    "vocab_size": 23,
    "draft_vocab_size": len(HALF),
}


def published(model: Eagle3Model, layer: str = "midlayer.") -> dict[str, torch.Tensor]:
    """The tensors of ``model`` as the plain layouts name them."""
    out = {n.replace("layers.0.", layer): t.clone() for n, t in model.state_dict().items()}
    ids = torch.tensor(HALF)
    out["d2t"] = ids - torch.arange(len(HALF))
    out["t2d"] = torch.zeros(23, dtype=torch.bool).index_fill(0, ids, True)
    return out


def write(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], kind: str = "safetensors"
) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if kind == "bin":
        torch.save(tensors, path / "pytorch_model.bin")
    elif kind == "sharded":
        names = sorted(tensors)
        shards = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
        for shard in set(shards.values()):
            save_file({n: tensors[n] for n in names if shards[n] == shard}, path / shard)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    else:
        save_file(tensors, path / "model.safetensors")
    return str(path)


def same_scores(a: Eagle3Model, b: Eagle3Model) -> None:
    from specbench.drafters.eagle3_drafter import Eagle3Drafter

    traces = [make_trace((6, 8), i) for i in range(3)]
    post = torch.randn(4, 16)
    assert torch.equal(a.logits(post), b.logits(post))
    request = ScoreRequest(depth=3, full_chains=True)
    for x, y in zip(
        *(Eagle3Drafter(m, TARGET.info, "toy").score(traces, request) for m in (a, b)), strict=True
    ):
        assert torch.equal(x.forced, y.forced) and torch.equal(x.accepted, y.accepted)


@pytest.mark.parametrize("kind", ["bin", "safetensors", "sharded"])
def test_safeailab(tmp_path: Path, kind: str) -> None:
    """midlayer names, no taps named, target's embeddings, d2t and t2d."""
    model = make_model(TARGET, target_ids=HALF)
    where = write(tmp_path / "x", SAFEAILAB, published(model), kind)
    loaded = load_checkpoint(where, TARGET)
    assert loaded.notes == ()
    assert loaded.model.config == model.config
    assert loaded.model.target_ids.tolist() == HALF
    same_scores(model, loaded.model)
    assert checkpoint_kind(where) == "eagle3"


def test_specforge_31(tmp_path: Path) -> None:
    model = make_model(
        TARGET, target_ids=HALF, feedback="post", norm_per_tap=True, taps=(2, 3, 6), own_embed=True
    )
    config = SAFEAILAB | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_output": True,
        "fc_norm": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6], "use_aux_hidden_state": True},
    }
    loaded = load_checkpoint(write(tmp_path / "x", config, published(model)), TARGET)
    assert loaded.model.config == model.config
    same_scores(model, loaded.model)
    with pytest.warns(SpecbenchWarning, match="norm_output without fc_norm"):
        plain = make_model(TARGET, target_ids=HALF, feedback="post")
        load_checkpoint(write(tmp_path / "y", SAFEAILAB | {"norm_output": True}, published(plain)), TARGET)


def test_model_prefix_and_layer_names(tmp_path: Path) -> None:
    """layers.N names under a ``model.`` prefix, two layers, tensors that engines leave unused."""
    model = make_model(TARGET, target_ids=HALF, num_layers=2, qk_norm=True, norm_joint=True)
    tensors = {
        ("" if n.startswith(("lm_head", "d2t", "t2d")) else "model.") + n: t
        for n, t in published(model, "layers.0.").items()
    }
    tensors["model.layers.1.hidden_norm.weight"] = torch.ones(16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    config = SAFEAILAB | {"num_hidden_layers": 2, "norm_before_fc": True, "model_type": "qwen3"}
    loaded = load_checkpoint(write(tmp_path / "x", config, tensors), TARGET)
    same_scores(model, loaded.model)
    assert any("layers.1.hidden_norm" in note for note in loaded.notes)


def speculators(model: Eagle3Model) -> dict[str, Any]:
    layer = {
        k: v for k, v in SAFEAILAB.items() if k not in ("draft_vocab_size", "architectures", "torch_dtype")
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(HALF),
        "target_hidden_size": 16,
        "norm_before_residual": model.config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(model.config.taps),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]},
        },
    }


def test_speculators(tmp_path: Path) -> None:
    model = make_model(TARGET, target_ids=HALF, norm_before_residual=True, own_embed=True)
    config = speculators(model)
    loaded = load_checkpoint(write(tmp_path / "x", config, published(model, "layers.0.")), TARGET)
    assert loaded.model.config.trained_depth == 3
    same_scores(model, loaded.model)
    assert checkpoint_kind(str(tmp_path / "x")) == "eagle3"
    del config["norm_before_residual"]
    with pytest.warns(SpecbenchWarning, match="norm_before_residual"):
        loaded = load_checkpoint(write(tmp_path / "y", config, published(model, "layers.0.")), TARGET)
    assert loaded.model.config.norm_before_residual


def test_embeddings_equal_to_the_targets_are_shared(tmp_path: Path) -> None:
    model = make_model(TARGET, target_ids=HALF)
    tensors = published(model) | {"embed_tokens.weight": TARGET.embed.clone()}
    loaded = load_checkpoint(write(tmp_path / "x", SAFEAILAB, tensors), TARGET)
    assert not loaded.model.config.own_embed
    assert loaded.model.embed_table is not None
    assert loaded.model.embed_table.data_ptr() == TARGET.embed.data_ptr()


def drop(*names: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def put(**tensors_: torch.Tensor) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: tensors.update({n.replace("__", "."): t for n, t in tensors_.items()})


def say(**keys: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: config.update(keys)


REFUSED = [
    (drop("midlayer.self_attn.q_proj.weight"), "lacks layers.0.self_attn.q_proj.weight"),
    (drop("lm_head.weight"), "lm_head.weight is missing"),
    (drop("d2t"), "d2t is missing"),
    (put(extra__weight=torch.ones(2)), "holds extra.weight"),
    (put(fc_norm__0__weight=torch.ones(16)), "fc_norm to true"),
    (put(input_norm__weight=torch.ones(48)), "norm_before_fc to true"),
    (put(midlayer__self_attn__g_proj__weight=torch.ones(24, 32)), "attn_output_gate to true"),
    (put(midlayer__self_attn__q_proj__bias=torch.ones(24)), "attention_bias"),
    (put(mask_hidden=torch.ones(48)), "P-EAGLE"),
    (put(midlayer__mlp__up_proj__weight=torch.ones(5, 16)), r"up_proj.weight has shape \[5, 16\]"),
    (put(fc__weight=torch.ones(16, 32)), "fc.weight reads 32"),
    (put(d2t=torch.zeros(5, dtype=torch.int64)), "d2t has shape"),
    (put(d2t=torch.tensor(HALF)), "outside the target's 23|different tokens"),
    (put(d2t=torch.tensor([5, 0] + [5] * 9)), "ascending"),
    (put(t2d=torch.ones(23, dtype=torch.bool)), "t2d and d2t"),
    (say(fc_norm=True), "lacks fc_norm.0.weight"),
    (say(attention_bias=True), "sets attention_bias"),
    (say(norm_output="true"), "norm_output must be true or false"),
    (say(quantization_config={"bits": 4}), "quantized"),
    (say(parallel_drafting=True), "parallel drafting"),
    (say(kv_lora_rank=64), "latent attention"),
    (say(is_neox_style=False), "interleaved rotary"),
    (say(eagle_config={"use_last_layernorm": False}), "without the final norm"),
    (say(eagle_aux_hidden_state_layer_ids=[2, 2, 5]), "duplicate"),
    (say(eagle_aux_hidden_state_layer_ids=[2, 4]), "fc.weight reads 48"),
    (say(eagle_aux_hidden_state_layer_ids=[2, 4, 11]), "tap 11 does not exist"),
    (say(eagle_aux_hidden_state_layer_ids="2,4,5"), "must be a list"),
    (say(num_aux_hidden_states=2), "num_aux_hidden_states"),
    (say(target_hidden_size=8), "fc.weight reads 48"),
    (say(vocab_size=29), "expects a target with 29 tokens"),
    (say(layer_types=["sliding_attention"]), "sliding_window is not set"),
    (say(layer_types=["chunked"], sliding_window=4), "layer_types"),
    (say(hidden_size="16"), "hidden_size must be a whole number"),
    (say(specbench={"headd": "own"}), "specbench.headd"),
    (say(specbench={"head": "target_rows"}), "holds lm_head.weight"),
    (say(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
]


@pytest.mark.parametrize("change, sentence", REFUSED, ids=[s for _, s in REFUSED])
def test_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    config, tensors = dict(SAFEAILAB), published(make_model(TARGET, target_ids=HALF))
    change(config, tensors)
    where = write(tmp_path / "x", config, tensors)
    with pytest.raises(UserError, match=sentence):
        load_checkpoint(where, TARGET)


WARNED = [
    (say(quantum=True), "quantum is not known"),
    (say(eagle_config={"novel": 1}), "eagle_config.novel is not known"),
    (say(sliding_window=4), "sliding_window = 4 without layer_types"),
    (say(eagle_aux_hidden_state_layer_ids=[1, 4, 5]), "taps_offset=1"),
    (say(eagle_aux_hidden_state_layer_ids=[5, 2, 4]), "out of order"),
    (say(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), "last hidden state"),
    (
        say(
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        ),
        "the top ones are used",
    ),
]


@pytest.mark.parametrize("change, sentence", WARNED, ids=[s for _, s in WARNED])
def test_warned(tmp_path: Path, change: Any, sentence: str) -> None:
    config, tensors = dict(SAFEAILAB), published(make_model(TARGET, target_ids=HALF))
    change(config, tensors)
    where = write(tmp_path / "x", config, tensors)
    with pytest.warns(SpecbenchWarning, match=sentence):
        loaded = load_checkpoint(where, TARGET)
    assert any(sentence in note for note in loaded.notes)
    assert loaded.model.config.taps[0] in (1, 2)


def test_zero_map_is_warned_about(tmp_path: Path) -> None:
    tensors = published(make_model(TARGET, target_ids=HALF))
    tensors["d2t"].zero_()
    tensors["t2d"] = torch.arange(23) < len(HALF)
    with pytest.warns(SpecbenchWarning, match="never filled in"):
        load_checkpoint(write(tmp_path / "x", SAFEAILAB, tensors), TARGET)


def test_eagle1_is_refused_with_the_reason(tmp_path: Path) -> None:
    tensors = {
        "fc.weight": torch.ones(16, 32),
        "fc.bias": torch.ones(16),
        "layers.0.self_attn.q_proj.weight": torch.ones(24, 16),
    }
    config = {k: v for k, v in SAFEAILAB.items() if k != "draft_vocab_size"}
    with pytest.raises(UserError, match="EAGLE-1"):
        load_checkpoint(write(tmp_path / "x", config, tensors), TARGET)


def test_speculators_refusals(tmp_path: Path) -> None:
    model = make_model(TARGET, target_ids=HALF)
    config = speculators(model)
    config["speculators_config"]["proposal_methods"][0]["accept_tolerance"] = 0.1
    with pytest.raises(UserError, match="lossy"):
        load_checkpoint(write(tmp_path / "x", config, published(model)), TARGET)
    with pytest.raises(UserError, match="peagle"):
        load_checkpoint(
            write(tmp_path / "y", config | {"speculators_model_type": "peagle"}, published(model)), TARGET
        )


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint at"):
        load_checkpoint(str(tmp_path / "nowhere"), TARGET)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_checkpoint(str(tmp_path / "empty"), TARGET)
    (tmp_path / "empty" / "config.json").write_text(json.dumps(SAFEAILAB))
    with pytest.raises(UserError, match="neither safetensors"):
        load_checkpoint(str(tmp_path / "empty"), TARGET)
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(str(tmp_path / "empty"), TARGET)
    where = write(tmp_path / "sharded", SAFEAILAB, published(make_model(TARGET, target_ids=HALF)), "sharded")
    (tmp_path / "sharded" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="lacks the shard model-00002"):
        load_checkpoint(where, TARGET)
    (tmp_path / "sharded" / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_checkpoint(where, TARGET)


def test_options(tmp_path: Path) -> None:
    model = make_model(TARGET, target_ids=HALF, norm_per_tap=True, feedback="post")
    config = SAFEAILAB | {"fc_norm": True, "norm_output": True}
    where = write(tmp_path / "x", config, published(model))

    def load(**options: str) -> Any:
        return load_checkpoint(where, TARGET, options)

    assert load(feedback="pre").model.config.feedback == "pre"
    assert load(taps_offset="-1").model.config.taps == (1, 3, 4)
    assert load(taps_offset="1").model.config.taps == (3, 5, 6)
    assert load(input_norm="bypass").model.config.input_norm == "none"
    assert load(vocab_map="identity").model.target_ids.tolist() == list(range(len(HALF)))
    windowed = load(window="5", sink="first4", positions="repacked")
    assert windowed.model.config.windows == (5,)
    assert windowed.model.config.settings()["sink"] == "first4"
    assert "option sink=first4" in windowed.notes
    info = create(where, {"window": "5"}, TARGET).info
    assert info.settings["window"] == "5" and info.taps == (2, 4, 5) and info.kind == "eagle3"
    assert info.fingerprint != create(where, {}, TARGET).info.fingerprint
    for options, sentence in [
        ({"windw": "5"}, "did you mean 'window'"),
        ({"window": "wide"}, "positive whole number"),
        ({"sink": "boss", "window": "4"}, "did you mean 'bos'"),
        ({"sink": "bos"}, "without a window"),
        ({"taps_offset": "2"}, "unknown value of taps_offset"),
    ]:
        with pytest.raises(UserError, match=sentence):
            load_checkpoint(where, TARGET, options)
    with pytest.raises(UserError, match="eagle3=PATH"):
        create(None, {}, TARGET)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(switches=SWITCHES, seed=st.integers(0, 100), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_own_format_reloads_bit_for_bit(
    tmp_path: Path, switches: dict[str, Any], seed: int, dtype: torch.dtype
) -> None:
    target = make_target(dtype=dtype)
    model = build(target, switches | {"num_layers": 1}, seed).to(dtype)
    save_drafter(model, tmp_path)
    again = load_checkpoint(str(tmp_path), target).model
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again.head_weight(), model.head_weight())


def test_own_format_keeps_training_depth_windows_and_layers(tmp_path: Path) -> None:
    model = make_model(
        TARGET,
        head="target_rows",
        target_ids=HALF,
        trained_depth=4,
        num_layers=2,
        windows=(6, None),
        sink="bos",
    )
    save_drafter(model, tmp_path)
    assert load_checkpoint(str(tmp_path), TARGET).model.config == model.config
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    full = load_checkpoint(str(tmp_path), TARGET, {"window": "none"}).model.config
    assert full.windows == () and full.sink == "none"


@pytest.mark.parametrize("format", ["vllm", "specforge", "speculators"])
def test_export_reloads_to_the_same_logits(tmp_path: Path, format: str) -> None:
    model = make_model(
        TARGET, head="target_rows", target_ids=HALF, feedback="post", norm_per_tap=True, trained_depth=5
    )
    save_drafter(model, tmp_path / "ours")
    export(str(tmp_path / "ours"), format, tmp_path / "out", TARGET)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert torch.equal(tensors["lm_head.weight"], TARGET.head[HALF])
    assert "specbench" not in config and config["norm_output"] and config["fc_norm"]
    prefix = "layers.0." if format == "speculators" else "midlayer."
    assert prefix + "self_attn.q_proj.weight" in tensors
    assert (torch.arange(len(HALF)) + tensors["d2t"]).tolist() == HALF
    assert tensors["t2d"].nonzero().flatten().tolist() == HALF
    same_scores(model, load_checkpoint(str(tmp_path / "out"), TARGET).model)


@pytest.mark.parametrize(
    "changes",
    [
        {"feedback": "post", "norm_per_tap": True},
        {"norm_before_residual": True},
        {"norm_joint": True, "qk_norm": True},
    ],
    ids=["eagle3.1", "resnorm", "joint-qwen3"],
)
def test_export_opens_with_the_speculators_library(tmp_path: Path, changes: dict[str, Any]) -> None:
    pytest.importorskip("speculators", reason="the speculators package is not installed")
    from speculators.models.eagle3.core import Eagle3DraftModel  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    verifier = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=4, num_hidden_layers=8, vocab_size=23
    )
    LlamaForCausalLM(verifier).save_pretrained(tmp_path / "target")
    target = TargetWeights(info=TARGET.info, embed=TARGET.embed, head=TARGET.head, path=tmp_path / "target")
    model = make_model(target, head="target_rows", target_ids=HALF, trained_depth=4, **changes)
    save_drafter(model, tmp_path / "ours")
    export(str(tmp_path / "ours"), "speculators", tmp_path / "out", target)
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name].float(), tensor), name
    assert torch.equal(theirs.lm_head.weight.float(), TARGET.head[HALF])
    assert theirs.config.norm_output == (model.config.feedback == "post")
    assert theirs.config.speculators_config.proposal_methods[0].speculative_tokens == 4


def test_export_refuses_what_engines_cannot_do(tmp_path: Path) -> None:
    for i, (changes, format, sentence) in enumerate(
        [
            ({"gate": True}, "vllm", "gate"),
            ({"windows": (4,), "sink": "bos"}, "vllm", "sink"),
            ({"windows": (4,)}, "specforge", "window"),
            ({"norm_before_residual": True}, "specforge", "norm_before_residual"),
            ({"norm_joint": True, "norm_per_tap": True}, "speculators", "beside fc_norm"),
            ({}, "tensorrt", "unknown export format"),
        ]
    ):
        save_drafter(make_model(TARGET, **changes), tmp_path / str(i))
        with pytest.raises(UserError, match=sentence):
            export(str(tmp_path / str(i)), format, tmp_path / "out", TARGET)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_drafter(make_model(TARGET), tmp_path / "file")


def test_default_taps() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(7) == (2, 3, 4)
    for shallow in (4, 5, 6):
        with pytest.raises(UserError, match="default taps"):
            default_taps(shallow)
