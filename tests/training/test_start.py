"""Going on from a drafter that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.drafters.checkpoints.save import save_drafter
from specbench.drafters.training.start import read_start
from specbench.drafters.training.trainer import Trainer, TrainingData
from specbench.drafters.training.vocabulary import given_vocabulary
from specbench.errors import UserError

from .test_trainer import EXAMPLES, SETTING, weights
from .toy import HALF, Memory, make_config, make_model, make_target


def test_training_goes_on_from_the_weights_and_not_from_the_draw(tmp_path: Path) -> None:
    target = make_target()
    old = make_model(target, seed=5, feedback="post", norm_per_tap=True)
    save_drafter(old, tmp_path / "old")
    (tmp_path / "old" / "README.md").write_text("# old\n\n| | |\n|---|---|\n| steps | 40 |\n| loss | KL |\n")
    start = read_start(tmp_path / "old", target)
    assert start.target_ids == tuple(HALF)
    assert start.history == ("| steps | 40 |",)
    config = make_config(target, feedback="post", norm_per_tap=True)
    start.check(config)
    data = TrainingData(examples=EXAMPLES[:10], held_out=EXAMPLES[10:], source=Memory())
    trainer = Trainer(config, HALF, target, data, SETTING, tmp_path / "new", start=start)
    stored = dict(old.named_parameters())
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained
    for name, parameter in trained.items():
        assert torch.equal(parameter, stored[name].to(torch.bfloat16).float()) or torch.equal(
            parameter, stored[name]
        )
    trainer.run()
    # a resume that forgot where it came from would be another run
    with pytest.raises(UserError, match="start"):
        Trainer(config, HALF, target, data, SETTING, tmp_path / "new")
    again = Trainer(config, HALF, target, data, SETTING, tmp_path / "new", start=start)
    assert torch.equal(weights(trainer), weights(again))


def test_another_drafter_is_refused(tmp_path: Path) -> None:
    target = make_target()
    save_drafter(make_model(target, feedback="pre"), tmp_path / "old")
    with pytest.raises(UserError, match="feedback"):
        read_start(tmp_path / "old", target).check(make_config(target, feedback="post"))


def test_a_given_vocabulary_says_what_it_covers() -> None:
    chosen = given_vocabulary((1, 5, 7), [[1, 1, 2], [5]])
    assert chosen.target_ids == (1, 5, 7)
    assert chosen.coverage == pytest.approx(3 / 4)
    assert chosen.padded == 1
