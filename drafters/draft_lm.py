"""A small causal language model as the drafter: ``draft-lm=PATH``, any architecture transformers can load.

Offline it takes one causal pass over each answer: the draft at a position, given the target's own words so
far, is accepted iff it is the target's next word, so a round's accepted count is the length of a run of
matches.

Example:
    drafter = create("HuggingFaceTB/SmolLM2-135M-Instruct", {}, target)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.drafters.resolve import check_options
from specbench.errors import UserError
from specbench.types import (
    DrafterInfo,
    PositionScores,
    Proposal,
    RenderedPrompt,
    ScoreRequest,
    TargetWeights,
    Trace,
)

BATCH_TOKENS = 2048
"""Tokens of one padded batch; a longer answer goes alone."""
LOGIT_BYTES = 256 * 2**20
"""Bound on one batch's logits."""


class DraftLM:
    """Implements ``Drafter`` around a transformers causal LM in evaluation mode."""

    def __init__(self, model: Any, name: str, fingerprint: str) -> None:
        """Wrap ``model``, on the device where it is to run.

        Args:
            model: a ``PreTrainedModel`` with a language-model head.
            name: shown in the rows.
            fingerprint: of configuration and weights.
        """
        self.model = model
        self.info = DrafterInfo(
            name=name,
            kind="draft-lm",
            fingerprint=fingerprint,
            num_parameters=sum(p.numel() for p in model.parameters()),
            max_positions=getattr(model.config, "max_position_embeddings", None),
            settings={"architecture": type(model).__name__},
        )

    def session(self, prompt: RenderedPrompt | None = None) -> DraftLMSession:
        """Start following one answer."""
        return DraftLMSession(self.model)

    @torch.inference_mode()
    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        """Score every round start of every trace.

        Raises:
            UserError: rejection sampling is asked of a greedy trace.
        """
        results: dict[int, PositionScores] = {}
        for group in self._groups(traces):
            batch = [traces[i] for i in group]
            for i, (hits, alpha, bad) in zip(group, self._read(batch, request), strict=True):
                results[i] = _scores(hits, alpha, bad, request)
        return [results[i] for i in range(len(traces))]

    def _groups(self, traces: Sequence[Trace]) -> Iterator[list[int]]:
        """Yield indices of traces of like length, so that a padded batch wastes little."""
        order = sorted(range(len(traces)), key=lambda i: len(traces[i].ids))
        logit_rows = LOGIT_BYTES // (4 * self.model.config.vocab_size)
        group: list[int] = []
        rows = 0
        for i in order:
            answer, tokens = len(traces[i].answer_ids), len(traces[i].ids)
            if group and ((len(group) + 1) * tokens > BATCH_TOKENS or rows + answer > logit_rows):
                yield group
                group, rows = [], 0
            group.append(i)
            rows += answer
        if group:
            yield group

    def _read(
        self, traces: Sequence[Trace], request: ScoreRequest
    ) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Return, per trace and for answer tokens 1..A-1: hits, alpha (rejection only), non-finite logits."""
        device = self.model.device
        width = max(len(t.ids) for t in traces) - 1
        padded = torch.zeros((len(traces), width), dtype=torch.int64)
        where, labels, sizes = [], [], []
        for i, trace in enumerate(traces):
            padded[i, : len(trace.ids) - 1] = torch.tensor(trace.ids[:-1])
            # padding sits on the right, where no answer token's causal view reaches
            where.append(i * width + torch.arange(trace.prompt_length, len(trace.ids) - 1))
            labels.append(torch.tensor(trace.answer_ids[1:], dtype=torch.int64))
            sizes.append(max(0, len(trace.answer_ids) - 1))
        if not sum(sizes):
            empty = torch.zeros(0, dtype=torch.bool)
            alpha = torch.zeros(0, dtype=torch.float64) if request.sampler == "rejection" else None
            return [(empty, alpha, empty) for _ in traces]
        logits = _logits_at(self.model, padded.to(device), torch.cat(where).to(device))
        truth = torch.cat(labels).to(device)
        top, best = logits.max(dim=-1)
        hits = torch.split((best == truth).cpu(), sizes)
        bad = torch.split(~top.isfinite().cpu(), sizes)
        alphas: Sequence[Tensor | None] = [None] * len(traces)
        if request.sampler == "rejection":
            alphas = torch.split(_alphas(logits, truth, traces), sizes)
        return list(zip(hits, alphas, bad, strict=True))


class DraftLMSession:
    """Implements ``DraftSession``; keys of tokens that were not taken are cut off the cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.fed: list[int] = []
        self.cache: Any = None

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """Take in committed tokens; taps are ignored."""
        self.tokens += [int(i) for i in token_ids]

    @torch.inference_mode()
    def propose(
        self, depth: int, generator: torch.Generator | None = None, temperature: float = 0.0
    ) -> Proposal:
        """Draft ``depth`` tokens; see ``DraftSession``."""
        self._roll_back()
        tokens: list[int] = []
        laws: list[Tensor] = []
        feed = self.tokens[len(self.fed) :]
        for _ in range(depth):
            logits = self._feed(feed)
            if generator is None or temperature == 0.0:
                tokens.append(int(logits.argmax()))
            else:
                law = torch.softmax(logits.float() / temperature, dim=-1)
                tokens.append(int(torch.multinomial(law.to(generator.device), 1, generator=generator)))
                laws.append(law)
            feed = tokens[-1:]
        return Proposal(tokens=tokens, probs=torch.stack(laws) if laws else None)

    def _feed(self, tokens: Sequence[int]) -> Tensor:
        """Run the model over ``tokens`` and return the last logits [V]."""
        if self.cache is None:
            from transformers import DynamicCache

            self.cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(tokens)], device=self.model.device)
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.fed += tokens
        logits: Tensor = out.logits[0, -1]
        return logits

    def _roll_back(self) -> None:
        """Keep the cached prefix that is still true, and leave at least the newest token to be fed."""
        same = 0
        while same < min(len(self.fed), len(self.tokens) - 1) and self.fed[same] == self.tokens[same]:
            same += 1
        if same == len(self.fed):
            return
        # a recurrent or sliding state cannot be wound back; start afresh
        if self.cache is not None and _can_crop(self.cache):
            self.cache.crop(same - len(self.fed))
            self.fed = self.fed[:same]
        else:
            self.cache, self.fed = None, []


def _can_crop(cache: Any) -> bool:
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _scores(hits: Tensor, alpha: Tensor | None, bad: Tensor, request: ScoreRequest) -> PositionScores:
    """Lay out per-token results [A-1] by round start and step."""
    n, k = hits.shape[0], request.depth
    # index[s, i-1] = s + i - 1 among the answer's tokens 1..A-1
    index = torch.arange(n)[:, None] + torch.arange(k)
    inside = index < n
    index = index.clamp(max=max(0, n - 1))
    table = torch.zeros((0, k), dtype=torch.bool) if n == 0 else hits[index] & inside
    forced = torch.where(inside, table.to(torch.int8), -1).to(torch.int8) if request.full_chains else None
    steps = None
    if alpha is not None:
        steps = torch.where(inside, alpha[index], 0.0) if n else torch.zeros((0, k), dtype=torch.float64)
    return PositionScores(
        depth=k,
        accepted=table.to(torch.int64).cumprod(dim=1).sum(dim=1),
        drafted=torch.full((n,), k, dtype=torch.int64),
        alpha=steps,
        forced=forced,
        num_nonfinite=int(bad.sum()),
    )


def _alphas(logits: Tensor, truth: Tensor, traces: Sequence[Trace]) -> Tensor:
    """Return min(1, q(x) / p(x)) [sum of A-1] for each answer token x but the first."""
    for trace in traces:
        if trace.sampling.greedy:
            raise UserError(
                f"rejection sampling needs sampled answers, but {trace.prompt.prompt_id!r} was traced at "
                "temperature 0; trace at a temperature above 0 or use the greedy sampler"
            )
    heat = [torch.full((max(0, len(t.answer_ids) - 1),), t.sampling.temperature) for t in traces]
    heated = logits.double() / torch.cat(heat).to(logits.device)[:, None]
    log_q = heated.gather(-1, truth[:, None]).squeeze(-1) - heated.logsumexp(-1)
    log_p = torch.cat([t.logprobs[1:].double().cpu() for t in traces])
    return (log_q.cpu() - log_p).exp().clamp(max=1.0)


def _logits_at(model: Any, ids: Tensor, where: Tensor) -> Tensor:
    """Return logits [len(where), V] at flat positions ``where`` of ``ids`` [B, T].

    The head runs at those positions only; whatever the model does behind its head (scaling, soft caps) still
    applies.
    """
    picked = False

    def pick(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal picked
        picked = True
        return (args[0].flatten(0, 1)[where][None], *args[1:])

    with _hooked(model.get_output_embeddings(), pick):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0] if picked else logits.flatten(0, 1)[where]


@contextmanager
def _hooked(module: Any, hook: Any) -> Iterator[None]:
    handle = None if module is None else module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> DraftLM:
    """Load the model behind ``draft-lm=PATH``, in the target's precision and on its device.

    Raises:
        UserError: no path, it does not load, weights are missing, or its vocabulary is not the target's.
    """
    if not argument:
        raise UserError("draft-lm needs a model: draft-lm=PATH")
    check_options("draft-lm", options, ())
    from transformers import AutoModelForCausalLM

    from specbench.drafters.modules import weights_fingerprint

    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            argument,
            dtype=target.embed.dtype,
            local_files_only=Path(argument).exists(),
            output_loading_info=True,
        )
    except Exception as error:  # readers of weights and models raise types of their own
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"draft-lm={argument} does not load as a causal language model: {first}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        # transformers fills them with random numbers
        raise UserError(
            f"draft-lm={argument} lacks {len(missing)} of its weights, {missing[0]} among them; is it a draft head, "
            "to be given as eagle3=PATH?"
        )
    _check_vocabulary(argument, model.config.get_text_config().vocab_size, target)
    model.to(target.embed.device).eval()
    config = model.config.to_json_string(use_diff=True)
    return DraftLM(model, f"draft-lm={argument}", weights_fingerprint(config, model.state_dict()))


def _check_vocabulary(argument: str, size: int, target: TargetWeights) -> None:
    if size != target.info.vocab_size:
        raise UserError(
            f"draft-lm={argument} has a vocabulary of {size} tokens, the target {target.info.name} one of "
            f"{target.info.vocab_size}; a draft LM must share the target's tokenizer"
        )
    if target.path is None:
        return
    ours, theirs = _token_table(Path(argument)), _token_table(target.path)
    if ours is not None and theirs is not None and ours != theirs:
        odd = min((i, t) for t, i in ours.items() ^ theirs.items())
        raise UserError(
            f"draft-lm={argument} has another tokenizer than the target {target.info.name}: they differ at "
            "token "
            f"{odd[0]} ({odd[1]!r}); a draft LM must share the target's tokenizer"
        )


def _token_table(directory: Path) -> dict[str, int] | None:
    """Return token -> id of a ``tokenizer.json``, where there is one with a plain table."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    vocab = json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")
    return vocab if isinstance(vocab, dict) else None
