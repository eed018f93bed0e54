"""From an answer file to trained drafters: target, states, vocabulary, one trainer an arm, cards.

Example:
    job = TrainingJob(target="smollm2-135m", answers=Path("answers.jsonl"), arms=(arm,), out=Path("drafters"))
    run_job(job, TrainingObserver(), command="specbench train ...")
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbench.drafters.checkpoints.mtp import check_final_norm
from specbench.drafters.dflash import DFlashConfig
from specbench.drafters.eagle3 import default_taps
from specbench.drafters.training.card import CardFacts, make_card
from specbench.drafters.training.data import Example, TapSource, check_examples
from specbench.drafters.training.evaluate import evaluate
from specbench.drafters.training.history import LogRow, plot_log
from specbench.drafters.training.kinds import TrainConfig, cache_taps, choose_mask, make_model, save
from specbench.drafters.training.processes import Processes
from specbench.drafters.training.recipe import Arm, make_config
from specbench.drafters.training.start import Start, read_start
from specbench.drafters.training.trainer import PackOrder, Trainer, TrainingData
from specbench.drafters.training.vocabulary import Vocabulary, choose_vocabulary, given_vocabulary
from specbench.errors import UserError
from specbench.runners.answer_file import read_answers
from specbench.runners.targets import Target
from specbench.runners.training_data import TapCache, TargetStates, to_examples

_SAMPLE = 16
"""Answers looked at to tell whether they are the target's own."""
_LOW_AGREEMENT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What ``specbench train`` does."""

    target: str
    answers: Path
    arms: tuple[Arm, ...]
    out: Path
    """Directory that gets one directory an arm; with ``flat`` the one arm's own."""
    flat: bool = False
    draft_vocab: int | None = None
    """None: 32,000, or as much as the answers can fill."""
    held_out: int = 64
    taps: tuple[int, ...] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Fields that all arms' configurations share; what is missing is taken from the target."""
    cache: Path | None = None
    """Directory for the target's states; None: computed anew for every pack."""
    cache_bytes: int = 32 << 30
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    data: str = "prompts of the user's own"
    start: Path | None = None
    """Directory with a drafter of every arm's name to go on from; with ``flat`` that drafter's own."""


class TrainingObserver:
    """Told how training goes; does nothing by itself."""

    def note(self, text: str) -> None:
        """Take in a sentence for the user."""

    def states(self, done: int, everything: int) -> None:
        """Take in how many answers have their states."""

    def arm(self, name: str, steps: int, done: int) -> None:
        """Take in that an arm starts, ``done`` of its steps being done already."""

    def row(self, name: str, row: LogRow) -> None:
        """Take in a row of an arm's log."""


def drafter_sizes(target: Target, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drafter's sizes: those given, else those of one of the target's blocks."""
    config = target.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    sizes: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "intermediate_size": int(config.intermediate_size),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-5)),
        "head": "target_rows",
    }
    return sizes | dict(given)


def _configs(
    job: TrainingJob,
    target: Target,
    examples: Sequence[Example],
    draft_vocab: int,
    starts: Sequence[Start | None],
) -> list[TrainConfig]:
    """Return every arm's configuration; block drafters get a mask token and the taps of the others.

    Raises:
        UserError: a start is built differently.
    """
    sizes = drafter_sizes(target, job.sizes) | ({} if job.taps is None else {"taps": job.taps})
    configs: list[TrainConfig] = []
    for arm, start in zip(job.arms, starts, strict=True):
        own = dict(arm.switches)
        if arm.drafter == "mtp":
            check_final_norm(target.weights())
        if arm.drafter == "dflash":
            old = start.config if start is not None else None
            own.setdefault(
                "mask_token_id",
                old.mask_token_id
                if isinstance(old, DFlashConfig)
                else choose_mask(examples, target.info.vocab_size, target.info.stop_ids),
            )
            own.setdefault("taps", job.taps or default_taps(target.info.num_layers))
        configs.append(make_config(target.info, draft_vocab, sizes, own, arm.drafter))
        if start is not None:
            start.check(configs[-1])
    return configs


def _split(examples: Sequence[Example], held_out: int) -> tuple[Sequence[Example], Sequence[Example]]:
    if held_out < 0 or held_out >= len(examples):
        raise UserError(
            f"{held_out} held-out answers leave nothing of {len(examples)} to train on; write more with "
            "specbench answers, or lower --held-out"
        )
    cut = len(examples) - held_out
    return examples[:cut], examples[cut:]


def _starts(job: TrainingJob, target: Target) -> Sequence[Start | None]:
    """Return what every arm goes on from."""
    if job.start is None:
        return [None] * len(job.arms)
    where = [job.start if job.flat else job.start / arm.name for arm in job.arms]
    starts = [read_start(path, target.weights()) for path in where]
    if len({start.target_ids for start in starts}) > 1:
        raise UserError(
            f"the drafters under {job.start} have different draft vocabularies; train them one by one"
        )
    return starts


def _vocabulary(
    job: TrainingJob, examples: Sequence[Example], vocab_size: int, start: Start | None
) -> Vocabulary:
    answers = [e.answer_ids for e in examples]
    if start is not None:
        return given_vocabulary(start.target_ids, answers)
    size = job.draft_vocab
    if size is None:
        size = min(32_000, vocab_size, len({token for answer in answers for token in answer}))
    return choose_vocabulary(answers, size=size, vocab_size=vocab_size)


def _with_steps(arm: Arm, examples: Sequence[Example], world: int) -> Arm:
    """Turn epochs into optimiser steps."""
    if arm.epochs is None:
        return arm
    order = PackOrder([e.num_rows for e in examples], arm.setting.batch_rows, arm.setting.seed)
    steps = max(1, round(arm.epochs * order.packs_per_epoch() / (arm.setting.accumulation * world)))
    return replace(arm, epochs=None, setting=replace(arm.setting, steps=steps))


def _source(
    job: TrainingJob,
    target: Target,
    taps: Sequence[int] | None,
    examples: Sequence[Example],
    observer: TrainingObserver,
    processes: Processes,
) -> TapSource:
    if job.cache is None:
        return TargetStates(target, taps or ())
    if taps is None:
        # the last state is in every cache, so any will do
        taps = TapCache.taps_of(job.cache) or ()
    if processes.rank == 0:
        cache = TapCache.open(job.cache, target, taps=taps, budget=job.cache_bytes)
        cache.extend(examples, observer.states)
        processes.wait()
        return cache
    processes.wait()
    return TapCache.open(job.cache, target, taps=taps, budget=job.cache_bytes)


def agreement(examples: Sequence[Example], source: TapSource) -> float:
    """Return the share of answer tokens that are the target's most probable ones: about 1 for its greedy answers."""
    hits = total = 0
    for example in examples:
        first = len(example.prompt_ids) - 1
        top = source.read(example).top[first:].cpu()
        hits += int((top == torch.tensor(example.answer_ids)).sum())
        total += len(example.answer_ids)
    return hits / max(1, total)


def run_job(
    job: TrainingJob,
    observer: TrainingObserver,
    *,
    command: str,
    make_processes: Callable[[], Processes] | None = None,
) -> dict[str, float | None]:
    """Train every arm, going on where an earlier call stopped.

    Args:
        job: what.
        observer: told what happens.
        command: for the cards.
        make_processes: joins the other processes of a multi-GPU run; None: there are none.

    Returns:
        Arm -> accepted draft tokens per round on the held-out answers; None without any.

    Raises:
        UserError: the answers are of another tokenizer or too few, the loss is not finite, the disk is full, ...
    """
    processes = Processes() if make_processes is None else make_processes()
    device = job.device
    if processes.world > 1 and device in {"auto", "cuda"} and torch.cuda.is_available():
        device = f"cuda:{processes.local_rank}"
    target = Target.load(job.target, device=device, dtype=job.dtype, trust_remote_code=job.trust_remote_code)
    examples, dropped = check_examples(
        to_examples(read_answers(job.answers, target.info.vocab_size)), target.info.max_positions
    )
    if dropped:
        observer.note(f"{len(dropped)} answers of one token or beyond the target's positions are left out")
    training, held_out = _split(examples, job.held_out)
    starts = _starts(job, target)
    # all starts have the same one
    vocabulary = _vocabulary(job, training, target.info.vocab_size, next(iter(starts), None))
    if vocabulary.padded:
        observer.note(
            f"{vocabulary.padded} of {len(vocabulary.target_ids)} draft-vocabulary entries occur in no answer"
        )
    configs = _configs(job, target, examples, len(vocabulary.target_ids), starts)
    source = _source(job, target, cache_taps(configs), examples, observer, processes)
    share = agreement(examples[:_SAMPLE], source)
    if share < _LOW_AGREEMENT:
        observer.note(
            f"only {share:.0%} of the answers' tokens are what {target.info.name} finds most probable: were they "
            "sampled, or written by another model? specbench answers writes the target's own"
        )
    data = TrainingData(examples=training, held_out=held_out, source=source)
    results: dict[str, float | None] = {}
    for arm, config, start in zip(job.arms, configs, starts, strict=True):
        out = job.out if job.flat else job.out / arm.name
        arm = _with_steps(arm, training, processes.world)
        trainer = Trainer(
            config, vocabulary.target_ids, target.weights(), data, arm.setting, out, processes, start
        )
        if arm.branch is not None:
            trainer.branch(job.out / arm.branch)
        observer.arm(arm.name, arm.setting.steps, trainer.step)
        name = arm.name
        trainer.run(lambda row, name=name: observer.row(name, row))  # type: ignore[misc]
        results[arm.name] = None
        if processes.rank == 0:
            results[arm.name] = _finish(job, arm, config, trainer, vocabulary, target, command)
    return results


def _finish(
    job: TrainingJob,
    arm: Arm,
    config: TrainConfig,
    trainer: Trainer,
    vocabulary: Vocabulary,
    target: Target,
    command: str,
) -> float | None:
    """Write the drafter in bfloat16, its plot and its card; return what it accepts per round on held-out answers."""
    out = trainer.out
    stored = make_model(trainer.config, target.weights(), vocabulary.target_ids, torch.bfloat16)
    stored.load_state_dict(trainer.model.state_dict())
    save(stored, out)
    plot_log(trainer.log, out / "loss.png")
    if not trainer.data.held_out:
        return None
    # judged as it is stored and as it will be run: bfloat16 weights, float32 arithmetic
    judged = make_model(trainer.config, target.weights(), vocabulary.target_ids, torch.float32)
    judged.load_state_dict(stored.state_dict())
    report = evaluate(
        judged, target.info, trainer.data.held_out, trainer.data.source, depth=arm.setting.eval_depth
    )
    setting = arm.setting
    packs = setting.steps * setting.accumulation * trainer.processes.world
    facts = CardFacts(
        name=arm.name,
        config=config,
        target=target.info,
        setting=setting,
        num_answers=len(trainer.data.examples),
        num_tokens=sum(len(e.answer_ids) for e in trainer.data.examples),
        epochs=packs / trainer.order.packs_per_epoch(),
        coverage=vocabulary.coverage,
        data=job.data,
        tap_dtype=target.info.dtype,
        held_out=report,
        num_held_out=len(trainer.data.held_out),
        seconds=trainer.seconds,
        hardware=hardware(target.device),
        command=command,
        start=None if trainer.start is None else trainer.start.name,
        history=() if trainer.start is None else trainer.start.history,
    )
    (out / "README.md").write_text(make_card(facts))
    return report.accepted_per_round


def hardware(device: torch.device) -> str:
    """Return what computed, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''} ({platform.machine()})"
