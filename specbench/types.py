"""The records that flow through specbench; every folder imports these and none of its siblings.

suite -> Prompt -> Condition -> RenderedPrompt -> target -> Trace -> drafter.score -> PositionScores -> Round rows

Example:
    Prompt(id="mtbench/81", suite="mtbench", category="writing", turns=("Compose a ...", "Rewrite ..."))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["system", "user", "assistant"]
SpanKind = Literal["bos", "system", "markup", "user", "assistant", "context", "generation"]
AnswerPath = Literal["free", "forced"]
Sampler = Literal["greedy", "match", "rejection"]
PromptKey = tuple[str, int, str]
"""(prompt id, turn, condition id): names one target answer within a run, but for the answer path."""

CLEAN = "template/regular"
"""The condition every retention is measured against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a dialogue, before any template."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One item of a suite, before any condition or template."""

    id: str
    """Unique and stable: ``suite/name``."""
    suite: str
    category: str
    turns: tuple[str, ...]
    """User texts. Turn i+1 follows the target's own answer to turn i."""
    system: str | None = None
    """A system prompt that belongs to the task itself; most suites have none."""
    history: tuple[Message, ...] = ()
    """Finished dialogue before the first turn (files with ``messages``, long dialogues)."""
    context: str | None = None
    """The part of ``turns[0]`` that is context and not question, verbatim (long-context tasks); spans name it."""
    reference: str | None = None
    """The published answer, where there is one; used for scoring only."""
    max_new_tokens: int | None = None
    """Overrides the run's limit where the task needs another."""
    prefill: str = ""
    """Text that the answer to the last turn begins with: the assistant's own, given and not generated."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer: the token that completes one is the answer's last."""
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteInfo:
    """What a suite is and where its data comes from."""

    name: str
    description: str
    licence: str = ""
    citation: str = ""
    files: tuple[str, ...] = ()
    """Names looked for in the data directory, in order."""
    hub: str | None = None
    """Hugging Face data set, with a pinned ``revision``."""
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    """What a run asks of a suite."""

    data_dir: Path | None = None
    limit: int | None = None
    """At most this many prompts: the first ones, except that suites with categories take them in turn."""
    seed: int = 0
    lengths: tuple[int, ...] = (512, 2048)
    """Prompt lengths in target tokens, for suites that generate text to length."""
    text_file: Path | None = None
    """Filler text for the long-context suite."""
    count_tokens: Callable[[Prompt], int] | None = None
    """Length in target tokens of the prompt rendered under the clean condition. None: no target at hand."""
    num_fewshot: int | None = None
    """Solved examples before each question, for suites that have them. None: the task's own number."""


@runtime_checkable
class Suite(Protocol):
    """A set of prompts. ``registry.load("suites", name)`` returns one."""

    @property
    def info(self) -> SuiteInfo:
        """Name, source, licence."""
        ...

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return the prompts.

        Raises:
            UserError: a file is missing or malformed (file, line, what was expected).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Token positions ``start <= p < end`` of one kind."""

    kind: SpanKind
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionInfo:
    """What a condition does, for people and for the result rows."""

    id: str
    """``family/name``; composed conditions join theirs with ``+``."""
    family: str
    severity: int
    """0 = clean, 1 = seen daily, 2 = a common mistake, 3 = stress."""
    description: str
    reason: str = ""
    """Why it happens in practice."""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt under a condition, as the token ids every engine receives."""

    prompt_id: str
    suite: str
    category: str
    turn: int
    condition: ConditionInfo
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    """Sorted, disjoint, and together they cover every position."""
    bos_count: int
    template_hash: str
    """Of the template text that was used; "" where none was."""
    notes: tuple[str, ...] = ()
    """Declared fallbacks that applied ("the template has no system role: ..."). Never empty words."""
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    """Texts that end the answer, beside the target's stop tokens."""

    @property
    def ids_hash(self) -> str:
        """SHA-256 of the token ids (little-endian int64), the first 16 hex digits."""
        data = b"".join(i.to_bytes(8, "little", signed=True) for i in self.token_ids)
        return hashlib.sha256(data).hexdigest()[:16]

    @property
    def key(self) -> PromptKey:
        """What names this prompt's answer within a run."""
        return (self.prompt_id, self.turn, self.condition.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The target's sampling law. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the target takes its most probable token."""
        return self.temperature == 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    """One target answer, with everything a drafter needs to be scored on it.

    With P prompt tokens, A answer tokens and N = P + A: position p holds token ``ids[p]``; ``taps[i][p]`` is
    ``hidden_states[i]`` at position p, for p in 0 .. N-2 (the last token was never fed to the target).
    """

    prompt: RenderedPrompt
    answer_ids: tuple[int, ...]
    taps: dict[int, Tensor]
    """tap index -> [N-1, H_target]."""
    logprobs: Tensor
    """[A] log-probability of each answer token under the law it was drawn from (greedy: temperature 1)."""
    margins: Tensor
    """[A] each answer token's own logit minus the best other one, where it was chosen: top-1 minus top-2 for a
    greedy answer; negative marks a token the target would not have taken (forced or sampled answers)."""
    entropies: Tensor
    """[A] entropy in nats of the target's distribution at temperature 1."""
    finish: Literal["stop", "length"]
    """"stop": the last answer token is a stop token, or completes a stop string, and the user receives it;
    "length": cut by the limit."""
    sampling: Sampling = field(default_factory=Sampling)
    path: AnswerPath = "free"

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer tokens, length N."""
        return self.prompt.token_ids + self.answer_ids

    @property
    def prompt_length(self) -> int:
        """P."""
        return len(self.prompt.token_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class PositionScores:
    """How a drafter fares at every round start of one trace.

    Row s (0 <= s <= A-2) is the round that starts with ``answer_ids[s]`` as the newest known token, so its step i
    (1..k) is compared with ``answer_ids[s+i]``. Tokens past the answer's end do not exist: step i is in range iff
    s + i <= A-1.
    """

    depth: int
    accepted: Tensor
    """[A-1] int64: leading accepted draft tokens, at most min(k, A-1-s). Greedy and sample-and-match."""
    drafted: Tensor
    """[A-1] int64: draft tokens proposed, 0..k; k for every drafter that always proposes."""
    alpha: Tensor | None = None
    """[A-1, k] float64: probability that step i is accepted given that the steps before it were, for rejection
    sampling: min(1, q(x)/p(x)); 0 where out of range."""
    forced: Tensor | None = None
    """[A-1, k] int8: whether step i's own proposal equals the target's token in a chain fed with the target's
    tokens, whatever the earlier steps did; -1 where out of range. Only where full chains were asked for."""
    num_nonfinite: int = 0
    """Positions whose logits held a NaN or an infinity where there should be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What the replay asks of a drafter."""

    depth: int
    sampler: Sampler = "greedy"
    full_chains: bool = False
    """Compute every chain to its full depth and fill ``forced`` (default: a chain that missed is dropped)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a drafter may know of its target."""

    name: str
    fingerprint: str
    """SHA-256 over configuration and weights, the first 16 hex digits."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    dtype: str
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class TargetWeights:
    """The target's tensors that drafters share, and its facts."""

    info: TargetInfo
    embed: Tensor
    """[V, H]"""
    head: Tensor
    """[V, H]; the same tensor as ``embed`` where the target ties them."""
    norm: Tensor | None = None
    """[H] final norm weight."""
    path: Path | None = None
    """Directory of the target's files, where they are on disk (MTP heads live there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """What a drafter is, for the rows, the plan and the checks."""

    name: str
    """As the user wrote it; unique within a run."""
    kind: str
    """``ngram``, ``draft-lm``, ``eagle3``, ``mtp``, ``dflash``, ..."""
    fingerprint: str
    """SHA-256 over configuration and weights, the first 16 hex digits."""
    taps: tuple[int, ...] = ()
    """``hidden_states`` indices it needs from the target."""
    num_parameters: int = 0
    max_positions: int | None = None
    trained_depth: int | None = None
    max_depth: int | None = None
    """Block drafters cannot propose more than this."""
    reads_states: bool = False
    """Whether it reads the target's hidden states; then ``score`` takes ``perturb`` and ``probe``."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The switches, spelled out (feedback, input_norm, gate, window, ...)."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Proposal:
    """Draft tokens of one round, online."""

    tokens: list[int]
    probs: Tensor | None = None
    """[len(tokens), V] the law each token was drawn from; None for one-hot drafts."""


class DraftSession(Protocol):
    """A drafter following one answer, online."""

    def observe(self, token_ids: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """Take in newly committed tokens and the taps of newly verified positions.

        After the prefill the caller passes the P prompt tokens and the first answer token with the taps of
        positions 0..P-1; after each round the a+1 new tokens with the taps of the a+1 positions verified since.

        Args:
            token_ids: new committed tokens, in order.
            taps: tap index -> [m, H], states of the next m positions.
        """
        ...

    def propose(self, depth: int, generator: Any = None, temperature: float = 0.0) -> Proposal:
        """Draft up to ``depth`` tokens after the last committed one.

        Args:
            depth: k.
            generator: torch.Generator for drafters that sample; None: greedy one-hot drafts.
            temperature: of the draft law where sampled.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens; scored offline on traces, or followed online in a session."""

    @property
    def info(self) -> DrafterInfo:
        """What it is and what it needs of the target."""
        ...

    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        """Score every round start of every trace; one result per trace, same order."""
        ...

    def session(self, prompt: RenderedPrompt | None = None) -> DraftSession:
        """Start following one answer; the prompt tells drafters with sinks where its regions are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One draft + verify cycle of one answer.

    Invariant: 1 (the token the prefill gives) + sum of ``num_emitted`` over an answer's rounds == its length.
    """

    index: int
    start: int
    """s: index within the answer of the newest known token when the round starts."""
    num_drafted: int
    num_accepted: int
    """a: draft tokens the user receives."""
    num_emitted: int
    """a + 1, or a where the answer ended inside the accepted tokens."""
    cut: bool
    """The answer's end limited the round: fewer than k tokens were left to accept."""
    weight: float = 1.0
    """1 for a round that happened; the probability of (start, a) in an expectation over rejection sampling."""
    engine_accepted: int | None = None
    """The engine's own count, tokens after the end included."""
    draft_ms: float | None = None
    verify_ms: float | None = None
