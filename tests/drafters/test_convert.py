"""Converting between layouts: a round trip is bit-equal, and what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.drafters.checkpoints.convert import convert
from specbench.drafters.checkpoints.dflash import save_dflash
from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.save import export_model, save_drafter
from specbench.errors import UserError

from .helpers import HALF, make_model, make_target
from .mtp_families import FAMILIES
from .test_dflash import make_model as make_dflash


def equal(one: Path, other: Path) -> None:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("through", ["specforge", "speculators", "modelopt", "nemo"])
def test_an_eagle3_round_trip_is_bit_equal(through: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = make_target(dtype=dtype)
    model = make_model(target, feedback="post", norm_per_tap=True, target_ids=HALF)
    export_model(model, "vllm", tmp_path / "start", target)
    assert convert(str(tmp_path / "start"), through, tmp_path / "there") == "eagle3"
    convert(str(tmp_path / "there"), "vllm", tmp_path / "back")
    equal(tmp_path / "start", tmp_path / "back")
    names = set(load_file(tmp_path / "there" / "model.safetensors"))
    if through == "nemo":
        assert (
            "model.fc_norm.0.weight" in names
            and "model.layers.0.hidden_norm.weight" in names
            and "d2t" in names
        )
    if through == "modelopt":
        assert "layers.0.hidden_norm.weight" in names and "t2d" not in names
    # the model is the same, whoever reads it
    assert (
        load_checkpoint(str(tmp_path / "there"), target).model.fingerprint()
        == load_checkpoint(str(tmp_path / "start"), target).model.fingerprint()
        or through == "speculators"
    )


def test_a_dflash_round_trip_is_bit_equal(tmp_path: Path) -> None:
    target = make_target()
    save_dflash(make_dflash(target, head="own", target_ids=HALF), tmp_path / "start")
    assert convert(str(tmp_path / "start"), "speculators", tmp_path / "there", "org/target") == "dflash"
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    convert(str(tmp_path / "there"), "dflash", tmp_path / "back")
    equal(tmp_path / "start", tmp_path / "back")
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("start", "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-next-dense", "qwen3.5"])
def test_a_head_goes_to_speculators_and_back(name: str, tmp_path: Path) -> None:
    FAMILIES[name](tmp_path / "start")
    assert convert(str(tmp_path / "start"), "speculators", tmp_path / "there") == "mtp"
    names = set(load_file(tmp_path / "there" / "model.safetensors"))
    assert {"mtp_layers.0.input_proj.weight", "mtp_layers.0.token_layernorm.weight"} <= names
    convert(str(tmp_path / "there"), "target", tmp_path / "back")
    start = load_file(tmp_path / "start" / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == {n for n in start if n.startswith("mtp.")}
    for tensor_name, tensor in back.items():
        assert torch.equal(tensor, start[tensor_name]), tensor_name


def write_config(path: Path, **keys: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    target = make_target()
    start = tmp_path / "start"
    save_drafter(make_model(target, gate=True), start)
    with pytest.raises(UserError, match="gated"):
        convert(str(start), "nemo", tmp_path / "out")
    with pytest.raises(UserError, match="did you mean 'nemo'"):
        convert(str(start), "nemoo", tmp_path / "out")
    save_drafter(make_model(target, head="target_rows", target_ids=HALF), start)
    with pytest.raises(UserError, match="specbench export"):
        convert(str(start), "vllm", tmp_path / "out")
    save_drafter(make_model(target), start)
    tensors = load_file(start / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"].half()}, start / "model.safetensors")
    with pytest.raises(UserError, match="float16, float32"):
        convert(str(start), "nemo", tmp_path / "out")
    save_drafter(make_model(target), start)
    write_config(start, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    with pytest.raises(UserError, match="names no taps"):
        convert(str(start), "nemo", tmp_path / "out")
    FAMILIES["deepseek"](tmp_path / "deepseek")
    with pytest.raises(UserError, match="deepseek family"):
        convert(str(tmp_path / "deepseek"), "speculators", tmp_path / "out")


def test_parallel_eagle_is_refused_with_the_reason(tmp_path: Path) -> None:
    start = tmp_path / "start"
    save_drafter(make_model(make_target()), start)
    write_config(start, speculators_model_type="peagle")
    with pytest.raises(UserError, match="P-EAGLE .* in one pass"):
        convert(str(start), "vllm", tmp_path / "out")
