"""``answers``, ``train`` and ``export`` end to end on a tiny target, and what bad input says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from specbench.cli import main

TRAIN = [
    "--ttt", "2", "--steps", "4", "--batch-rows", "96", "--held-out", "2", "--draft-vocab", "16",
    "--precision", "fp32",
]  # fmt: skip


def run(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    if stop.value.code:
        raise RuntimeError(f"exit code {stop.value.code}")


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@pytest.fixture(scope="module")
def answers(tiny_target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": "Hi " * (i % 3 + 1) + str(i)}) + "\n" for i in range(8))
    )
    out = folder / "answers.jsonl"
    run("answers", "--prompts", prompts, "--target", tiny_target_path, "--out", out, "--max-new-tokens", 20)
    return out


def test_answers_go_on_where_they_stopped(answers: Path, tiny_target_path: Path, tmp_path: Path) -> None:
    lines = answers.read_text().splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == [f"prompts/p{i}" for i in range(8)]
    out = tmp_path / "again.jsonl"
    out.write_text("".join(lines[:3]) + lines[3][:10])
    prompts = answers.parent / "prompts.jsonl"
    run("answers", "--prompts", prompts, "--target", tiny_target_path, "--out", out, "--max-new-tokens", 20)
    assert out.read_text() == answers.read_text()


def test_every_turn_is_answered_behind_the_answers_before_it(tiny_target_path: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    talks = [{"id": "one", "turns": ["Hi"]}, {"id": "two", "turns": ["Hello there", "And then?", "More"]}]
    prompts, out = tmp_path / "talks.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    command = (
        "answers",
        "--prompts",
        prompts,
        "--target",
        tiny_target_path,
        "--out",
        out,
        "--max-new-tokens",
        9,
    )
    run(*command)
    rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == ["talks/one", "talks/two", "talks/two#2", "talks/two#3"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_path)
    history: list[dict[str, str]] = []
    for turn, name in enumerate(("talks/two", "talks/two#2", "talks/two#3")):
        history.append({"role": "user", "content": talks[1]["turns"][turn]})
        text = tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False)
        assert rows[name]["p"] == tokenizer(text, add_special_tokens=False).input_ids
        history.append(
            {"role": "assistant", "content": tokenizer.decode(rows[name]["g"], skip_special_tokens=True)}
        )
    # a run that stopped between two turns ends the same
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[:3]))
    run(*command)
    assert out.read_text() == whole


def test_train_leaves_a_drafter_that_runs(
    answers: Path, tiny_target_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    common = ("--target", tiny_target_path, "--answers", answers, "--out", out, *TRAIN)
    run("train", *common, "--drafter", "eagle3.1", "--cache", tmp_path / "states")
    printed = capsys.readouterr().out
    assert "held out: accepted per round" in printed and f"specbench run --drafter {out}" in printed
    for name in ("config.json", "model.safetensors", "README.md", "loss.png", "log.parquet", "state.pt"):
        assert (out / name).is_file(), name
    card = (out / "README.md").read_text()
    assert "depth 2" in card and "AdamW" in card and "specbench" in card
    assert "held_out" in pq.read_table(out / "log.parquet")["split"].to_pylist()
    exported = tmp_path / "exported"
    run("export", out, "--format", "vllm", "--target", tiny_target_path, "--out", exported)
    config = json.loads((exported / "config.json").read_text())
    assert config["norm_output"] is True and config["fc_norm"] is True
    run(
        "run", "--target", tiny_target_path, "--suite", "mini", "--limit", 1, "--perturb", "template/regular",
        "--drafter", f"{out},{exported}", "--max-new-tokens", 8, "--out", tmp_path / "run",
    )  # fmt: skip


def test_train_a_recipe_and_one_of_its_arms(answers: Path, tiny_target_path: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    training = {
        "steps": 4, "shallow": 0.5, "batch_rows": 96, "chain": {"depth": 2}, "precision": "fp32",
    }  # fmt: skip
    recipe.write_text(
        yaml.safe_dump(
            {
                "target": str(tiny_target_path),
                "answers": str(answers),
                "out": "arms",
                "draft_vocab": 16,
                "held_out": 2,
                "sizes": {},
                "training": training,
                "arms": {"eagle3-fcnorm": {}, "eagle3.1": {"branch": "eagle3-fcnorm"}},
            }
        )
    )
    run("train", "--recipe", recipe, "--arms", "eagle3-fcnorm")
    assert not (tmp_path / "arms" / "eagle3.1").exists()
    run("train", "--recipe", recipe)
    configs = [
        json.loads((tmp_path / "arms" / a / "config.json").read_text()) for a in ("eagle3-fcnorm", "eagle3.1")
    ]
    assert [c["norm_output"] for c in configs] == [False, True]


def test_bad_input_is_one_sentence(
    answers: Path, tiny_target_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("train", "--target", tiny_target_path, "--out", tmp_path / "out")

    def answer_file(*rows: Any) -> Path:
        file = tmp_path / f"answers-{len(list(tmp_path.iterdir()))}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    row = {"p": [1, 5], "g": [7, 8, 9]}
    cases: list[tuple[tuple[Any, ...], str]] = [
        (base, "--answers is missing"),
        ((*base, "--answers", tmp_path / "none.jsonl"), "no answer file"),
        ((*base, "--answers", answer_file(row, {"p": [1], "g": [4000]})), "line 2: token id 4000 is outside"),
        ((*base, "--answers", answer_file(row, {"p": [1], "g": []})), "line 2: the answer is empty"),
        ((*base, "--answers", answers, "--drafter", "eagle31"), "did you mean 'eagle3.1'"),
        ((*base, "--answers", answers, "--draft-vocab", 200, "--held-out", 2), "too few to choose a draft vocabulary of 200"),
        ((*base, "--answers", answers, "--held-out", 8), "leave nothing of 8 to train on"),
        ((*base, "--answers", answers, "--taps", "2,4,99", "--held-out", 2, "--draft-vocab", 8), "tap 99 does not exist"),
        ((*base, "--answers", answers, "--arms", "eagle3"), "--arms chooses among a recipe's arms"),
        (("train", "--recipe", tmp_path / "no.yaml"), "cannot read the recipe"),
        (("train", "--recipe", tmp_path / "no.yaml", "--lr", "1"), "--lr has no effect with --recipe"),
        (("answers", "--prompts", tmp_path / "none.jsonl"), "none.jsonl"),
        (("answers", "--prompts", tmp_path / "none.jsonl", "--max-new-tokens", "1"), "at least 2"),
    ]  # fmt: skip
    for arguments, expected in cases:
        assert expected in refused(capsys, *arguments), arguments
