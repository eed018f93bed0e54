"""The card of a trained drafter: what it was made from, what it reaches, how to make it again.

Example: ``(out / "README.md").write_text(make_card(CardFacts(...)))``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbench.drafters.dflash import DFlashConfig
from specbench.drafters.mtp import MtpConfig
from specbench.drafters.training.evaluate import HeldOut
from specbench.drafters.training.kinds import TrainConfig
from specbench.drafters.training.trainer import TrainSetting
from specbench.types import TargetInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything a card says."""

    name: str
    config: TrainConfig
    target: TargetInfo
    setting: TrainSetting
    num_answers: int
    num_tokens: int
    """Answer tokens learnt from, once over."""
    epochs: float
    coverage: float
    """Share of the training answers' tokens in the draft vocabulary."""
    data: str
    """Where the prompts come from, a sentence."""
    tap_dtype: str
    held_out: HeldOut
    num_held_out: int
    seconds: float
    hardware: str
    command: str
    measured: Mapping[str, float] = field(default_factory=dict)
    """Suite -> accepted per round at k = 8, greedy, as ``specbench run`` measures it."""
    signs: Sequence[str] = ()
    """Sentences on the published signs."""
    start: str | None = None
    """Name of the drafter it went on from."""
    history: Sequence[str] = ()
    """Rows of that drafter's card on how it was made."""


def _schedule(setting: TrainSetting) -> str:
    if setting.optim.restart is None or not setting.shallow_steps:
        return "cosine"
    return (
        f"cosine, and a second one from {setting.optim.restart * setting.optim.lr:g} behind the shallow phase"
    )


def make_card(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    c, s, h = facts.config, facts.setting, facts.held_out
    switches = ", ".join(f"{k} {v}" for k, v in c.settings().items() if k not in {"taps", "draft_vocab"})
    steps = "".join(f" {i} |" for i in range(1, len(h.accuracy) + 1))
    lines = [
        f"# {facts.name}",
        "",
        f"{_what(c)} for {facts.target.name} ({switches}).",
        "",
        "| | |",
        "|---|---|",
        f"| target | {facts.target.name}, fingerprint {facts.target.fingerprint} |",
        f"| taps | {', '.join(map(str, c.taps))} (`hidden_states` indices), computed in {facts.tap_dtype} |",
        f"| draft vocabulary | {c.draft_vocab_size} tokens by frequency, {facts.coverage:.1%} of the answers' tokens |",
        f"| data | {facts.num_answers} greedy answers of the target itself, {facts.num_tokens} answer tokens, "
        f"{facts.epochs:.1f} epochs; {facts.data} |",
        f"| steps | {s.steps}, of packs of at most {s.batch_rows * s.accumulation} rows; {_steps(c, s)} |",
        f"| loss | forward KL on the draft vocabulary, step weights {s.chain.decay}^i, answer tokens |",
        f"| optimiser | AdamW {s.optim.betas}, learning rate {s.optim.lr:g}, warm-up {s.optim.warmup:.0%}, "
        f"{_schedule(s)}, clip {s.optim.clip}; {s.precision} compute, float32 weights; seed {s.seed} |",
        f"| start | {_start(s, c) if facts.start is None else 'the weights of ' + facts.start + ', made as follows'} |",
        f"| cost | {facts.seconds / 60:.0f} minutes in training steps on {facts.hardware} |",
        *(_before(row) for row in facts.history),
        "",
        f"## Held-out answers ({facts.num_held_out} of them, {h.rounds} rounds, k = {len(h.accuracy)}, greedy)",
        "",
        f"Accepted draft tokens per round (no bonus token): **{h.accepted_per_round:.3f}**",
        "",
        f"| step |{steps}",
        "|---|" + "---|" * len(h.accuracy),
        "| accuracy, forced chains |" + "".join(f" {a:.3f} |" for a in h.accuracy),
        "| marginal rate |" + "".join(f" {a:.3f} |" for a in h.marginal),
    ]
    if h.rms:
        lines += [
            "| RMS of the fed-back state |" + "".join(f" {a:.3f} |" for a in h.rms),
            "",
            f"Growth of the fed-back state's RMS over {len(h.rms)} steps: {h.growth:.3f}.",
        ]
    if facts.measured:
        lines += [
            "",
            "## Suites (`specbench run`, k = 8, greedy, float32)",
            "",
            "| suite | accepted per round |",
            "|---|---|",
            *(f"| {suite} | {value:.3f} |" for suite, value in facts.measured.items()),
        ]
    if facts.signs:
        lines += ["", "## Published signs", "", *(f"- {sentence}" for sentence in facts.signs)]
    lines += ["", "## Made with", "", "```", facts.command, "```", ""]
    return "\n".join(lines)


def _before(row: str) -> str:
    """Mark a row of an older card: ``| steps | 10 |`` becomes ``| steps, before | 10 |``."""
    name, rest = row[2:].split(" |", 1)
    return f"| {name}, before |{rest}"


def _start(setting: TrainSetting, config: TrainConfig) -> str:
    if setting.init == "random":
        return "random"
    if isinstance(config, DFlashConfig):
        return "final norm from the target's, fc passing the last state it reads, layers random"
    return "final norm and layers from the target's where shapes agree, fc passing the last state it reads"


def _what(config: TrainConfig) -> str:
    if isinstance(config, DFlashConfig):
        return "A DFlash drafter"
    return "An MTP-style head" if isinstance(config, MtpConfig) else "A drafter of the EAGLE-3 family"


def _steps(config: TrainConfig, setting: TrainSetting) -> str:
    chain = setting.chain
    first = "with one mask a block" if isinstance(config, DFlashConfig) else "at depth 1"
    first = f"the first {setting.shallow_steps} {first}, then " if setting.shallow_steps else ""
    if isinstance(config, DFlashConfig):
        return f"{first}{min(chain.depth, config.max_depth)} masks of each block, behind {chain.keep:.0%} of the rows"
    return (
        f"{first}train-time test of depth {chain.depth} "
        f"({chain.keep:.0%} of the chains go on after each step, weighted to make up for it)"
    )
