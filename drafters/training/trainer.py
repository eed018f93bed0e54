"""The training loop: packs in a fixed order, checkpoints that resume exactly, held-out acceptance as it learns.

Everything random is a function of the seed and the step, so a run that was killed and resumed ends with the same
weights as one that was not.

Example:
    trainer = Trainer(config, vocabulary.target_ids, weights, data, TrainSetting(steps=1000), Path("drafters/mine"))
    trainer.run(print)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specbench.drafters.training.data import Batch, Example, LossRows, TapSource, load_batch, make_packs
from specbench.drafters.training.evaluate import evaluate
from specbench.drafters.training.history import LogRow, write_log
from specbench.drafters.training.initial import Init, initialise
from specbench.drafters.training.kinds import TrainConfig, TrainModel, make_model, source_for, with_depth
from specbench.drafters.training.optimiser import Masters, OptimSetting, learning_rate
from specbench.drafters.training.processes import ALONE, Processes
from specbench.drafters.training.start import Start, differences, plain, take_weights
from specbench.drafters.training.step import ChainSetting, loss_of
from specbench.errors import UserError
from specbench.types import TargetWeights

Precision = Literal["bf16", "fp32"]
STATE = "state.pt"
SHALLOW = "shallow.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetting:
    """Everything that decides what a run learns, apart from the drafter's switches and the data."""

    steps: int
    """Optimiser steps."""
    chain: ChainSetting = field(default_factory=ChainSetting)
    shallow: float = 0.0
    """Share of the steps, at the start, whose chains have one step only. What is fed back does not matter there."""
    batch_rows: int = 4096
    """Rows of a pack at most (prompt rows too)."""
    accumulation: int = 1
    """Packs of an optimiser step, per process."""
    optim: OptimSetting = field(default_factory=OptimSetting)
    seed: int = 0
    precision: Precision = "bf16"
    """What forward and backward compute in; the optimiser's weights are float32 in any case."""
    loss_rows: LossRows = "answer"
    init: Init = "target"
    log_every: int = 10
    eval_every: int = 200
    eval_examples: int = 16
    """Held-out answers judged while training; all of them are judged at the end."""
    eval_depth: int = 8
    checkpoint_minutes: float = 10.0

    def depth_at(self, step: int) -> int:
        """Return the chains' depth at optimiser step ``step``."""
        return 1 if step < self.shallow_steps else self.chain.depth

    @property
    def shallow_steps(self) -> int:
        """Steps of depth 1 at the start."""
        return round(self.shallow * self.steps)

    def what_counts(self) -> dict[str, Any]:
        """Return the fields that change the weights; a resume must agree in them."""
        watch = {"log_every", "eval_every", "eval_examples", "eval_depth", "checkpoint_minutes"}
        return {name: value for name, value in asdict(self).items() if name not in watch}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Answers to learn from, answers to be judged on, and where the target's states come from."""

    examples: Sequence[Example]
    held_out: Sequence[Example]
    source: TapSource


class PackOrder:
    """The packs of all epochs, one after the other."""

    def __init__(self, lengths: Sequence[int], budget: int, seed: int) -> None:
        self.lengths, self.budget, self.seed = lengths, budget, seed
        self._epochs: list[list[list[int]]] = []
        self._ends: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, list[int]]:
        """Return (epoch, pack) number ``index``, counted over all epochs."""
        while not self._ends or index >= self._ends[-1]:
            packs = make_packs(self.lengths, budget=self.budget, seed=self.seed, epoch=len(self._epochs))
            self._ends.append(len(packs) + (self._ends[-1] if self._ends else 0))
            self._epochs.append(packs)
        epoch = next(i for i, end in enumerate(self._ends) if index < end)
        return epoch, self._epochs[epoch][index - self._ends[epoch]]

    def packs_per_epoch(self) -> int:
        """Return the packs of the first epoch; later ones differ by a few."""
        self[0]
        return self._ends[0]


class _Window:
    """Sums of what the steps since the last log row gave."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self.hits = torch.zeros(depth, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.hits)
        self.rows = 0
        self.began = time.perf_counter()

    def add(self, hits: Tensor, counts: Tensor, rows: int) -> None:
        self.hits[: len(hits)] += hits
        self.counts[: len(counts)] += counts
        self.rows += rows

    def accuracy(self) -> tuple[float, ...]:
        used = int((self.counts > 0).sum())
        return tuple((self.hits[:used] / self.counts[:used]).tolist())


class Trainer:
    """Trains one drafter."""

    def __init__(
        self,
        config: TrainConfig,
        target_ids: Sequence[int],
        target: TargetWeights,
        data: TrainingData,
        setting: TrainSetting,
        out: Path,
        processes: Processes = ALONE,
        start: Start | None = None,
    ) -> None:
        """Prepare; takes up ``out``'s checkpoint where there is one.

        Args:
            config: of the drafter.
            target_ids: [draft_vocab_size] ascending target ids.
            target: shared tensors; training runs on their device.
            data: what to learn from.
            setting: how.
            out: directory of checkpoints, log and, at the end, the drafter.
            processes: for several GPUs.
            start: a drafter whose weights to go on from; ``setting.init`` then has no effect.

        Raises:
            UserError: ``out`` holds another run.
        """
        self.config = with_depth(config, setting.chain.depth)
        self.target, self.setting, self.out, self.processes = target, setting, out, processes
        self.data = replace(data, source=source_for(config, data.source))
        self.model = make_model(self.config, target, target_ids, torch.float32)
        self.start = start
        if start is None:
            initialise(self.model, target, setting.init, setting.seed)
        else:
            take_weights(self.model, start)
        self.work = self.model
        if setting.precision == "bf16":
            self.work = make_model(self.config, target, target_ids, torch.bfloat16)
        self.masters = Masters(self.model, self.work, setting.optim, setting.steps, setting.shallow_steps)
        self.teacher_head = target.head[self.model.target_ids].to(self.work.dtype)
        self.order = PackOrder([e.num_rows for e in data.examples], setting.batch_rows, setting.seed)
        self.step = 0
        self.log: list[LogRow] = []
        self.seconds = 0.0
        if (out / STATE).exists():
            self._load(out / STATE)

    def branch(self, other: Path) -> None:
        """Start behind the shallow phase of another run that differs only in what comes after it: feedback and depth.

        Raises:
            UserError: that run differs in more, or did not get so far.
        """
        if self.step:
            return
        path = other / SHALLOW
        if not path.exists():
            raise UserError(f"{other} has no {SHALLOW}: it did not finish its shallow phase; train it first")
        self._load(path, shallow=True)

    def run(self, on_row: Callable[[LogRow], None] = lambda _row: None) -> None:
        """Train to the end, or go on from the checkpoint.

        Raises:
            UserError: the loss is not finite, or the disk is full; the last good checkpoint stays.
        """
        setting, device = self.setting, self.model.device
        window = _Window(setting.chain.depth, device)
        saved = time.monotonic()
        while self.step < setting.steps:
            if self.step == setting.shallow_steps and self.step:
                self._save(SHALLOW)
            logging = (self.step + 1) % setting.log_every == 0 or self.step + 1 == setting.steps
            began = time.perf_counter()
            losses = self._train_step(window, with_loss=logging)
            self.seconds += time.perf_counter() - began
            if logging:
                self._note_training(window, losses, on_row)
                window = _Window(setting.chain.depth, device)
            if self.step % setting.eval_every == 0 and self.step < setting.steps:
                self._note_held_out(setting.eval_examples, self.work, on_row)
            if time.monotonic() - saved > 60 * setting.checkpoint_minutes:
                self._save(STATE)
                saved = time.monotonic()
        if self.step == setting.shallow_steps:
            # nothing comes behind it here, but other arms may branch off
            self._save(SHALLOW)
        self._note_held_out(len(self.data.held_out), self.model, on_row)
        self._save(STATE)

    def _micro_batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield this process's batches of the step, each with the rows of the whole step."""
        setting, world = self.setting, self.processes.world
        first = self.step * setting.accumulation * world
        packs = [self.order[first + i][1] for i in range(setting.accumulation * world)]
        rows = sum(len(self.data.examples[i].loss_rows(setting.loss_rows)) for pack in packs for i in pack)
        for pack in packs[self.processes.rank :: world]:
            batch = load_batch(
                self.data.examples,
                self.data.source,
                pack,
                device=self.model.device,
                loss_rows=setting.loss_rows,
            )
            yield batch, rows

    def _train_step(self, window: _Window, *, with_loss: bool) -> Tensor:
        """Take one optimiser step; return [depth] mean KL of every step of the chains."""
        setting = self.setting
        chain = replace(setting.chain, depth=setting.depth_at(self.step))
        # one draw per optimiser step and process, a function of both: nothing to store for a resume
        generator = torch.Generator().manual_seed(
            (setting.seed * 1_000_003 + self.step) * 1009 + self.processes.rank
        )
        kl = torch.zeros(chain.depth, device=self.model.device)
        counts = torch.zeros_like(kl)
        names: list[str] = []
        for batch, rows in self._micro_batches():
            report = loss_of(
                self.work, batch, self.teacher_head, chain,
                normaliser=rows, generator=generator, with_loss=with_loss,
            )  # fmt: skip
            report.loss.backward()  # type: ignore[no-untyped-call]
            names += batch.ids
            kl += report.kl
            counts += report.counts
            window.add(report.hits, report.counts, len(batch.rows))
        self.processes.sum_gradients(self.masters.work)
        norm = self.masters.collect()
        if not norm < float("inf"):
            self._stop(names)
        self.masters.step(self.step)
        self.step += 1
        self._norm = norm
        return kl / counts.clamp(min=1)

    def _stop(self, names: Sequence[str]) -> None:
        self.masters.clear()
        self._save(STATE)
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise UserError(
            f"the loss is not finite at step {self.step} (answers {shown}); the weights before that step are kept in "
            f"{self.out / STATE}: lower --lr, or leave these answers out"
        )

    def _note_training(self, window: _Window, kl: Tensor, on_row: Callable[[LogRow], None]) -> None:
        setting = self.setting
        last = self.step - 1
        mean = tuple(kl.tolist())
        row = LogRow(
            split="train",
            step=self.step,
            epoch=self.order[last * setting.accumulation * self.processes.world][0],
            seconds=self.seconds,
            lr=learning_rate(setting.optim, last, setting.steps, setting.shallow_steps),
            loss=sum(setting.chain.decay**i * k for i, k in enumerate(mean)),
            grad_norm=self._norm,
            rows_per_second=window.rows * self.processes.world / (time.perf_counter() - window.began),
            kl=mean,
            accuracy=window.accuracy(),
        )
        self.log.append(row)
        on_row(row)

    def _note_held_out(self, count: int, model: TrainModel, on_row: Callable[[LogRow], None]) -> None:
        if not self.data.held_out or self.processes.rank:
            return
        setting = self.setting
        report = evaluate(
            model, self.target.info, self.data.held_out[:count], self.data.source, depth=setting.eval_depth
        )
        row = LogRow(
            split="held_out",
            step=self.step,
            seconds=self.seconds,
            accuracy=report.accuracy,
            marginal=report.marginal,
            rms=report.rms,
            accepted_per_round=report.accepted_per_round,
            rounds=report.rounds,
        )
        self.log.append(row)
        on_row(row)

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in to be gone on from."""
        ids = [len(self.data.examples), sum(e.num_rows for e in self.data.examples)]
        identity = {
            "config": asdict(self.config),
            "setting": self.setting.what_counts(),
            "target": self.target.info.fingerprint,
            "answers": ids,
            "processes": self.processes.world,
        }
        if self.start is not None:
            identity["start"] = self.start.fingerprint
        return plain(identity)

    def _save(self, name: str) -> None:
        if self.processes.rank:
            return
        state = {
            "identity": self._identity(),
            "step": self.step,
            "seconds": self.seconds,
            "target_ids": self.model.target_ids,
            "model": self.model.state_dict(),
            "adam": self.masters.state(),
            "log": [asdict(row) for row in self.log],
        }
        path, part = self.out / name, self.out / f"{name}.part"
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            torch.save(state, part)
            part.replace(path)
            write_log(self.log, self.out / "log.parquet")
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            kept = "the checkpoint before it is kept" if path.exists() else "nothing was saved before it"
            raise UserError(
                f"cannot write the checkpoint of step {self.step} to {path} ({error}); {kept}: free some space and "
                "run the same command again"
            ) from error

    def _load(self, path: Path, *, shallow: bool = False) -> None:
        state = torch.load(path, map_location=self.model.device, weights_only=True)
        mine, theirs = self._identity(), state["identity"]
        if shallow:
            # chains of one step feed nothing back
            for part, name in (("config", "feedback"), ("config", "trained_depth")):
                theirs[part][name] = mine[part].get(name)
            theirs["setting"]["chain"]["depth"] = mine["setting"]["chain"]["depth"]
        different = differences(mine, theirs)
        if different or not torch.equal(state["target_ids"].cpu(), self.model.target_ids.cpu()):
            what = ", ".join(different) or "the draft vocabulary"
            raise UserError(
                f"{path} is of a run that differs in {what}; use another --out, or the same settings"
            )
        self.model.load_state_dict(state["model"])
        self.masters.load(state["adam"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.log = [LogRow(**row) for row in state["log"]]
