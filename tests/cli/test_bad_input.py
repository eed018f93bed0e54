"""Whatever a user gets wrong ends in one sentence on stderr and exit code 2, without a traceback."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.cli import main
from specbench.drafters.checkpoints.save import save_drafter
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.runners.targets import Target

Complain = Callable[..., str]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "Name three seas."}\n{"prompt": "Add 2 and 3."}\n')
    return path


@pytest.fixture
def complain(
    tiny_target_path: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Complain:
    """Run ``specbench run`` with these options in the place of good ones; return the sentence it ends with."""
    good = {
        "suite": str(prompts),
        "perturb": "template/no_bos",
        "target": str(tiny_target_path),
        "drafter": "ngram",
        "max_new_tokens": "8",
        "device": "cpu",
        "out": str(tmp_path / "run"),
    }

    def run(**options: str) -> str:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in (good | options).items()]
        sentence = complaint(capsys, "run", *words)
        assert not (tmp_path / "run" / "run.json").exists()
        return sentence

    return run


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence that a command ends with, having checked that it is one."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert stop.value.code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("specbench: "), lines
    sentence = lines[0].removeprefix("specbench: ")
    assert len(sentence) > 20
    return sentence


# ---- names


@pytest.mark.parametrize(
    ("option", "wrong", "sentence"),
    [
        ("suite", "mtbnch", "unknown suite 'mtbnch'; did you mean 'mtbench'?"),
        ("drafter", "ngrm", "unknown drafter 'ngrm'; did you mean 'ngram'?"),
        ("drafter", "eagel3=here", "unknown drafter 'eagel3'; did you mean 'eagle3'?"),
        ("drafter", "ngram@mni=3", "unknown ngram option 'mni'; did you mean 'min'?"),
        ("runner", "replya", "unknown runner 'replya'; did you mean 'replay'?"),
        ("dtype", "bfloat", "unknown dtype 'bfloat'; did you mean 'bfloat16'"),
        (
            "perturb",
            "template/no_bss",
            "unknown perturbation 'template/no_bss'; did you mean 'template/no_bos'",
        ),
        ("perturb", "tempaltes", "unknown perturbation 'tempaltes'; did you mean 'templates'"),
        ("target", "smollm2-135", "unknown target 'smollm2-135'; did you mean 'smollm2-135m'?"),
        ("sampler", "rejecton", "Invalid value for '--sampler': 'rejecton' is not one of"),
        ("answer_path", "fored", "Invalid value for '--answer-path': 'fored' is not one of"),
    ],
)
def test_unknown_names_come_with_the_nearest(
    option: str, wrong: str, sentence: str, complain: Complain
) -> None:
    assert complain(**{option: wrong}).startswith(sentence)


def test_unknown_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "rnu") == "unknown command 'rnu'; did you mean 'run' or 'train'?"
    found = complaint(capsys, "run", "--depht", "4")
    assert "No such option" in found and "--depth" in found and found.endswith("see specbench run --help")
    found = complaint(capsys, "list", "suite")
    assert "'suite' is not one of" in found and "'suites'" in found
    assert "Missing argument" in complaint(capsys, "list")
    assert "'eight' is not a valid integer" in complaint(capsys, "run", "--limit", "eight")


# ---- numbers


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"depth": "0"}, "--depth must be 1 or more: it is the number of draft tokens proposed in a round"),
        ({"depth": "1,0"}, "--depth must be 1 or more: it is the number of draft tokens proposed in a round"),
        ({"depth": "x"}, "--depth takes whole numbers separated by commas, not 'x'"),
        ({"depth": ""}, "--depth takes whole numbers separated by commas, not ''"),
        ({"limit": "0"}, "--limit must be 1 or more prompts"),
        ({"max_new_tokens": "1"}, "--max-new-tokens must be 2 or more"),
        ({"temperature": "-1"}, "sampling needs --temperature >= 0"),
        ({"sampler": "rejection"}, "--sampler rejection needs --temperature above 0"),
        ({"suite": "longctx", "lengths": "2"}, "longctx"),
        (
            {"suite": "longctx", "lengths": "1k,2x"},
            "--lengths takes whole numbers separated by commas, not '2x'",
        ),
        ({"runner": "decode", "answer_path": "both"}, "--answer-path both needs --runner replay"),
    ],
    ids=str,
)
def test_numbers_out_of_range(options: dict[str, str], sentence: str, complain: Complain) -> None:
    assert sentence in complain(**options)


# ---- prompts


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"", None, "is empty; expected one JSON object a line"),
        (b"\n \n", None, "is empty; expected one JSON object a line"),
        (b'{"prompt": "Hi"}\n{"prompt": "Ho"\n', 2, "expected one JSON object"),
        (b'{"prompt": "Hi"}\n\n["Ho"]\n', 3, "expected a JSON object"),
        (b'{"question": "Hi"}\n', 1, "expected exactly one of 'turns', 'messages' and 'prompt'"),
        (b'{"turns": []}\n', 1, "expected a field 'turns' that is a list of non-empty strings"),
        (b'{"prompt": "Hi"}\n{"messages": [{"role": "assistant", "content": "Hi"}]}', 2, "to be the user's"),
        (b'{"id": 1, "prompt": "Hi"}\n{"id": 1, "prompt": "Ho"}\n', 2, "make ids unique"),
        (b'{"prompt": "caf\xe9"}\n', 1, "is not UTF-8"),
    ],
)
def test_malformed_prompt_file_is_named_with_its_line(
    content: bytes, line: int | None, expected: str, prompts: Path, complain: Complain
) -> None:
    prompts.write_bytes(content)
    sentence = complain()
    assert sentence.startswith(f"{prompts}, line {line}: " if line else f"{prompts} ")
    assert expected in sentence


def test_missing_prompt_files(complain: Complain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECBENCH_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where the hub extra is not installed
    gone = str(tmp_path / "gone")
    assert (
        complain(suite=f"{gone}.jsonl")
        == f"there is no prompt file {gone}.jsonl; check the spelling of the path"
    )
    assert f"the data directory {gone} does not exist" in complain(suite="mtbench", data_dir=gone)
    for options in ({}, {"data_dir": str(tmp_path)}):
        sentence = complain(suite="mtbench", **options)
        assert "the suite 'mtbench' needs the file" in sentence and "--data-dir or SPECBENCH_DATA" in sentence
    assert gone in complain(suite="longctx", longctx_text=gone)
    assert "--suite names no prompts" in complain(suite=",")


def test_one_suite_twice(complain: Complain, prompts: Path) -> None:
    assert "two prompts have the id 'own/1'" in complain(suite=f"{prompts},{prompts}")


def test_prompt_longer_than_the_target(complain: Complain, prompts: Path) -> None:
    prompts.write_text(json.dumps({"id": "long", "prompt": "word " * 300}) + "\n")
    sentence = complain()
    assert sentence.startswith("prompt own/long under template/regular has 15")
    assert "but the target has 1024 positions; use shorter lengths" in sentence


# ---- targets


def changed(path: Path, where: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a model with another config.json."""
    shutil.copytree(path, where)
    config = json.loads((where / "config.json").read_text())
    change(config)
    (where / "config.json").write_text(json.dumps(config))
    return where


def test_targets_that_are_none(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json: not a Hugging Face model directory" in complain(
        target=str(tmp_path / "empty")
    )
    assert f"unknown target '{tmp_path}/gone'" in complain(target=f"{tmp_path}/gone")


def test_targets_with_broken_files(complain: Complain, tiny_target_path: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(tiny_target_path, tmp_path / "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert f"target '{broken}' cannot be loaded: " in complain(target=str(broken))

    # transformers would fill the gap with random numbers and say so in a log line
    tensors = load_file(tiny_target_path / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert complain(target=str(broken)) == (
        f"target '{broken}' lacks 1 of its weights, model.layers.3.mlp.up_proj.weight among them; get its files again"
    )
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(5, 5)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert f"target '{broken}' cannot be loaded: " in complain(target=str(broken))

    (broken / "config.json").write_text("{")
    assert f"target '{broken}' cannot be loaded: " in complain(target=str(broken))
    odd = changed(tiny_target_path, tmp_path / "odd", lambda config: config.update(model_type="nobody-knows"))
    assert "nobody-knows" in complain(target=str(odd))

    # a configuration of BLOOM's holds no length: its positions are a bias
    def forget(config: dict[str, Any]) -> None:
        del config["max_position_embeddings"]
        config["model_type"] = "bloom"

    endless = changed(tiny_target_path, tmp_path / "endless", forget)
    assert f"target '{endless}' does not say how many positions it has" in complain(target=str(endless))


def test_weights_without_a_use_are_named(tiny_target_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_target_path, tmp_path / "more"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.8.mlp.up_proj.weight"] = torch.zeros(128, 64)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(match="1 weights are not used by its architecture, model.layers.8.mlp.up_proj.weight"):
        Target.load(str(path), device="cpu")


def test_devices_that_are_not_here(complain: Complain) -> None:
    assert complain(device="gpu") == "--device gpu is no device; give auto, cpu, cuda or cuda:N"
    assert complain(device="cuda:x").startswith("--device cuda:x is no device")
    assert complain(device="cuda:99").startswith("--device cuda:99: ")


def test_templates_that_do_not_work(complain: Complain, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    assert str(path) in complain(template=str(path))
    path.write_text("{% for m in messages %}")
    assert str(path) in complain(template=str(path))
    path.write_text("Hello!")  # never says what the user said
    assert "user" in complain(template=str(path))


# ---- drafters


def test_drafters_that_are_not_there(complain: Complain, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert f"no checkpoint at '{gone}'" in complain(drafter=str(gone))
    assert f"no checkpoint at '{gone}'" in complain(drafter=f"eagle3={gone}")
    gone.mkdir()
    assert f"draft-lm={gone} does not load as a causal language model" in complain(drafter=f"draft-lm={gone}")
    assert "unknown drafter 'zoo:nobody'" in complain(drafter="zoo:nobody")
    assert "no drafter in ','" in complain(drafter=",")
    assert "drafter 'ngram' is named twice; leave one out" in complain(drafter="ngram,ngram")
    assert "lacks what comes after '='" in complain(drafter="draft-lm=")


def test_draft_lm_of_another_vocabulary(complain: Complain, tiny_target_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target_path)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "other")
    sentence = complain(drafter=f"ngram,draft-lm={tmp_path / 'other'}")
    assert f"draft-lm={tmp_path / 'other'} has a vocabulary of 300 tokens" in sentence and "259" in sentence


@pytest.fixture(scope="module")
def eagle_path(tiny_target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = Target.load(str(tiny_target_path), device="cpu").weights()
    config = Eagle3Config.for_target(
        weights.info,
        taps=(2, 4, 5),
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        head="own",
    )
    model = Eagle3Model(config, weights)
    model.init_weights(torch.Generator().manual_seed(1), 0.2)
    path = tmp_path_factory.mktemp("drafter") / "eagle"
    save_drafter(model, path)
    return path


def test_draft_head_given_as_a_language_model(complain: Complain, eagle_path: Path) -> None:
    sentence = complain(drafter=f"draft-lm={eagle_path}")
    assert f"draft-lm={eagle_path} lacks " in sentence and "to be given as eagle3=PATH" in sentence


def with_taps(*taps: int) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }
        config["eagle_aux_hidden_state_layer_ids"] = list(taps)
        config["num_aux_hidden_states"] = len(taps)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_taps(2, 4, 30), "30"),  # the target has 8 blocks
        (with_taps(2, 4), "fc"),  # three taps wide
        (lambda config: config.update(attn_output_gate="maybe"), "attn_output_gate must be true or false"),
        (lambda config: config.update(hidden_size=32), "width 32"),
        (lambda config: config.update(vocab_size=300, draft_vocab_size=300), "300"),
    ],
    ids=["missing tap", "fc width", "a flag's value", "hidden size", "vocabulary"],
)
def test_checkpoints_that_do_not_fit(
    change: Any, sentence: str, complain: Complain, eagle_path: Path, tmp_path: Path
) -> None:
    path = changed(eagle_path, tmp_path / "eagle", change)
    assert sentence in complain(drafter=f"eagle3={path}")


def test_checkpoint_with_a_weight_too_many_or_too_few(
    complain: Complain, eagle_path: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(eagle_path, tmp_path / "eagle"))
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file(tensors | {"midlayer.self_attn.surprise.weight": torch.zeros(3)}, file)
    assert "surprise" in complain(drafter=f"eagle3={path}")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    assert "q_proj" in complain(drafter=f"eagle3={path}")


# ---- where results go


def test_output_that_cannot_be_written(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    below = tmp_path / "file" / "run"
    assert complain(out=str(below)).startswith(f"cannot write to {below}: ")
    assert "is a file" in complain(out=str(tmp_path / "file"))
    assert complain(out="/proc/run").startswith("cannot write to /proc/run: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to the superuser")
def test_output_in_a_directory_of_someone_else(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied" in complain(out=str(tmp_path / "locked" / "run"))


def test_output_that_holds_something_else(
    complain: Complain,
    tiny_target_path: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"--out {tmp_path} is not empty and holds no run.json" in complain(out=str(tmp_path))
    out = tmp_path / "first"
    with pytest.raises(SystemExit) as stop:
        main(
            f"run --suite {prompts} --perturb template/no_bos --target {tiny_target_path} --drafter ngram "
            f"--max-new-tokens 8 --device cpu --out {out}".split()
        )
    assert stop.value.code == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    sentence = complain(out=str(out), depth="3")
    assert f"--out {out} holds a different run" in sentence
    assert f"repeat that run with --config {out / 'run.json'}" in sentence
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# ---- configuration files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "line 1: not JSON"),
        (b'{"config": {\n"depth": [4],\n}}', "line 3: not JSON"),
        (b"\xff\xfe", "byte 1 is not UTF-8"),
        (b"[]", "holds no run configuration"),
        (b'{"config": 3}', "holds no run configuration"),
        (b'{"config": {"dept": [4]}}', "unknown option 'dept'; did you mean 'depth'?"),
        (b'{"config": {"depth": "4"}}', "the option 'depth' takes tuple[int], not '4'"),
        (b'{"config": {"depth": [0]}}', "--depth must be 1 or more"),
    ],
    ids=repr,
)
def test_configuration_that_is_none(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    sentence = complaint(capsys, "run", "--config", str(path))
    assert sentence.startswith(str(path)) and expected in sentence


def test_configuration_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    assert complaint(capsys, "run", "--config", str(path)) == f"cannot read {path}: No such file or directory"
    assert "is a directory" in complaint(capsys, "run", "--config", str(tmp_path))


def test_trace_pack_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path / "gone") in complaint(capsys, "run", "--traces", str(tmp_path / "gone"))
    assert str(tmp_path) in complaint(capsys, "run", "--traces", str(tmp_path))


# ---- other commands complain alike


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("show", "template/no_bos", "--suite", "nobody"), "unknown suite 'nobody'"),
        (("show", "template/no_bss"), "did you mean 'template/no_bos'"),
        (("answers", "--prompts", "gone.jsonl"), "gone.jsonl"),
        (("trace", "--suite", "nobody"), "unknown suite 'nobody'"),
        (("export", "gone/gone/gone", "--format", "vllm", "--out", "out"), "gone/gone/gone"),
    ],
    ids=str,
)
def test_other_commands(
    words: tuple[str, ...],
    expected: str,
    tiny_target_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in complaint(capsys, *words, "--target", str(tiny_target_path))


def test_a_defect_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what users can mend becomes a sentence; the rest needs its traceback."""
    commands: Mapping[str, tuple[str, str]] = {"run": ("specbench.errors:unknown_name", "")}
    monkeypatch.setattr("specbench.cli.COMMANDS", commands)
    with pytest.raises(AttributeError):
        main(["run"])
