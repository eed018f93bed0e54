"""The loop: reproducible, resumable at any step, and clear about what stops it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.save import save_drafter
from specbench.drafters.training import trainer as module
from specbench.drafters.training.data import Features
from specbench.drafters.training.history import LogRow
from specbench.drafters.training.optimiser import OptimSetting, learning_rate
from specbench.drafters.training.recipe import ARMS as ALL_ARMS
from specbench.drafters.training.step import ChainSetting
from specbench.drafters.training.trainer import Trainer, TrainingData, TrainSetting
from specbench.errors import UserError

from .toy import HALF, Memory, make_config, make_example, make_target

ARMS = {name: switches for name, switches in ALL_ARMS.items() if name.startswith("eagle3")}

SETTING = TrainSetting(
    steps=8,
    chain=ChainSetting(depth=3, keep=0.7),
    shallow=0.5,
    batch_rows=40,
    optim=OptimSetting(lr=5e-3),
    precision="fp32",
    log_every=2,
    eval_every=4,
    checkpoint_minutes=0.0,
)
EXAMPLES = [make_example(4, 10, seed) for seed in range(12)]


def make_trainer(out: Path, setting: TrainSetting = SETTING, **switches: Any) -> Trainer:
    target = make_target()
    data = TrainingData(examples=EXAMPLES[:10], held_out=EXAMPLES[10:], source=Memory())
    return Trainer(make_config(target, **switches), HALF, target, data, setting, out)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Killed(Exception):
    pass


def kill_at(step: int) -> Any:
    def on_row(row: LogRow) -> None:
        if row.step >= step:
            raise Killed

    return on_row


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_give_the_same_weights_and_resume_equals_uninterrupted(
    tmp_path: Path, precision: Any
) -> None:
    setting = replace(SETTING, precision=precision)
    whole = make_trainer(tmp_path / "whole", setting)
    start = weights(whole)
    whole.run()
    again = make_trainer(tmp_path / "again", setting)
    again.run()
    assert torch.equal(weights(whole), weights(again))
    assert not torch.equal(start, weights(whole))
    for step in (3, 5, 7):
        out = tmp_path / f"killed-{step}"
        with pytest.raises(Killed):
            make_trainer(out, setting).run(kill_at(step))
        resumed = make_trainer(out, setting)
        assert 0 < resumed.step < setting.steps
        resumed.run()
        assert torch.equal(weights(whole), weights(resumed)), step
    other_seed = make_trainer(tmp_path / "seed", replace(setting, seed=1))
    other_seed.run()
    assert not torch.equal(weights(whole), weights(other_seed))


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = make_trainer(tmp_path)
    first.run()
    second = make_trainer(tmp_path)
    rows: list[LogRow] = []
    second.run(rows.append)
    assert torch.equal(weights(first), weights(second))
    assert [row.split for row in rows] == ["held_out"]


def test_the_shallow_phase_is_shared_by_arms_that_differ_behind_it_only(tmp_path: Path) -> None:
    pre = make_trainer(tmp_path / "pre", norm_per_tap=True)
    pre.run()
    alone = make_trainer(tmp_path / "post", norm_per_tap=True, feedback="post")
    alone.run()
    branched = make_trainer(tmp_path / "branched", norm_per_tap=True, feedback="post")
    branched.branch(tmp_path / "pre")
    assert branched.step == 4
    branched.run()
    assert torch.equal(weights(alone), weights(branched))
    assert not torch.equal(weights(alone), weights(pre))
    deep = replace(SETTING, chain=ChainSetting(depth=4, keep=0.7))
    deeper = make_trainer(tmp_path / "deeper", deep, norm_per_tap=True)
    deeper.branch(tmp_path / "pre")
    deeper.run()
    trained_so = make_trainer(tmp_path / "so", deep, norm_per_tap=True)
    trained_so.run()
    assert torch.equal(weights(trained_so), weights(deeper))
    gated = make_trainer(tmp_path / "gated", norm_per_tap=True, gate=True)
    with pytest.raises(UserError, match="differs in config.gate"):
        gated.branch(tmp_path / "pre")
    with pytest.raises(UserError, match="did not finish its shallow phase"):
        gated.branch(tmp_path / "nothing")


def test_a_run_that_is_all_shallow_ends_where_the_deep_phase_of_a_longer_one_begins(tmp_path: Path) -> None:
    optim = replace(SETTING.optim, restart=0.8, horizon=6)
    longer = make_trainer(tmp_path / "longer", replace(SETTING, optim=optim))
    assert (longer.setting.shallow_steps, longer.setting.steps) == (4, 8)
    longer.run()
    alone = make_trainer(tmp_path / "alone", replace(SETTING, steps=4, shallow=1.0, optim=optim))
    alone.run()
    states = [
        torch.load(tmp_path / name / "shallow.pt", weights_only=True)["model"] for name in ("longer", "alone")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    branched = make_trainer(
        tmp_path / "branched", replace(SETTING, steps=4, shallow=1.0, optim=optim), feedback="post"
    )
    branched.branch(tmp_path / "alone")
    assert branched.step == 4


def test_accumulated_packs_are_one_batch(tmp_path: Path) -> None:
    """Two packs an optimiser step give the gradient of one pack that holds both."""
    single = replace(SETTING, steps=1, shallow=0.0, chain=ChainSetting(depth=3))
    norms = []
    for name, setting in (
        ("one", replace(single, batch_rows=26)),
        ("two", replace(single, batch_rows=13, accumulation=2)),
    ):
        trainer = make_trainer(tmp_path / name, setting)
        trainer.run()
        norms.append((trainer.log[0].grad_norm, weights(trainer)))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-4)
    torch.testing.assert_close(norms[0][1], norms[1][1], rtol=1e-4, atol=1e-5)


def test_training_learns(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(SETTING, steps=150, shallow=0.0, eval_every=1000))
    trainer.run()
    train = [row for row in trainer.log if row.split == "train"]
    assert train[-1].loss < 0.5 * train[0].loss
    assert [row.step for row in train] == list(range(2, 151, 2))
    held_out = trainer.log[-1]
    assert held_out.split == "held_out" and len(held_out.accuracy) == 8


def test_a_loss_that_is_not_finite_stops_with_the_batch_named(tmp_path: Path) -> None:
    class Poisoned(Memory):
        def read(self, example: Any) -> Features:
            features = super().read(example)
            if example.id == EXAMPLES[3].id:
                features.taps[0][5] = float("nan")
            return features

    trainer = make_trainer(tmp_path)
    trainer.data = replace(trainer.data, source=Poisoned())
    with pytest.raises(UserError, match=r"not finite at step \d+ \(answers .*toy/3") as stop:
        trainer.run()
    assert "weights before that step are kept" in str(stop.value)
    kept = make_trainer(tmp_path)
    assert kept.step == trainer.step < SETTING.steps
    assert weights(kept).isfinite().all()


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(Killed):
        trainer.run(kill_at(4))
    before = (tmp_path / module.STATE).read_bytes()

    def full(_state: Any, path: Path) -> None:
        Path(path).write_bytes(b"half a check")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(UserError, match=r"No space left on device.*the checkpoint before it is kept"):
        make_trainer(tmp_path).run()
    assert (tmp_path / module.STATE).read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, replace(SETTING, steps=2)).run()
    with pytest.raises(UserError, match=r"differs in setting.optim.lr \(0.005 there, 0.1 here\)"):
        make_trainer(tmp_path, replace(SETTING, steps=2, optim=OptimSetting(lr=0.1)))
    with pytest.raises(UserError, match="config.gate"):
        make_trainer(tmp_path, replace(SETTING, steps=2), gate=True)


@pytest.mark.parametrize("arm", ARMS)
def test_a_stored_drafter_gives_the_same_logits(tmp_path: Path, arm: str) -> None:
    trainer = make_trainer(tmp_path / "run", replace(SETTING, steps=2, eval_every=100), **ARMS[arm])
    trainer.run()
    save_drafter(trainer.model, tmp_path / "stored")
    loaded = load_checkpoint(str(tmp_path / "stored"), make_target()).model
    assert loaded.config == trainer.model.config
    assert loaded.config.trained_depth == 3
    state = torch.randn(5, 16)
    assert torch.equal(loaded.logits(loaded.norm(state)), trainer.model.logits(trainer.model.norm(state)))
    taps = [torch.randn(5, 16) for _ in range(3)]
    assert torch.equal(loaded.fuse(taps), trainer.model.fuse(taps))
    mine, theirs = trainer.model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_learning_rate_rises_then_follows_the_cosine() -> None:
    setting = OptimSetting(lr=2.0, warmup=0.1, final=0.1)
    rates = [learning_rate(setting, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[10] == pytest.approx(2.0) and 0.2 < rates[99] < 0.201


def test_a_restart_gives_the_deep_phase_a_cosine_of_its_own() -> None:
    once = OptimSetting(lr=2.0, warmup=0.1, final=0.1)
    setting = replace(once, restart=0.5, horizon=100)
    rates = [learning_rate(setting, step, 100, 60) for step in range(100)]
    assert rates[:60] == [learning_rate(once, step, 100) for step in range(60)]
    assert rates[60:] == [0.5 * learning_rate(once, step, 40) for step in range(40)]
    assert max(rates[60:]) == pytest.approx(1.0) and rates[63] == pytest.approx(1.0)
