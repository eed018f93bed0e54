"""``train`` for drafters other than EAGLE-3, end to end on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_train import answers, refused, run  # noqa: F401 - a fixture is used by its name

SHORT = ("--steps", 3, "--batch-rows", 96, "--held-out", 2, "--draft-vocab", 16, "--precision", "fp32")


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_train_leaves_a_drafter_that_runs(
    kind: str,
    answers: Path,  # noqa: F811
    tiny_target_path: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / kind
    more = ("--block-size", 4, "--layers", 1) if kind == "dflash" else ("--ttt", 2)
    common = ("--target", tiny_target_path, "--answers", answers, "--out", out)
    run("train", *common, *SHORT, "--drafter", kind, "--cache", tmp_path / "states", *more)
    card = (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    if kind == "dflash":
        assert "A DFlash drafter" in card and "3 masks of each block" in card
        assert config["block_size"] == 4 and config["num_hidden_layers"] == 1
    else:
        assert "An MTP-style head" in card and "RMS of the fed-back state" in card
    run(
        "run", "--target", tiny_target_path, "--suite", "mini", "--limit", 1, "--perturb", "template/regular",
        "--drafter", out, "--depth", 3, "--max-new-tokens", 8, "--out", tmp_path / "run",
    )  # fmt: skip


def test_block_options_are_for_blocks(
    answers: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refused(
        capsys, "train", "--answers", answers, "--out", tmp_path, "--drafter", "mtp", "--block-size", 4
    )
    assert "--block-size is for --drafter dflash" in text
