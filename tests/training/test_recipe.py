"""Recipes: the bundled one, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench.drafters.dflash import DFlashConfig
from specbench.drafters.eagle3 import Eagle3Config
from specbench.drafters.mtp import MtpConfig
from specbench.drafters.training.recipe import ARMS, arm_switches, make_config, make_setting, read_recipe
from specbench.errors import UserError

from .toy import SIZES, TAPS, make_target

TEXT = """
target: smollm2-135m
answers: answers.jsonl
out: .
draft_vocab: 4096
held_out: 8
sizes: {num_heads: 9}
training: {steps: 100, optim: {lr: 0.002, betas: [0.9, 0.99]}, chain: {depth: 5}}
arms:
  eagle3:
  eagle3-ttt2: {drafter: eagle3, chain: {depth: 2}}
  eagle3.1: {branch: eagle3}
"""


def write(path: Path, text: str) -> Path:
    file = path / "recipe.yaml"
    file.write_text(text)
    return file


def test_a_recipe_is_read(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, TEXT))
    assert recipe.answers == tmp_path / "answers.jsonl"
    assert [arm.name for arm in recipe.arms] == ["eagle3", "eagle3-ttt2", "eagle3.1"]
    first, second, third = recipe.arms
    assert first.setting.optim.lr == 0.002 and first.setting.optim.betas == (0.9, 0.99)
    assert (first.setting.chain.depth, second.setting.chain.depth) == (5, 2)
    assert second.setting.optim == first.setting.optim
    assert third.switches == {"feedback": "post", "norm_per_tap": True} and third.branch == "eagle3"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("draft_vocab: 4096\n", "", "lacks draft_vocab"),
        ("steps: 100, ", "", "names no steps"),
        ("steps: 100", "stps: 100", "unknown training setting 'stps'; did you mean 'steps'"),
        ("{depth: 5}", "{dept: 5}", "unknown chain setting 'dept'; did you mean 'depth'"),
        ("drafter: eagle3,", "drafter: eagle4,", "unknown drafter to train 'eagle4'"),
        ("branch: eagle3", "branch: later", "branches off 'later', which does not come before it"),
        ("arms:", "arms: [", "cannot read the recipe"),
    ],
)
def test_a_wrong_recipe_says_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(UserError, match=message):
        read_recipe(write(tmp_path, TEXT.replace(old, new)))


def test_the_bundled_recipe_has_the_arms_of_the_zoo() -> None:
    from specbench.drafters.resolve import zoo_names

    file = Path(__file__).parents[2] / "drafters" / "zoo" / "recipe.yaml"
    recipe = read_recipe(file)
    names = {arm.name for arm in recipe.arms}
    assert zoo_names() and set(zoo_names()) <= names
    assert {
        "eagle3",
        "eagle3-fcnorm",
        "eagle3.1",
        "eagle3-gated",
        "eagle3.1-gated",
        "eagle3-resnorm",
    } <= names
    assert {f"{a}-ttt{n}" for a in ("eagle3", "eagle3.1") for n in (2, 4, 8)} <= names
    shared = {
        (a.setting.steps, a.setting.seed, a.setting.batch_rows, a.setting.optim)
        for a in recipe.arms
        if a.name != "dflash"
    }
    assert len(shared) == 1
    further = read_recipe(file.with_name("further.yaml"))
    assert further.start is not None and recipe.start is None
    assert (
        {"eagle3", "eagle3-fcnorm", "eagle3.1", "eagle3-gated", "eagle3.1-gated"}
        <= {arm.name for arm in further.arms}
        <= names
    )
    assert len({repr(arm.setting) for arm in further.arms if arm.name != "dflash"}) == 1
    assert len({(a.setting.steps, a.setting.seed, a.setting.batch_rows) for a in further.arms}) == 1
    (rate,) = {arm.setting.optim.lr for arm in further.arms if arm.name == "dflash"}
    assert rate == 4e-4
    assert (further.draft_vocab, further.held_out, further.sizes) == (
        recipe.draft_vocab,
        recipe.held_out,
        recipe.sizes,
    )
    third = read_recipe(file.with_name("third.yaml"))
    assert {a.name for a in third.arms} == {n for n in names & set(zoo_names()) if n.startswith("eagle3")}
    assert len({repr(arm.setting) for arm in third.arms}) == 1
    assert (third.draft_vocab, third.held_out, third.sizes) == (
        recipe.draft_vocab,
        recipe.held_out,
        recipe.sizes,
    )


def test_arms_are_what_their_names_say() -> None:
    target = make_target()
    for name in (n for n in ARMS if n.startswith("eagle3")):
        config = make_config(target.info, 11, SIZES | {"head": "target_rows"}, arm_switches(name))
        assert isinstance(config, Eagle3Config)
        assert (config.feedback == "post") == name.startswith("eagle3.1")
        assert config.gate == name.endswith("gated")
        assert config.norm_per_tap == (name not in {"eagle3", "eagle3-resnorm"})
        assert config.norm_before_residual == (name == "eagle3-resnorm")
    shared = SIZES | {"head": "target_rows"}
    block = make_config(target.info, 11, shared, {**arm_switches("dflash"), "mask_token_id": 3}, "dflash")
    assert isinstance(block, DFlashConfig) and block.block_size == 8 and block.taps == TAPS
    head = make_config(target.info, 11, shared, arm_switches("mtp"), "mtp")
    assert isinstance(head, MtpConfig) and head.taps == (target.info.num_layers,)
    with pytest.raises(UserError, match="unknown drafter switch 'gates'; did you mean 'gate'"):
        make_config(target.info, 11, SIZES, {"gates": True})
    with pytest.raises(UserError, match="names no steps"):
        make_setting({})
