"""Chat templates to token ids with spans: the only place where a chat template is applied.

The layout of a template (which text stands around the messages) is learned once per role sequence by
rendering unique placeholders; each prompt is then rendered for real, and the two must agree to the
character, or the contents are located in order. The text is tokenised once, without special tokens added;
BOS is decided by rule and counted.

Example:
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(path))
    ids, spans, bos = chat.tokenise((Segment(text="Hi", kind="user"),), bos="auto")
"""

from __future__ import annotations

import hashlib
import re
import traceback
from array import array
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from specbench.errors import UserError
from specbench.perturbations.condition import BosRule, Draft, Piece, Segment, Template, Turn
from specbench.types import Span, SpanKind

FIXED_DATE = "26 Jul 2024"
"""What a template that asks for today's date is told, so that ids do not depend on the day."""

JOIN = "\n\n"
"""Between the messages where no template is applied: earlier turns and answers are joined with blank
lines."""

_MARKUP: tuple[SpanKind, ...] = ("bos", "markup", "generation")
_MARKUP_LIKE = re.compile(r"[<\[|｜].*[>\]|｜]")
_CACHE_LIMIT = 200_000
_CACHE_CHARS = 40_000_000
_PROBES = ("Hi", " Hi", "\n\nHi there. 3x", "é好\t", "  ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a template writes around messages of given roles."""

    literals: tuple[str, ...]
    """Text before the first content, between contents, after the last: one more than ``order``."""
    order: tuple[int, ...]
    """Indices of the messages, in the order in which their contents appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMarkup:
    """The learned markup of a template, by role; empty where it cannot be told apart."""

    heads: Mapping[str, str]
    tails: Mapping[str, str]
    generation: str
    system_open: str | None
    """Text before a leading system message; None where the template takes none."""
    system_close: str
    default_system: str | None
    """The system text the template writes when none is given; None where it writes no system block."""


_T = TypeVar("_T")


class _Store(Generic[_T]):
    """A cache that is emptied when the text in it has grown large."""

    def __init__(self) -> None:
        self._values: dict[Any, _T] = {}
        self._num_chars = 0
        self.get = self._values.get

    def put(self, key: Any, value: _T, num_chars: int) -> None:
        """Keep ``value``, which stands for ``num_chars`` characters of text."""
        self._num_chars += num_chars
        if self._num_chars > _CACHE_CHARS:
            self._values.clear()
            self._num_chars = num_chars
        self._values[key] = value


class _Chunk:
    """Tokens of a stretch of text that is tokenised on its own."""

    __slots__ = ("ends", "ids", "starts")

    def __init__(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> None:
        starts, ends = zip(*offsets, strict=True) if offsets else ((), ())
        self.ids, self.starts, self.ends = (
            array("i", ids),
            array("i", starts),
            array("i", accumulate(ends, max)),
        )

    def start(self, index: int, exact: Container[int]) -> int:
        """First character of a token. Offsets may leave out the space it begins with; ``exact`` ids do not."""
        start: int = self.starts[index]
        return start if self.ids[index] in exact else min(start, self.ends[index - 1] if index else 0)


class Encoded:
    """Token ids of a text, with the character boundaries needed for spans."""

    def __init__(self, chunks: Sequence[tuple[int, _Chunk]], exact: Container[int]) -> None:
        self._chunks, self._exact = chunks, exact
        self._offsets = [offset for offset, _ in chunks]
        self._firsts = [0, *accumulate(len(chunk.ids) for _, chunk in chunks)]
        self.ids: tuple[int, ...] = tuple(chain.from_iterable(chunk.ids for _, chunk in chunks))

    def split(self, char: int) -> tuple[int, bool]:
        """Return how many tokens end at or before ``char``, and whether the next one starts before it."""
        if not self._chunks:
            return 0, False
        at = max(bisect_right(self._offsets, char) - 1, 0)
        offset, chunk = self._chunks[at]
        inside = bisect_right(chunk.ends, char - offset)
        if inside == len(chunk.ids):
            return self._firsts[at + 1], False
        return self._firsts[at] + inside, offset + chunk.start(inside, self._exact) < char


class ChatTokenizer:
    """A target's tokenizer with what rendering must know about it.

    Attributes:
        tokenizer: the transformers tokenizer (a fast one: offsets are needed).
        max_positions: the target's limit; None where nobody knows it.
        template: the chat template, None where there is none.
        template_hash: SHA-256 of its text, 16 hex digits; "" where there is none.
        bos_id, bos_token: None and "" where the tokenizer has no BOS.
        tokenizer_adds_bos: whether the tokenizer puts BOS before raw text by itself.
        clean_bos: number of leading BOS ids under the clean condition.
        bos_is_marker: BOS is the template's own turn marker (``<|im_start|>``), not a token of its own.
        system_role: "yes", "dropped" or "rejected", as the template treats a system message.
        stop_ids: ids that end an answer as far as tokenizer and template tell; a model's generation config
        may add more.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        template_file: Path | str | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Learn the template.

        Args:
            tokenizer: a transformers fast tokenizer.
            template: Jinja source used instead of the tokenizer's own.
            template_file: a file with it.
            max_positions: the target's limit, where it is known; conditions longer than it are not available.

        Raises:
            UserError: not a fast tokenizer, a file that cannot be read, a template that fails or drops the
                user's message.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{type(tokenizer).__name__} gives no character offsets; "
                "load the tokenizer as a fast one (use_fast=True)"
            )
        self.tokenizer = tokenizer
        self.max_positions = max_positions
        self.template = _find_template(tokenizer, template, template_file)
        self.template_hash = template_hash(self.template)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.bos_token: str = str(tokenizer.bos_token or "") if self.bos_id is not None else ""
        self._special_variables = dict(tokenizer.special_tokens_map)
        self._encoder = _Encoder(tokenizer.backend_tokenizer)
        self._layouts: dict[Any, Layout] = {}
        self._laid_out = _Store[tuple[Segment, ...]]()
        self._labels: dict[Any, tuple[list[list[Segment]], tuple[int, ...]]] = {}
        self._markup: dict[Template, TurnMarkup] = {}
        self._memory: dict[Any, Any] = {}
        probe = tokenizer("a")["input_ids"]
        self.tokenizer_adds_bos = self.bos_id is not None and probe[:1] == [self.bos_id]
        self.system_role = "yes" if self.template is None else self.system_role_of(self.template)
        self.clean_bos, self.bos_is_marker = self._probe_bos()
        self.stop_ids = self._find_stop_ids()

    # ---- text to ids

    def encode(self, text: str, plain: bool = False) -> tuple[int, ...]:
        """Return the ids of ``text`` with no special tokens added.

        Args:
            text: what to tokenise.
            plain: treat special-token strings as ordinary text.
        """
        return self._encoder.encode(text, plain).ids

    def count(self, text: str) -> int:
        """Return the length of ``text`` in tokens, no special tokens added."""
        return len(self._encoder.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included, spaces untouched."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def special_strings(self, text: str) -> tuple[str, ...]:
        """Return the distinct special-token strings that occur in ``text``, in order."""
        return self._encoder.find(text)

    def too_long(self, length: int) -> str | None:
        """Return why a prompt of ``length`` tokens does not fit the target; None where it does, or nobody
        knows.
        """
        if self.max_positions is None or length < self.max_positions:
            return None
        limit = f"the target's {self.max_positions:,} positions"
        return f"{length:,} prompt tokens leave no room for an answer in {limit}"

    def template_specials(self) -> tuple[str, ...]:
        """Return the special-token strings that the template writes around a user's message, BOS left out."""
        if self.template is None:
            return ()
        text = "".join(self.layout(self.template, ("user",)).literals)
        skip = "" if self.bos_is_marker else self.bos_token
        return tuple(name for name in self.special_strings(text) if name != skip)

    def tokenise(
        self, segments: Sequence[Segment], bos: BosRule = "template", plain: bool = False
    ) -> tuple[tuple[int, ...], tuple[Span, ...], int]:
        """Turn rendered segments into token ids, spans and the number of leading BOS ids.

        A token that straddles two segments goes to the content one (user text, context, ...) where the
        other is markup, else to the first.

        Args:
            segments: consecutive stretches of the rendered text.
            bos: who decides about BOS.
            plain: special-token strings become ordinary text.
        """
        text = "".join([segment.text for segment in segments])
        encoded = self._encoder.encode(text, plain, _cuts(segments))
        kinds = _token_kinds(segments, encoded)
        ids = encoded.ids
        leading = 0
        while leading < len(ids) and ids[leading] == self.bos_id:
            leading += 1
        # A BOS string that opens the user's own text is the user's: it counts, but nobody takes it away.
        content = next((start for kind, start in _starts(kinds) if kind not in _MARKUP), len(ids))
        users = max(leading - content, 0)
        wanted = self._wanted_bos(bos, leading, users)
        if wanted != leading:
            assert self.bos_id is not None, "a condition asked for a BOS the tokenizer does not have"
            ids = (self.bos_id,) * wanted + ids[leading:]
        return ids, _spans(wanted - users, kinds, leading - users, len(ids)), wanted

    def _wanted_bos(self, rule: BosRule, leading: int, users: int) -> int:
        if self.bos_id is None or rule == "template":
            return leading
        if rule == "drop" or (rule == "target" and not self.clean_bos):
            return users
        return leading + 1 if rule == "double" else max(leading, 1)

    # ---- messages to segments

    def lay_out(self, draft: Draft) -> tuple[Segment, ...]:
        """Return the rendered text of a draft as segments, before its edits.

        Raises:
            UserError: the template fails (file, line), or drops the user's message.
        """
        if draft.template is None:
            return _raw(draft.turns)
        key = (draft.template, draft.turns, draft.generation, _variables_key(draft.variables))
        segments = self._laid_out.get(key)
        if segments is None:
            segments = self._lay_out(draft, draft.template)
            self._laid_out.put(key, segments, sum(len(segment.text) for segment in segments))
        return segments

    def _lay_out(self, draft: Draft, template: Template) -> tuple[Segment, ...]:
        roles = tuple(turn.role for turn in draft.turns)
        text = self._render(
            template,
            [{"role": turn.role, "content": turn.content} for turn in draft.turns],
            draft.generation,
            draft.variables,
        )
        literals, order = self._labelled(template, roles, draft.generation, draft.variables)
        for turns in _trimmings(draft.turns):
            segments = _fill(literals, order, turns)
            if "".join([segment.text for segment in segments]) == text:
                return segments
        return _locate(draft, template, text, self.markup(template))

    def layout(
        self,
        template: Template,
        roles: tuple[str, ...],
        generation: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Layout:
        """Learn what ``template`` writes around messages of these roles (cached)."""
        variables = variables or {}
        key = (template, roles, generation, _variables_key(variables))
        if key not in self._layouts:
            marks = [f"Specbench{i}Placeholder{len(roles)}End" for i in range(len(roles))]
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            text = self._render(template, messages, generation, variables)
            places = sorted((text.find(mark), i) for i, mark in enumerate(marks) if mark in text)
            literals, position = [], 0
            for place, i in places:
                literals.append(text[position:place])
                position = place + len(marks[i])
            literals.append(text[position:])
            self._layouts[key] = Layout(literals=tuple(literals), order=tuple(i for _, i in places))
        return self._layouts[key]

    def _labelled(
        self, template: Template, roles: tuple[str, ...], generation: bool, variables: Mapping[str, Any]
    ) -> tuple[list[list[Segment]], tuple[int, ...]]:
        """Return the segments before, between and after the contents, and the order of the contents (cached)."""
        key = (template, roles, generation, _variables_key(variables))
        if key not in self._labels:
            layout, markup = self.layout(template, roles, generation, variables), self.markup(template)
            neighbours = [None, *(roles[i] for i in layout.order), None]
            self._labels[key] = (
                [
                    _label(literal, before, after, markup, generation)
                    for literal, before, after in zip(
                        layout.literals, neighbours, neighbours[1:], strict=False
                    )
                ],
                layout.order,
            )
        return self._labels[key]

    def markup(self, template: Template) -> TurnMarkup:
        """Learn the markup around each role (cached); what cannot be told apart is left empty."""
        if template not in self._markup:
            self._markup[template] = _learn_markup(template, self.layout)
        return self._markup[template]

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value stored under ``key``, made once; the store is emptied when it has grown large."""
        if key not in self._memory:
            if len(self._memory) >= _CACHE_LIMIT:
                self._memory.clear()
            self._memory[key] = make()
        return self._memory[key]

    def _render(
        self,
        template: Template,
        messages: list[dict[str, str]],
        generation: bool,
        variables: Mapping[str, Any],
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        settings = {**self._special_variables, "strftime_now": _fixed_date, **variables}
        try:
            rendered, _ = render_jinja_template(
                [messages], chat_template=template.source, add_generation_prompt=generation, **settings
            )
        except Exception as error:
            # Templates run arbitrary expressions: whatever they raise is the template's fault and must
            # carry its line.
            raise template_error(template, error) from error
        text: str = rendered[0]
        return text

    # ---- learning

    def system_role_of(self, template: Template) -> str:
        """Return how ``template`` treats a leading system message: "yes", "dropped" or "rejected".

        Raises:
            UserError: the template fails on a plain user message, or drops it.
        """
        user = self.layout(template, ("user",))
        if not user.order:
            raise UserError(f"{template.name} drops the user's message; it must write message['content']")
        try:
            both = self.layout(template, ("system", "user"))
        except UserError:
            return "rejected"
        return "yes" if 0 in both.order else "dropped"

    def _probe_bos(self) -> tuple[int, bool]:
        if self.bos_id is None:
            return 0, False
        if self.template is None:
            return 1, False
        layout = self.layout(self.template, ("user",))
        ids = self.encode(layout.literals[0] + "x")
        count = 0
        while count < len(ids) and ids[count] == self.bos_id:
            count += 1
        rest = layout.literals[0][len(self.bos_token) * count :] + "".join(layout.literals[1:])
        return count, count > 0 and self.bos_token in rest

    def _find_stop_ids(self) -> tuple[int, ...]:
        found = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        if self.template is not None:
            tail = self.markup(self.template).tails.get("assistant", "")
            names = self._encoder.find(tail)
            found += [i for name in names[:1] for i in self.encode(name) if i not in found]
        return tuple(found)


class _Encoder:
    """Tokenises text in pieces that do not influence each other, and caches them.

    Pieces end at special tokens, and where two segments meet at a seam that the pre-tokenizer splits anyway: a user's
    text is then tokenised once, whatever markup stands around it. Where a probe shows that pieces do influence each
    other (a prefix space that depends on the position), the text is tokenised whole.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        marks = {t.content: i for i, t in added.items() if t.special or _MARKUP_LIKE.fullmatch(t.content)}
        fixed = {token.content: i for i, token in added.items() if not token.normalized}
        self._exact = set(added)
        self._find = _alternation(marks)
        self._plain: Any = None
        self._fixed = {name: _Chunk((i,), ((0, len(name)),)) for name, i in fixed.items()}
        self._cache, self._plain_cache = _Store[_Chunk](), _Store[_Chunk]()
        self._safe: dict[tuple[str, str], bool] = {}
        # Added tokens that take spaces with them, or that are looked for after normalisation, reach over a cut.
        apart = not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        self._split = _alternation(fixed) if apart else None
        self._seams = apart and len(fixed) == len(added) and _splits_by_pattern(backend)
        if not self._independent(next(iter(fixed), "")):
            self._split, self._seams = None, False

    def find(self, text: str) -> tuple[str, ...]:
        """Return the distinct special-token strings in ``text``."""
        return tuple(dict.fromkeys(self._find.findall(text))) if self._find is not None else ()

    def encode(self, text: str, plain: bool = False, cuts: Sequence[int] = ()) -> Encoded:
        """Tokenise ``text``.

        Args:
            text: the whole text.
            plain: special-token strings are ordinary text.
            cuts: where segments meet, ascending; they only save work.
        """
        chunks: list[tuple[int, _Chunk]] = []
        position = 0
        if not plain and self._split is not None:
            for match in self._split.finditer(text):
                start, end = match.span()
                if start > position:
                    self._add(chunks, text, position, start, cuts, plain)
                chunks.append((start, self._fixed[match.group()]))
                position = end
        if position < len(text):
            self._add(chunks, text, position, len(text), cuts, plain)
        return Encoded(chunks, self._exact)

    def _add(
        self,
        chunks: list[tuple[int, _Chunk]],
        text: str,
        start: int,
        end: int,
        cuts: Sequence[int],
        plain: bool,
    ) -> None:
        """Append the pieces of ``text[start:end]``, which holds no special token."""
        if self._seams:
            for cut in cuts:
                if start < cut < end and self._is_seam(
                    text[max(cut - 4, start) : cut], text[cut : min(cut + 4, end)]
                ):
                    chunks.append((start, self._chunk(text[start:cut], plain)))
                    start = cut
        chunks.append((start, self._chunk(text[start:end], plain)))

    def _is_seam(self, left: str, right: str) -> bool:
        """Whether the pre-tokenizer splits between the two and neither side changes the other's pieces.

        Its patterns look at most three characters ahead (contractions, groups of digits) and never back, so four
        characters on each side decide.
        """
        safe = self._safe.get((left, right))
        if safe is None:
            pieces = [piece for piece, _ in self._backend.pre_tokenizer.pre_tokenize_str(left + right)]
            apart = [
                p for side in (left, right) for p, _ in self._backend.pre_tokenizer.pre_tokenize_str(side)
            ]
            # Unicode composition may join a letter and a mark after it, never anything with an ASCII sign after it.
            safe = self._safe[left, right] = pieces == apart and right[0].isascii()
        return safe

    def _chunk(self, text: str, plain: bool) -> _Chunk:
        cache = self._plain_cache if plain else self._cache
        chunk = cache.get(text)
        if chunk is None:
            chunk = self._encode(text, self._plain_backend() if plain else self._backend)
            cache.put(text, chunk, len(text))
        return chunk

    def _encode(self, text: str, backend: Any) -> _Chunk:
        encoding = backend.encode(text, add_special_tokens=False)
        return _Chunk(encoding.ids, encoding.offsets)

    def _plain_backend(self) -> Any:
        """The same tokenizer with no added tokens, so that none is found in text."""
        if self._plain is None:
            from tokenizers import Tokenizer

            self._plain = Tokenizer(self._backend.model)
            if self._backend.normalizer is not None:
                self._plain.normalizer = self._backend.normalizer
            if self._backend.pre_tokenizer is not None:
                self._plain.pre_tokenizer = self._backend.pre_tokenizer
        return self._plain

    def _independent(self, mark: str) -> bool:
        for probe in _PROBES:
            parts = (probe, mark, probe, mark, mark, probe, "user\n", probe, " [/X]", probe)
            whole = self._encode("".join(parts), self._backend)
            if tuple(whole.ids) != self.encode("".join(parts), cuts=list(accumulate(map(len, parts)))).ids:
                return False
        return True


def _splits_by_pattern(backend: Any) -> bool:
    """Whether a tokenizer is byte-pair encoding within pieces that local patterns cut out of unchanged text."""
    from tokenizers import models, normalizers, pre_tokenizers

    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    local = (pre_tokenizers.Split, pre_tokenizers.ByteLevel, pre_tokenizers.Digits)
    steps = (
        list(cast(Any, pre_tokenizer))
        if isinstance(pre_tokenizer, pre_tokenizers.Sequence)
        else [pre_tokenizer]
    )
    changes = list(cast(Any, normalizer)) if isinstance(normalizer, normalizers.Sequence) else [normalizer]
    return (
        isinstance(backend.model, models.BPE)
        and all(change is None or isinstance(change, normalizers.NFC) for change in changes)
        and all(isinstance(step, local) for step in steps)
    )


def template_hash(template: Template | None) -> str:
    """SHA-256 of a template's text, the first 16 hex digits; "" for None."""
    return "" if template is None else hashlib.sha256(template.source.encode()).hexdigest()[:16]


def template_error(template: Template, error: Exception) -> UserError:
    """Say which template failed, at which line, and why."""
    line = getattr(error, "lineno", None)
    if line is None:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
        line = lines[-1] if lines else None
    where = f", line {line}" if line is not None else ""
    return UserError(f"{template.name}{where}: {type(error).__name__}: {error}")


def _find_template(tokenizer: Any, source: str | None, file: Path | str | None) -> Template | None:
    if file is not None:
        try:
            return Template(source=Path(file).read_text(encoding="utf-8"), name=f"the template {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the template {file} cannot be read: {error}") from error
    if source is not None:
        return Template(source=source, name="the given chat template")
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return Template(source=tokenizer.get_chat_template(), name="the tokenizer's chat template")
    except ValueError as error:
        raise UserError(
            f"the tokenizer has several chat templates and no default one; give one: {error}"
        ) from error


def _variables_key(variables: Mapping[str, Any]) -> str:
    return repr(sorted(variables.items())) if variables else ""


def _fixed_date(pattern: str) -> str:
    from datetime import datetime

    return datetime(2024, 7, 26, 12, 0, 0).strftime(pattern)


def _alternation(names: Mapping[str, int]) -> re.Pattern[str] | None:
    longest_first = sorted((name for name in names if name), key=len, reverse=True)
    return re.compile("|".join(re.escape(name) for name in longest_first)) if longest_first else None


def _raw(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for i, turn in enumerate(turns):
        if i:
            segments.append(Segment(text=JOIN, kind="markup", part="between"))
        segments += [Segment(text=piece.text, kind=piece.kind) for piece in turn.pieces]
    return tuple(segments)


def _trimmings(turns: tuple[Turn, ...]) -> list[tuple[Turn, ...]]:
    """The ways in which templates are known to write contents: verbatim, or stripped."""
    if all((content := turn.content) == content.strip() for turn in turns):
        return [turns]
    return [turns, tuple(trim(turn) for turn in turns)]


def trim(turn: Turn) -> Turn:
    """Return the turn with white space at both ends of its content removed."""
    pieces = list(turn.pieces)
    while pieces and not (text := pieces[0].text.lstrip()):
        pieces.pop(0)
    if pieces:
        pieces[0] = replace(pieces[0], text=text)
    while pieces and not (text := pieces[-1].text.rstrip()):
        pieces.pop()
    if pieces:
        pieces[-1] = replace(pieces[-1], text=text)
    return replace(turn, pieces=tuple(pieces))


def _fill(
    literals: Sequence[Sequence[Segment]], order: Sequence[int], turns: Sequence[Turn]
) -> tuple[Segment, ...]:
    segments: list[Segment] = [*literals[0]]
    for index, literal in zip(order, literals[1:], strict=True):
        segments += [Segment(text=piece.text, kind=piece.kind) for piece in turns[index].pieces if piece.text]
        segments += literal
    return tuple(segments)


def _label(
    literal: str, before: str | None, after: str | None, markup: TurnMarkup, generation: bool
) -> list[Segment]:
    """Cut a literal into the tail of what stands before, the rest, and the head of what comes after."""
    tail = markup.tails.get(before or "", "")
    tail = tail if literal.startswith(tail) else ""
    rest = literal[len(tail) :]
    head, kind, part = "", "markup", f"{after}_head"
    if after is None and generation:
        head, kind, part = markup.generation, "generation", "generation"
    elif after == "system" and before is None:
        head = rest
    elif after is not None:
        head = markup.heads.get(after, "")
    head = head if rest.endswith(head) else ""
    rest = rest[: len(rest) - len(head)]
    segments = [Segment(text=tail, kind="markup", part=f"{before}_tail")]
    block = (markup.system_open or "") + (markup.default_system or "") + markup.system_close
    if before is None and after != "system" and markup.default_system is not None and rest == block:
        segments += [
            Segment(text=markup.system_open or "", kind="markup", part="default_open"),
            Segment(text=markup.default_system, kind="system", part="default_system"),
            Segment(text=markup.system_close, kind="markup", part="default_close"),
        ]
    else:
        segments.append(Segment(text=rest, kind="markup", part="open" if before is None else "between"))
    segments.append(Segment(text=head, kind=kind, part=part))  # type: ignore[arg-type]
    return [segment for segment in segments if segment.text]


def _locate(draft: Draft, template: Template, text: str, markup: TurnMarkup) -> tuple[Segment, ...]:
    """Find the contents in order, for templates that change contents or depend on them."""
    segments: list[Segment] = []
    position, before = 0, None
    for turn in draft.turns:
        found = next((t for t in _variants(turn) if t.content and text.find(t.content, position) >= 0), None)
        if found is None:
            if turn.role == "user" and turn.content.strip():
                raise UserError(
                    f"{template.name} drops or changes the user's message; it must write it verbatim"
                )
            continue
        place = text.find(found.content, position)
        segments += _label(text[position:place], before, turn.role, markup, False)
        segments += [Segment(text=piece.text, kind=piece.kind) for piece in found.pieces]
        position, before = place + len(found.content), turn.role
    segments += _label(text[position:], before, None, markup, draft.generation)
    return tuple(segments)


def _variants(turn: Turn) -> list[Turn]:
    """A content as templates may have written it: verbatim, stripped, or without the thoughts before
    ``</think>``.
    """
    variants = [turn, trim(turn)]
    thoughts, mark, answer = turn.content.rpartition("</think>")
    if turn.role == "assistant" and mark:
        variants.append(trim(Turn(role=turn.role, pieces=(Piece(text=answer, kind="assistant"),))))
    return variants


def _learn_markup(template: Template, layout: Callable[..., Layout]) -> TurnMarkup:
    def literals(*roles: str, generation: bool = False) -> tuple[str, ...]:
        try:
            found = layout(template, roles, generation)
        except UserError:
            return ()
        return found.literals if found.order == tuple(range(len(roles))) else ()

    user, asks = literals("user"), literals("user", generation=True)
    answered, dialogue = literals("user", "assistant"), literals("user", "assistant", "user")
    given = literals("system", "user")
    generation = asks[1][len(user[1]) :] if user and asks and asks[1].startswith(user[1]) else ""
    tails = {"user": user[1] if user else "", "assistant": answered[2] if answered else ""}
    heads: dict[str, str] = {}
    if answered and answered[1].startswith(tails["user"]):
        heads["assistant"] = answered[1][len(tails["user"]) :]
    if dialogue and dialogue[2].startswith(tails["assistant"]):
        heads["user"] = dialogue[2][len(tails["assistant"]) :]
    head = heads.get("user", "")
    close, default = "", None
    if given:
        close = given[1][: len(given[1]) - len(head)] if given[1].endswith(head) else given[1]
        tails["system"] = close
        alone = user[0] if user else ""
        inside = alone[len(given[0]) : len(alone) - len(close + head)]
        if close and alone == given[0] + inside + close + head:
            default = inside
    return TurnMarkup(
        heads=heads,
        tails=tails,
        generation=generation,
        system_open=given[0] if given else None,
        system_close=close,
        default_system=default,
    )


def _cuts(segments: Sequence[Segment]) -> list[int]:
    """Return where segments meet, and the last space of contents: their last word may grow into the markup."""
    cuts: list[int] = []
    position = 0
    for segment in segments:
        space = segment.text.rfind(" ") if segment.kind not in _MARKUP else 0
        if space > 0:
            cuts.append(position + space)
        position += len(segment.text)
        cuts.append(position)
    return cuts


def _token_kinds(segments: Sequence[Segment], encoded: Encoded) -> list[tuple[SpanKind, int]]:
    """Return (kind, index of the first token after it) for each segment, in order."""
    kinds: list[tuple[SpanKind, int]] = []
    position, previous = 0, 0
    for at, segment in enumerate(segments):
        position += len(segment.text)
        if at + 1 == len(segments):
            end = len(encoded.ids)
        else:
            end, straddles = encoded.split(position)
            if straddles and (segment.kind not in _MARKUP or segments[at + 1].kind in _MARKUP):
                end += 1
        end = max(end, previous)
        kinds.append((segment.kind, end))
        previous = end
    return kinds


def _starts(kinds: Sequence[tuple[SpanKind, int]]) -> Iterator[tuple[SpanKind, int]]:
    """Return (kind, index of its first token) for each segment that has tokens."""
    start = 0
    for kind, end in kinds:
        if end > start:
            yield kind, start
        start = end


def _spans(
    num_bos: int, kinds: Sequence[tuple[SpanKind, int]], leading: int, length: int
) -> tuple[Span, ...]:
    """Merge neighbours of one kind.

    Args:
        num_bos: BOS ids that open the prompt now.
        kinds: (kind, end) of the segments, as they were tokenised, with ``leading`` BOS ids of the markup.
        leading: how many tokens ``num_bos`` took the place of.
        length: of the prompt now.
    """
    spans: list[Span] = []
    start = 0
    for kind, end in (("bos", leading), *kinds):
        moved = max(end - leading + num_bos, start)
        if moved > start:
            if spans and spans[-1].kind == kind:
                spans[-1] = Span(kind=kind, start=spans[-1].start, end=moved)
            else:
                spans.append(Span(kind=kind, start=start, end=moved))
            start = moved
    assert start == length, "spans must cover every token"
    return tuple(spans)
