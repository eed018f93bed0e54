"""What a condition is, and the records that its stages hand on.

A prompt becomes a ``Draft`` (turns made of pieces), the messages stage edits the turns, the template stage
chooses how they are laid out (a Jinja template or raw text) and edits the resulting segments, the ids stage
says what happens to BOS. Rendering then makes the token ids, once.

Example: ``Turn(role="user", pieces=(Piece(text="Long document ...", kind="context"), Piece(text="Who?",
kind="user")))``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from specbench.types import ConditionInfo, Prompt, RenderedPrompt, SpanKind

if TYPE_CHECKING:
    from specbench.perturbations.rendering import ChatTokenizer

UNCHANGED = "unchanged:"
"""How the note begins that says a condition left this prompt's token ids as they were."""

BosRule = Literal["template", "target", "auto", "drop", "double"]
"""Who decides about BOS: the template's own text; as many as under the clean condition (a foreign
template); one if the tokenizer has a BOS; none; one more than under the clean condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a message that is of one kind."""

    text: str
    kind: SpanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message, in pieces whose concatenation is its content."""

    role: str
    pieces: tuple[Piece, ...]

    @property
    def content(self) -> str:
        """The message's text."""
        return self.pieces[0].text if len(self.pieces) == 1 else "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of rendered text, before tokenisation."""

    text: str
    kind: SpanKind
    part: str = ""
    """Finer than the kind: ``open``, ``user_head``, ``user_tail``, ``between``, ``generation``, ... ("" for
    content)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A Jinja chat template and where it comes from."""

    source: str
    name: str
    """For messages: a file's path, "the tokenizer's chat template", "llama3"."""


SegmentEdit = Callable[[tuple[Segment, ...], "Setting"], tuple[Segment, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt on its way to token ids."""

    turns: tuple[Turn, ...]
    template: Template | None
    """None: raw text, no template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the template beside the messages (``enable_thinking``, ``tools``, ...)."""
    generation: bool = True
    """Whether the header that asks for the answer is written."""
    edits: tuple[SegmentEdit, ...] = ()
    plain: bool = False
    """Special-token strings in the rendered text become ordinary text."""
    bos: BosRule = "template"
    notes: tuple[str, ...] = ()

    def note(self, text: str) -> Draft:
        """Return the same draft with one more note (once)."""
        return self if text in self.notes else replace(self, notes=(*self.notes, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a stage may look at."""

    prompt: Prompt
    turn: int
    chat: ChatTokenizer
    seed: int
    rest: tuple[Stage, ...] = ()
    """The stages that follow the one that looks."""


Stage = Callable[[Draft, Setting], Draft]


@runtime_checkable
class Condition(Protocol):
    """Everything done to a prompt before it becomes token ids."""

    @property
    def info(self) -> ConditionInfo:
        """Name, family, severity and what it does."""
        ...

    @property
    def same_ids(self) -> bool:
        """Whether the ids are the clean ones because the condition acts elsewhere (state noise)."""
        ...

    def available(self, chat: ChatTokenizer) -> str | None:
        """Return None, or the sentence why the condition makes no sense for this tokenizer and template."""
        ...

    def render(
        self, prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer, seed: int
    ) -> RenderedPrompt:
        """Return the token ids for one turn of a prompt.

        Args:
            prompt: the item.
            turn: which of its turns asks for an answer now, from 0.
            answers: the target's own texts for the turns before it, in order.
            chat: the target's tokenizer.
            seed: of the run; what is random depends on it, the prompt's id and the condition's id only.

        Raises:
            UserError: the template fails or drops the user's message, or the condition is not available.
        """
        ...
