"""The checkpoint doctor: a drafter under its declared setting and under those it may have been meant for.

A drafter that was trained one way and declared another still runs; it only accepts less. So the drafter is scored on
the same few answers under its declared setting and under every setting that a common mistake would have made the
right one, and the declared one has to be the best. The target runs once, with all taps that the settings need.

Example:
    checkup = check(RunConfig(drafter="runs/my-drafter", limit=16, depth=(4,)))
    checkup.healthy, checkup.verdict
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config import RunConfig
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.mtp import MtpConfig, MtpModel
from specbench.drafters.resolve import load_drafter
from specbench.errors import SpecbenchWarning, UserError
from specbench.perturbations.resolve import resolve_conditions
from specbench.results.checkup import (
    DECLARED,
    FIRST,
    Checkup,
    Reading,
    Remark,
    Tried,
    best_of,
    compare,
    conclude,
)
from specbench.runners.answers import Answerer
from specbench.runners.pipeline import load_chat
from specbench.runners.plan import is_unchanged, load_prompts, render_turn
from specbench.runners.replay import walk_rounds
from specbench.runners.targets import Target, load_tokenizer
from specbench.types import CLEAN, Drafter, PositionScores, ScoreRequest, TargetWeights, Trace

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
"""Rotary bases of the common model families."""
BOS_CONDITIONS: Mapping[str, str] = {
    "template/double_bos": "BOS doubled",
    "template/no_bos": "BOS left out",
}
_BOS_PROMPTS = 6
"""Another prompt needs another pass of the target, which is what a check spends most of its time on."""
_MAX_REPAIRS = 3
_LEARNED_OVER_BIGRAMS = 1.25
"""A map from draft ids to tokens has to beat one from the newest token to the next by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A departure from what the checkpoint declares."""

    name: str
    advice: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Eagle3Config`` or ``MtpConfig``; for an MTP head also ``reads_normed``."""
    ids: Tensor | None = None
    """[draft_vocab_size] another vocabulary map."""


def check(config: RunConfig, note: Callable[[str], None] = lambda _text: None) -> Checkup:
    """Trace a few prompts once and examine one drafter on them.

    Args:
        config: suite, limit, target, drafter, depth (the largest counts) and what concerns the answers.
        note: hears what is done.

    Raises:
        UserError: the drafter does not load, or is of a kind whose settings cannot be varied.
    """
    tokenizer, _limit = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    chat = load_chat(tokenizer, config)
    prompts = load_prompts(config, chat)
    target = Target.load(
        config.target, device=config.device, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    weights = target.weights()
    with warnings.catch_warnings():
        # what the loader warns of comes back among the remarks
        warnings.simplefilter("ignore", SpecbenchWarning)
        drafter = chain_drafter(
            load_drafter(config.drafter, weights),
            "which has no settings to vary; check examines checkpoints of the EAGLE-3 family and MTP heads",
        )
    note(f"answering {len(prompts)} prompts once, with the taps of every setting")
    answerer = Answerer(
        target,
        taps=needed_taps(drafter, weights),
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
    )
    (clean,) = resolve_conditions([CLEAN])
    rendered = [render_turn(clean, prompt, 0, (), chat, config.seed) for prompt in prompts]
    order = {prompt.key: i for i, prompt in enumerate(rendered)}
    traces = sorted(answerer.answer(rendered), key=lambda t: order[t.prompt.key])
    kept = [i for i, trace in enumerate(traces) if len(trace.answer_ids) > 1]
    if not kept:
        raise UserError(
            "every answer ended with its first token, so there is nothing to draft; use another --suite"
        )
    variants = {DECLARED: [traces[i] for i in kept]}
    for name, label in BOS_CONDITIONS.items():
        (condition,) = (c for c in resolve_conditions([name]) if c.info.id == name)
        if condition.available(chat) is not None:
            continue
        few = kept[:_BOS_PROMPTS]
        other = [render_turn(condition, prompts[i], 0, (), chat, config.seed) for i in few]
        if not any(map(is_unchanged, other)):
            variants[label] = [
                answerer.force(prompt, traces[i].answer_ids, traces[i].finish)
                for prompt, i in zip(other, few, strict=True)
            ]
    return examine(drafter, weights, variants, max(config.depth), note=note, seed=config.seed)


def chain_drafter(drafter: Drafter, refusal: str) -> Eagle3Drafter:
    """Return the drafter as one whose chains can be looked into: the EAGLE-3 family and MTP heads.

    Args:
        drafter: as loaded, under the name the user gave.
        refusal: what to say of another kind, behind its name.

    Raises:
        UserError: it is of another kind.
    """
    inner = getattr(drafter, "drafter", drafter)
    if not isinstance(inner, Eagle3Drafter):
        raise UserError(f"{drafter.info.name!r} is a drafter of kind {drafter.info.kind!r}, {refusal}")
    return inner


def needed_taps(drafter: Eagle3Drafter, target: TargetWeights) -> tuple[int, ...]:
    """Return the declared taps and their neighbours, as far as the target has them."""
    near = {tap + shift for tap in drafter.model.config.taps for shift in (-1, 0, 1)}
    return tuple(sorted(tap for tap in near if 0 <= tap <= target.info.num_layers))


def examine(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    traces: Mapping[str, Sequence[Trace]],
    depth: int,
    *,
    note: Callable[[str], None] = lambda _text: None,
    draws: int = 10_000,
    seed: int = 0,
) -> Checkup:
    """Score a drafter under every setting and conclude.

    Args:
        drafter: as its checkpoint declares it.
        target: whose tensors it shares.
        traces: ``DECLARED`` -> answers with the taps of ``needed_taps``; other names -> the same answers under
            other prompts (BOS doubled), all of them or the first ones.
        depth: k.
        note: hears what is done.
        draws: resamples of the prompts.
        seed: of the resamples.
    """
    base = traces[DECLARED]
    settings = possible_settings(drafter.model, target)
    note(f"scoring {len(settings) + len(traces)} settings")
    scores = _score(drafter, base, depth)
    readings = [_reading(DECLARED, "", base, scores, depth)]
    readings += _settings_readings(drafter, target, base, scores, depth, settings)
    for label, others in traces.items():
        if label != DECLARED:
            advice = (
                f"the drafter was trained on prompts with {label}; make the prompts the same in both places"
            )
            reading = _reading(label, advice, others, _score(drafter, others, depth), depth)
            readings.append(replace(reading, other_prompts=True))
    learned = _learned_reading(drafter, base)
    if learned is not None:
        readings.append(learned)
    by_name = {setting.name: setting for setting in settings}
    best = best_of(compare(readings, draws=draws, seed=seed))
    repairs: list[Tried] = []
    if best is not None and best.name in by_name:
        repairs = _repairs(drafter, target, base, depth, by_name[best.name], draws, seed)
    return conclude(
        drafter.info.name,
        readings,
        [
            *_remarks(drafter, target, base, scores),
            *(Remark(text=n, serious=False) for n in drafter.info.notes),
        ],
        depth=depth,
        settings=_in_words(drafter.model.config),
        repairs=repairs,
        draws=draws,
        seed=seed,
    )


def resettled(drafter: Eagle3Drafter, target: TargetWeights, setting: Setting) -> Eagle3Drafter:
    """Return the same weights under another setting; norms that the file does not hold have weight 1."""
    model = drafter.model
    ids = model.target_ids if setting.ids is None else setting.ids
    twin: Eagle3Model | MtpModel
    if isinstance(model, MtpModel):
        changes = {"reads_normed": model.final_norm is None} | dict(setting.changes)
        normed = bool(changes.pop("reads_normed"))
        twin = MtpModel(replace(model.config, **changes), target, ids, dtype=model.dtype, reads_normed=normed)
    else:
        twin = Eagle3Model(replace(model.config, **setting.changes), target, ids, dtype=model.dtype)
    own = model.state_dict()
    needed = twin.state_dict()
    added = [name for name in needed if name not in own]
    assert all(name.startswith(("fc_norm.", "input_norm.")) for name in added), added
    twin.load_state_dict(
        {n: own[n] if n in own else torch.ones_like(t) for n, t in needed.items()}, assign=True
    )
    changed = copy.copy(drafter)  # not built anew: that would hash every weight
    changed.model = twin.eval()
    changed.info = replace(drafter.info, taps=twin.config.taps, settings=twin.config.settings())
    return changed


# ---- the settings


def possible_settings(model: Eagle3Model | MtpModel, target: TargetWeights) -> list[Setting]:
    """Return every departure worth trying on this checkpoint."""
    if isinstance(model, MtpModel):
        return [
            *_state_settings(model),
            *_vocabulary_settings(model),
            *_rope_settings(model.config, target),
        ]
    return [
        *_norm_settings(model.config),
        *_tap_settings(model.config, target),
        *_vocabulary_settings(model),
        *_rope_settings(model.config, target),
    ]


def _norm_settings(c: Eagle3Config) -> list[Setting]:
    other = "post" if c.feedback == "pre" else "pre"
    advice = f"set norm_output to {str(other == 'post').lower()} in config.json"
    feedback = Setting(name=f"feedback={other}", advice=advice, changes={"feedback": other})
    found = [feedback]
    forms = {"none": (False, False), "per_tap": (True, False), "joint": (False, True)}
    for name, (per_tap, joint) in forms.items():
        if not c.fc or name == c.input_norm:
            continue
        flags = {"norm_per_tap": per_tap, "norm_joint": joint}
        key = {"none": "fc_norm and norm_before_fc", "per_tap": "fc_norm", "joint": "norm_before_fc"}[name]
        advice_norm = (
            f"the drafter was trained without input norms: set {key} to false in config.json"
            if name == "none"
            else f"the drafter was trained with {key}: set it in config.json and export its weights again"
        )
        single = Setting(name=f"input_norm={name}", advice=advice_norm, changes=flags)
        both = f"{feedback.name}, {single.name}"
        found += [
            single,
            Setting(name=both, advice=f"{advice}; {advice_norm}", changes=flags | {"feedback": other}),
        ]
    value = not c.norm_before_residual
    name = f"norm_before_residual={str(value).lower()}"
    found.append(
        Setting(name=name, advice=f"write {name} into config.json", changes={"norm_before_residual": value})
    )
    return found


def _state_settings(model: MtpModel) -> list[Setting]:
    """Return other states of the target that an MTP head may have been trained on."""
    (last,) = model.config.taps
    found = []
    if model.final_norm is not None:
        advice = "the head was trained on the target's state before its final norm; train it behind that norm"
        found.append(Setting(name="final_norm=no", advice=advice, changes={"reads_normed": True}))
    advice = f"the head was trained on hidden state {last - 1}; engines give it the last one"
    found.append(Setting(name="taps-1", advice=advice, changes={"taps": (last - 1,)}))
    return found


def _tap_settings(c: Eagle3Config, target: TargetWeights) -> list[Setting]:
    found = []
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in c.taps)
        if taps[0] >= 0 and taps[-1] <= target.info.num_layers:
            advice = f"set eagle_aux_hidden_state_layer_ids to {list(taps)} in config.json"
            found.append(Setting(name=f"taps{shift:+d}", advice=advice, changes={"taps": taps}))
    return found


def _vocabulary_settings(model: Eagle3Model | MtpModel) -> list[Setting]:
    c, ids = model.config, model.target_ids
    if c.draft_vocab_size == c.vocab_size:
        return []
    counts = torch.arange(len(ids), device=ids.device)
    last = c.vocab_size - 1
    offsets = ids - counts
    maps = {
        "vocab_map=identity": (counts, "d2t should be all zeros: the draft vocabulary is the first tokens"),
        "vocab_map+1": ((ids + 1).clamp(max=last), "d2t is one too low throughout; export it again"),
        "vocab_map-1": ((ids - 1).clamp(min=0), "d2t is one too high throughout; export it again"),
        "vocab_map=d2t as ids": (offsets, "d2t holds target ids; it must hold target id - draft id"),
    }
    if c.head == "own":
        # a head made of the target's rows follows the map: the order of its entries is without effect
        entry = "d2t is shifted by one entry; export it again"
        maps |= {"vocab_map rolled +1": (ids.roll(1), entry), "vocab_map rolled -1": (ids.roll(-1), entry)}
    return [
        Setting(name=name, advice=advice, ids=other)
        for name, (other, advice) in maps.items()
        if not torch.equal(other, ids)
        and (name != "vocab_map=d2t as ids" or bool((offsets.diff() > 0).all()))
    ]


def _rope_settings(c: Eagle3Config | MtpConfig, target: TargetWeights) -> list[Setting]:
    own = dict(c.rope)
    ropes: dict[str, dict[str, Any]] = {}
    theirs = dict(target.info.rope_parameters) or {"rope_type": "default", "rope_theta": 10_000.0}
    if theirs.get("partial_rotary_factor") in (None, 1.0):
        ropes["rope=target's"] = theirs
    ropes |= {f"rope_theta={theta:.0f}": {**own, "rope_theta": theta} for theta in THETAS}
    if own.get("rope_type", "default") != "default":
        ropes["rope without scaling"] = {"rope_type": "default", "rope_theta": own["rope_theta"]}
    found: list[Setting] = []
    seen = [_rope_key(own)]
    for name, rope in ropes.items():
        if _rope_key(rope) in seen:
            continue
        seen.append(_rope_key(rope))
        advice = f"set rope_theta and rope_scaling in config.json to {_plain_rope(rope)}"
        found.append(Setting(name=name, advice=advice, changes={"rope": rope}))
    limit = target.info.max_positions
    if limit != c.max_positions and own.get("rope_type") in ("dynamic", "longrope", "yarn"):
        # these scalings stretch with the declared number of positions
        advice = f"set max_position_embeddings to {limit} in config.json"
        name = f"max_positions={limit}"
        found.append(Setting(name=name, advice=advice, changes={"max_positions": limit}))
    return found


def _rope_key(rope: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in _plain_rope(rope).items()))


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default"} | {k: v for k, v in rope.items() if v is not None}
    return {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in plain.items()}


def _in_words(c: Eagle3Config | MtpConfig) -> str:
    taps = ",".join(map(str, c.taps))
    if isinstance(c, MtpConfig):
        return f"feedback {c.feedback}, the target's state behind its final norm, taps {taps}"
    return f"feedback {c.feedback}, input norm {c.input_norm}, taps {taps}"


# ---- scoring


def _score(drafter: Eagle3Drafter, traces: Sequence[Trace], depth: int) -> list[PositionScores]:
    return drafter.score(traces, ScoreRequest(depth=depth))


def _reading(
    name: str, advice: str, traces: Sequence[Trace], scores: Sequence[PositionScores], depth: int
) -> Reading:
    rows = []
    for trace, one in zip(traces, scores, strict=True):
        rounds = walk_rounds(one, len(trace.answer_ids), depth)
        accepted = one.accepted
        rows.append(
            [
                len(accepted),
                int(accepted.sum()),
                int((accepted > 0).sum()),
                len(rounds),
                sum(r.num_accepted for r in rounds),
            ]
        )
    return Reading(name=name, advice=advice, sums=np.array(rows, np.float64))


def _settings_readings(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    traces: Sequence[Trace],
    declared: Sequence[PositionScores],
    depth: int,
    settings: Iterable[Setting],
) -> list[Reading]:
    readings = []
    for setting in settings:
        scores = _score(resettled(drafter, target, setting), traces, depth)
        if set(setting.changes) == {"feedback"}:
            # at fixed positions step 1 has nothing fed back yet
            assert all(
                torch.equal(a.accepted > 0, b.accepted > 0) for a, b in zip(scores, declared, strict=True)
            ), "step 1 depends on the feedback"
        readings.append(_reading(setting.name, setting.advice, traces, scores, depth))
    return readings


def _repairs(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    traces: Sequence[Trace],
    depth: int,
    first: Setting,
    draws: int,
    seed: int,
) -> list[Tried]:
    """Go on from the best setting: what else helps on top of it."""
    found: list[Tried] = []
    setting: Setting | None = first
    while setting is not None and len(found) < _MAX_REPAIRS:
        drafter = resettled(drafter, target, setting)
        settings = {s.name: s for s in possible_settings(drafter.model, target)}
        scores = _score(drafter, traces, depth)
        readings = [_reading(DECLARED, "", traces, scores, depth)]
        readings += _settings_readings(drafter, target, traces, scores, depth, settings.values())
        best = best_of(compare(readings, draws=draws, seed=seed))
        if best is not None:
            found.append(best)
        setting = settings[best.name] if best is not None else None
    return found


class _FirstTokens:
    """A probe that keeps the draft id proposed at step 1 of every start."""

    regions = None

    def __init__(self, model: Eagle3Model | MtpModel) -> None:
        self.model = model
        self.best = torch.empty(0, dtype=torch.int64)

    def on_step(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Take in a step."""
        if step == 1:
            self.best = self.model.logits(self.model.norm(tensors["residual"])).argmax(-1).cpu()


def _learned_reading(drafter: Eagle3Drafter, traces: Sequence[Trace]) -> Reading | None:
    """Score step 1 under a vocabulary map learned from the other half of the prompts.

    Whatever is wrong with d2t, a draft id then stands for the token that followed most often where it was proposed.
    """
    model = drafter.model
    if model.config.draft_vocab_size == model.config.vocab_size or len(traces) < 2:
        return None
    pairs = []
    for trace in traces:
        probe = _FirstTokens(model)
        drafter.score([trace], ScoreRequest(depth=1), probe=probe)
        answer = torch.tensor(trace.answer_ids)
        pairs.append((probe.best, answer[:-1], answer[1:]))
    rows, bigrams = [], 0
    for i, (best, newest, tokens) in enumerate(pairs):
        others = [pair for j, pair in enumerate(pairs) if j % 2 != i % 2]
        learned = _most_frequent(torch.cat([b for b, _, _ in others]), torch.cat([t for _, _, t in others]))
        ids = model.target_ids.cpu().clone()
        ids[torch.tensor(list(learned), dtype=torch.int64)] = torch.tensor(
            list(learned.values()), dtype=torch.int64
        )
        hits = int((ids[best] == tokens).sum())
        rows.append([len(tokens), hits, hits, len(tokens), hits])
        pairs_seen = _most_frequent(
            torch.cat([n for _, n, _ in others]), torch.cat([t for _, _, t in others])
        )
        bigrams += sum(pairs_seen.get(n) == t for n, t in zip(newest.tolist(), tokens.tolist(), strict=True))
    if sum(row[FIRST] for row in rows) < _LEARNED_OVER_BIGRAMS * bigrams:
        return None  # what was learned is the language, not the drafter
    advice = "the vocabulary map (d2t) does not belong to these weights; export both together again"
    return Reading(
        name="vocab_map learned from the answers",
        advice=advice,
        sums=np.array(rows, np.float64),
        first_only=True,
        learned=True,
    )


def _most_frequent(keys: Tensor, values: Tensor) -> dict[int, int]:
    """Return for every key the value that stands beside it most often."""
    both, counts = torch.unique(torch.stack([keys, values], dim=1), dim=0, return_counts=True)
    # ascending counts: the most frequent one is written last
    return dict(both[counts.argsort(stable=True)].tolist())


# ---- what needs no comparison


def _remarks(
    drafter: Eagle3Drafter, target: TargetWeights, traces: Sequence[Trace], scores: Sequence[PositionScores]
) -> list[Remark]:
    c = drafter.model.config
    found = []
    bad = sum(s.num_nonfinite for s in scores)
    if bad:
        found.append(Remark(text=f"its logits hold NaN or infinities at {bad} positions", serious=True))
    doubled = max(trace.prompt.bos_count for trace in traces)
    if doubled > 1:
        text = f"the clean prompts begin with {doubled} BOS tokens: template and tokenizer both add one"
        found.append(Remark(text=text, serious=True))
    if c.draft_vocab_size < c.vocab_size:
        identity = torch.arange(c.draft_vocab_size, device=drafter.model.target_ids.device)
        if torch.equal(drafter.model.target_ids, identity):
            text = (
                f"d2t is all zeros with {c.draft_vocab_size} of {c.vocab_size} tokens: it was never filled in"
            )
            found.append(Remark(text=text, serious=True))
    found += _position_remarks(c, target, traces, scores)
    return found


def _position_remarks(
    c: Eagle3Config | MtpConfig,
    target: TargetWeights,
    traces: Sequence[Trace],
    scores: Sequence[PositionScores],
) -> list[Remark]:
    limit, theirs = c.max_positions, target.info.max_positions
    reach = max(len(trace.ids) for trace in traces)
    if reach > limit:
        near, far = [], []
        for trace, one in zip(traces, scores, strict=True):
            inside = torch.arange(len(one.accepted)) + trace.prompt_length < limit
            near.append(one.accepted[inside])
            far.append(one.accepted[~inside])
        rates = [float((torch.cat(part) > 0).float().mean()) for part in (near, far) if sum(map(len, part))]
        words = " and ".join(f"{rate:.2f}" for rate in rates)
        text = (
            f"max_position_embeddings is {limit}, but these short prompts and answers reach {reach} positions (step-1 "
            f"rate inside and beyond: {words}): an engine would refuse or misplace them; the target has {theirs}"
        )
        return [Remark(text=text, serious=True)]
    if limit > theirs:
        text = f"max_position_embeddings is {limit}, more than the target's {theirs}"
        return [Remark(text=text, serious=False)]
    return []
