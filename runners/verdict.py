"""Why two runners part: the drafter's own ties, and the ways in which engines load a drafter without applying it.

A checkpoint whose taps, vocabulary map or norm flags are lost on the way still runs, with a lower acceptance and no
error. Rescored under each of these mistakes, the reference's answers show which one gives the other runner's counts.

Example:
    judge = Judge(target)
    judge.explain(differences, replayed, others, drafter, 8)   # the same differences, with verdicts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbench.errors import UserError
from specbench.runners.agreement import TIE_MARGIN, Difference, Kind, shape
from specbench.runners.answers import Answerer
from specbench.runners.replay import walk_rounds
from specbench.runners.runner import Outcome
from specbench.runners.targets import Target
from specbench.types import Drafter, RenderedPrompt, ScoreRequest, Span, TargetWeights, Trace

AnswerId = tuple[str, int, str]
"""``RenderedPrompt.key``"""
_MOST_ANSWERS = 8
"""Differing answers that the mistakes are tried on."""
_ENOUGH = 0.98
"""Share of the other runner's rounds that a mistake must reproduce; the rest may be ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One way to run a drafter otherwise than its checkpoint says."""

    kind: Kind
    text: str
    changes: Mapping[str, Any]
    """Of ``Eagle3Config``."""
    id_shift: int | None = None
    """Added to every target id of the draft vocabulary."""
    identity: bool = False
    """Draft id i is target id i."""


def mistakes(config: Any, num_layers: int) -> Iterator[Mistake]:
    """Yield the mistakes that make a difference for a drafter of the EAGLE-3 family.

    Args:
        config: ``Eagle3Config``.
        num_layers: of the target; taps beyond it do not exist.
    """
    if config.draft_vocab_size < config.vocab_size:
        yield Mistake(kind="vocabulary map", text="draft ids taken for target ids", changes={}, identity=True)
        for shift in (1, -1):
            yield Mistake(kind="vocabulary map", text=f"d2t off by {shift:+d}", changes={}, id_shift=shift)
    for shift in (1, -1):
        taps = tuple(t + shift for t in config.taps)
        if min(taps) >= 0 and max(taps) <= num_layers:
            yield Mistake(kind="taps", text=f"taps {taps} instead of {config.taps}", changes={"taps": taps})
    other = "pre" if config.feedback == "post" else "post"
    text = f"norm_output read as {str(other == 'post').lower()}"
    yield Mistake(kind="norm flags", text=text, changes={"feedback": other})
    if config.norm_per_tap:
        yield Mistake(kind="norm flags", text="fc_norm not applied", changes={"norm_per_tap": False})
    if config.norm_joint:
        yield Mistake(kind="norm flags", text="norm_before_fc not applied", changes={"norm_joint": False})
    flipped = not config.norm_before_residual
    text = f"norm_before_residual read as {str(flipped).lower()}"
    yield Mistake(kind="norm flags", text=text, changes={"norm_before_residual": flipped})
    if float(config.rope.get("rope_theta", 1e4)) != 1e4:
        rope = {**config.rope, "rope_theta": 1e4}
        yield Mistake(kind="positions", text="RoPE base 10000 instead of its own", changes={"rope": rope})
    if any(config.windows):
        changes = {"windows": (), "sink": "none", "positions": "absolute"}
        yield Mistake(kind="window", text="window not applied", changes=changes)
    if config.gate:
        yield Mistake(kind="norm flags", text="gate not applied", changes={"gate": False})


def mistaken(drafter: Any, mistake: Mistake, target: TargetWeights) -> Any:
    """Return the drafter as a runner with this mistake has it; weights it no longer reads are left out."""
    from specbench.drafters.eagle3 import Eagle3Model
    from specbench.drafters.eagle3_drafter import Eagle3Drafter

    model = drafter.model
    config = replace(model.config, **mistake.changes)
    ids = model.target_ids
    if mistake.identity:
        ids = torch.arange(config.draft_vocab_size)
    elif mistake.id_shift is not None:
        ids = (ids + mistake.id_shift) % config.vocab_size
    changed = Eagle3Model(config, target, ids.cpu(), dtype=model.dtype)
    # a head made of the target's rows is part of the file an engine reads, so a wrong map does not move it
    if config.head == "target_rows":
        changed.head_table = model.head_table
    known = changed.state_dict()
    changed.load_state_dict({n: t for n, t in model.state_dict().items() if n in known})
    return Eagle3Drafter(changed, target.info, drafter.info.name)


class Judge:
    """Explains differences between a reference that traces (replay) and any other runner."""

    def __init__(self, target: Target, max_new_tokens: int = 128) -> None:
        """Prepare; runs nothing yet.

        Args:
            target: whose answers were compared.
            max_new_tokens: of the runs compared.
        """
        self.target = target
        self.weights = target.weights()
        self.max_new_tokens = max_new_tokens

    def explain(
        self,
        differences: Sequence[Difference],
        reference: Mapping[AnswerId, Outcome],
        other: Mapping[AnswerId, Outcome],
        drafter: Drafter,
        depth: int,
    ) -> list[Difference]:
        """Return the differences of one drafter and depth with verdicts.

        Args:
            differences: as ``first_difference`` found them.
            reference: outcomes of the first runner, by prompt key.
            other: of the second.
            drafter: compared.
            depth: k.
        """
        explained = [self._by_answer(d, reference, other) for d in differences]
        open_ones = [d for d in explained if d.kind == "unexplained"]
        if not open_ones:
            return explained
        traces = {
            _key(d): self._trace(reference[_key(d)], drafter, shifted=True) for d in open_ones[:_MOST_ANSWERS]
        }
        found = {
            _key(d): self._by_drafter(d, traces[_key(d)], drafter) for d in open_ones if _key(d) in traces
        }
        explained = [found.get(_key(d), d) if d.kind == "unexplained" else d for d in explained]
        if all(d.kind != "unexplained" for d in explained):
            return explained
        verdict = self._by_mistake(
            {k: t for k, t in traces.items() if found[k].kind == "unexplained"}, other, drafter, depth
        )
        if verdict is None:
            return explained
        kind, text = verdict
        return [
            replace(d, kind=kind, verdict=f"{kind}: {text} ({d.verdict})") if d.kind == "unexplained" else d
            for d in explained
        ]

    def _by_answer(
        self, difference: Difference, reference: Mapping[AnswerId, Outcome], other: Mapping[AnswerId, Outcome]
    ) -> Difference:
        """Another answer with a clear margin: perhaps another prompt."""
        if difference.kind != "answers differ":
            return difference
        prompt = reference[_key(difference)].work.prompt
        theirs = other[_key(difference)].answer_ids
        for text, changed in _bos_variants(prompt, self.target.info.bos_id):
            if self._greedy(changed, len(theirs)) == theirs:
                return replace(difference, kind="BOS", verdict=f"BOS: {text} ({difference.verdict})")
        return difference

    def _greedy(self, prompt: RenderedPrompt, length: int) -> tuple[int, ...]:
        answerer = Answerer(self.target, taps=(), max_new_tokens=length)
        return next(iter(answerer.answer([replace(prompt, max_new_tokens=length)]))).answer_ids

    def _trace(self, outcome: Outcome, drafter: Drafter, *, shifted: bool) -> Trace:
        taps = set(drafter.info.taps)
        if shifted:
            taps |= {t + s for t in drafter.info.taps for s in (-1, 1)}
        inside = sorted(t for t in taps if 0 <= t <= self.target.info.num_layers)
        answerer = Answerer(self.target, taps=inside, max_new_tokens=self.max_new_tokens)
        return answerer.force(outcome.work.prompt, outcome.answer_ids, outcome.finish)

    def _by_drafter(self, difference: Difference, trace: Trace, drafter: Drafter) -> Difference:
        """The drafter's own tie at the step where the runners part."""
        facts = draft_facts(drafter, trace, difference.position, difference.step)
        if facts is None:
            return difference
        token, margin = facts
        difference = replace(difference, tokens=(token, difference.tokens[1]))
        if margin >= TIE_MARGIN:
            return difference
        text = f"tie: the drafter's two best tokens are {margin:.2g} apart ({difference.verdict})"
        return replace(difference, kind="tie", verdict=text, explained=True)

    def _by_mistake(
        self,
        traces: Mapping[AnswerId, Trace],
        other: Mapping[AnswerId, Outcome],
        drafter: Drafter,
        depth: int,
    ) -> tuple[Kind, str] | None:
        """The mistake that gives the other runner's counts, or None."""
        if drafter.info.kind not in ("eagle3", "dflash"):
            return None
        asked: Any = drafter
        declared = self._share(asked, traces, other, drafter.info.name, depth)
        best: list[tuple[float, Mistake]] = []
        for mistake, changed in self._mistaken(asked):
            best.append((self._share(changed, traces, other, drafter.info.name, depth), mistake))
        top = max((share for share, _mistake in best), default=0.0)
        if top < _ENOUGH or top <= declared:
            return None
        same = [mistake for share, mistake in best if share == top]
        return same[0].kind, f"{drafter.info.name} run with " + " or ".join(m.text for m in same)

    def _mistaken(self, drafter: Any) -> Iterator[tuple[Mistake, Any]]:
        """Every mistake that the drafter's kind allows, and the drafter run with it."""
        if drafter.info.kind == "dflash":
            from specbench.drafters.dflash import DFlashModel
            from specbench.drafters.dflash_drafter import DFlashDrafter

            model = drafter.model
            whose, norm = (
                ("layer 0's", "layer0") if model.config.context_norm == "own" else ("their own", "own")
            )
            config = replace(model.config, context_norm=norm)
            changed = DFlashModel(config, self.weights, model.target_ids.cpu())
            changed.load_state_dict(model.state_dict())
            text = f"context keys of every layer normed by {whose} k_norm"
            yield (
                Mistake(kind="norm flags", text=text, changes={"context_norm": norm}),
                DFlashDrafter(changed, self.target.info, drafter.info.name),
            )
            return
        for mistake in mistakes(drafter.model.config, self.target.info.num_layers):
            try:
                yield mistake, mistaken(drafter, mistake, self.weights)
            except UserError:  # the combination does not exist
                continue

    def _share(
        self,
        drafter: Any,
        traces: Mapping[AnswerId, Trace],
        other: Mapping[AnswerId, Outcome],
        name: str,
        depth: int,
    ) -> float:
        """Share of the other runner's rounds that this drafter makes on the reference's answers."""
        keys = list(traces)
        scores = drafter.score([traces[k] for k in keys], ScoreRequest(depth=depth))
        same = total = 0
        for key, score in zip(keys, scores, strict=True):
            theirs = shape(other[key].rounds[name, depth])
            ours = shape(walk_rounds(score, len(traces[key].answer_ids), depth))
            same += sum(a == b for a, b in zip(ours, theirs, strict=False))
            total += max(len(ours), len(theirs))
        return same / max(total, 1)


@torch.inference_mode()
def draft_facts(drafter: Any, trace: Trace, start: int, step: int) -> tuple[int, float] | None:
    """Return a drafter's own token at one step of one round, and by how much it won.

    Args:
        drafter: any; None is returned for kinds that have no logits to look at.
        trace: with the drafter's taps.
        start: s, the answer token the round starts at.
        step: 1..k; the steps before it were accepted.

    Returns:
        (target id of the drafter's best token, its logit minus the second best), or None.
    """
    if start + step > len(trace.answer_ids) - 1:
        return None
    if drafter.info.kind == "draft-lm":
        ids = torch.tensor([trace.ids[: trace.prompt_length + start + step]], device=drafter.model.device)
        logits = drafter.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        return _best(logits, None)
    if drafter.info.kind != "eagle3":
        return None
    from specbench.drafters.chains import run_chains

    packed, rows = drafter.pack([trace])
    seen: list[torch.Tensor] = []

    def look(at: int, _active: torch.Tensor, post: torch.Tensor) -> None:
        if at == step:
            seen.append(drafter.model.logits(post)[0])

    run_chains(drafter.model, packed, rows[start : start + 1], step, look)
    return _best(seen[0], drafter.model.target_ids)


def _best(logits: torch.Tensor, target_ids: torch.Tensor | None) -> tuple[int, float]:
    values, index = logits.float().topk(2)
    token = index[0] if target_ids is None else target_ids[index[0]]
    return int(token), float(values[0] - values[1])


def _bos_variants(prompt: RenderedPrompt, bos_id: int | None) -> Iterator[tuple[str, RenderedPrompt]]:
    """Yield the prompt with one BOS more, and with one less where it has one."""
    if bos_id is None:
        return
    ids = prompt.token_ids
    choices = [("one BOS more than in the prompt", (bos_id, *ids))]
    if ids[0] == bos_id and len(ids) > 1:
        choices.append(("the prompt's first BOS left out", ids[1:]))
    for text, changed in choices:
        span = Span(kind="user", start=0, end=len(changed))
        yield text, replace(prompt, token_ids=changed, spans=(span,))


def _key(difference: Difference) -> AnswerId:
    return (difference.prompt_id, difference.turn, difference.condition)
