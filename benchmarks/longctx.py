"""Long prompts made to measure: a needle, a question over several documents, a long dialogue.

Every question is asked at every length with the same wording and the same filler from its start, so that
lengths can be paired. Lengths are exact, in tokens of the target, of the prompt as rendered under the clean
condition.

Example: ``longctx/needle-3@4096`` is a text of invented sentences with one access code in it, and the
question for that code, 4,096 tokens in all; ``meta`` holds ``task``, ``question`` (needle-3), ``length``
and ``depth``.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specbench.benchmarks.filler import Excerpt, Filler, Generated, person, sentences_of_file, town
from specbench.errors import SpecbenchWarning, UserError
from specbench.types import Message, Prompt, SuiteInfo, SuiteRequest

QUESTIONS_PER_TASK = 4
"""Asked at every length where no limit says otherwise."""

_DEPTHS = (0.5, 0.1, 0.9, 0.3, 0.7)
"""Where the answer stands, as a fraction of the context; questions take them in turn."""

_PARAGRAPH = 6
_DOCUMENT = 12
_TAIL_WORDS = 400
_PADS = (" so", " too", " a", " I", "!", "?", ";", "-", "~", "s")
"""Tried in this order for the last tokens: words that are one token nearly everywhere, then single signs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What one rendering of a question consists of."""

    turn: str
    context: str | None = None
    history: tuple[Message, ...] = ()


class _Question(Protocol):
    """A question whose context can be made longer sentence by sentence."""

    @property
    def answer(self) -> str: ...

    def parts(self, num_sentences: int, tail: str) -> _Parts:
        """Lay out the question.

        Args:
            num_sentences: filler sentences to use.
            tail: text to put straight after the last of the context, "" or starting with a space.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needle:
    """One sentence with a code somewhere in plain text."""

    filler: Filler
    depth: float
    place: str
    answer: str

    def parts(self, num_sentences: int, tail: str) -> _Parts:
        sentences = [self.filler.sentence(i) for i in range(num_sentences)]
        sentences.insert(
            round(self.depth * num_sentences),
            f"The access code for the archive at {self.place} is {self.answer}.",
        )
        paragraphs = [" ".join(sentences[i : i + _PARAGRAPH]) for i in range(0, len(sentences), _PARAGRAPH)]
        context = "\n\n".join(paragraphs) + tail
        return _Parts(
            turn=(
                f"Read the text below, then answer the question that follows it.\n\n{context}\n\n"
                f"Question: What is the access code for the archive at {self.place}? Give the code, then say "
                f"in a few sentences what the text around it is about."
            ),
            context=context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MultiDocument:
    """Two documents that must both be read, among others of the same kind."""

    filler: Filler
    depth: float
    towns: Callable[[int], str]
    keepers: Callable[[int], tuple[str, int]]
    """Document number -> (keeper, year); 0 and 1 are the two that matter."""

    @property
    def answer(self) -> str:
        (first, year_1), (second, year_2) = self.keepers(0), self.keepers(1)
        return first if year_1 < year_2 else second

    def _document(self, number: int, sentences: Sequence[str]) -> str:
        keeper, year = self.keepers(number)
        fact = f"The lighthouse of {self.towns(number)} was given to the keeper {keeper} in the year {year}."
        return " ".join([fact, *sentences])

    def parts(self, num_sentences: int, tail: str) -> _Parts:
        sentences = [self.filler.sentence(i) for i in range(num_sentences)]
        # The first two share what little there is before a third document starts.
        own, rest = sentences[: 2 * _DOCUMENT], sentences[2 * _DOCUMENT :]
        others = [rest[i : i + _DOCUMENT] for i in range(0, len(rest), _DOCUMENT)]
        bodies = [(number, body) for number, body in enumerate(others, 2)]
        bodies.insert(round(self.depth * len(bodies)), (0, own[0::2]))
        bodies.insert(round((self.depth + 0.4) % 1 * len(bodies)), (1, own[1::2]))
        documents = [
            f"Document {place}: {self.towns(number)}\n{self._document(number, body)}"
            for place, (number, body) in enumerate(bodies, 1)
        ]
        context = "\n\n".join(documents) + tail
        return _Parts(
            turn=(
                f"Use the documents below to answer the question at the end.\n\n{context}\n\n"
                f"Question: Who was given a lighthouse earlier, the keeper at {self.towns(0)} or the keeper "
                f"at {self.towns(1)}? Name the keeper and explain how the documents show it."
            ),
            context=context,
        )


_OPENERS = (
    "Tell me more of the village story, please.",
    "What happened after that?",
    "Go on, I am listening.",
    "And what about the other side of the valley?",
    "Please continue with the next part.",
    "Was that the end of it?",
    "Keep going; leave nothing out.",
    "Who else was there that day?",
)
_EXCHANGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialogue:
    """A long finished dialogue in which the user once said something worth remembering."""

    filler: Filler
    depth: float
    openers: Sequence[str]
    answer: str

    def parts(self, num_sentences: int, tail: str) -> _Parts:
        full, left = divmod(num_sentences, _EXCHANGE)
        pairs = []
        for i in range(full):
            said = " ".join(self.filler.sentence(_EXCHANGE * i + j) for j in range(_EXCHANGE))
            pairs.append((self.openers[i % len(self.openers)], said))
        told = f"Before I forget: my boat is called the {self.answer}. Please keep that in mind."
        pairs.insert(
            round(self.depth * full), (told, f"I will remember that your boat is the {self.answer}.")
        )
        rest = [self.filler.sentence(_EXCHANGE * full + j) for j in range(left)]
        pairs[-1] = (pairs[-1][0], " ".join([pairs[-1][1], *rest]) + tail)
        history = tuple(
            message
            for user, assistant in pairs
            for message in (Message(role="user", content=user), Message(role="assistant", content=assistant))
        )
        turn = (
            "Earlier I told you what my boat is called. What is its name? Then sum up in a few sentences "
            "what else we talked about."
        )
        return _Parts(turn=turn, history=history)


def _needle(rng: random.Random, filler: Filler, depth: float) -> _Question:
    return _Needle(
        filler=filler, depth=depth, place=town(rng.randrange(5000)), answer=str(rng.randint(10000, 99999))
    )


def _multi_document(rng: random.Random, filler: Filler, depth: float) -> _Question:
    start, seed, years = rng.randrange(5120), rng.random(), rng.sample(range(1801, 1899), 2)

    def keepers(number: int) -> tuple[str, int]:
        own = random.Random(f"{seed}/{number}")
        return person(own), years[number] if number < 2 else own.randint(1801, 1899)

    # 641 is coprime to the 5,120 towns: no name comes twice, and neighbours differ in both halves.
    return _MultiDocument(
        filler=filler, depth=depth, towns=lambda n: town((start + 641 * n) % 5120), keepers=keepers
    )


def _dialogue(rng: random.Random, filler: Filler, depth: float) -> _Question:
    name = (
        f"{rng.choice(('Grey', 'Bright', 'Little', 'Salt', 'Second', 'Patient'))} {town(rng.randrange(600))}"
    )
    return _Dialogue(filler=filler, depth=depth, openers=rng.sample(_OPENERS, len(_OPENERS)), answer=name)


_TASKS: dict[str, Callable[[random.Random, Filler, float], _Question]] = {
    "needle": _needle,
    "multidoc": _multi_document,
    "dialogue": _dialogue,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongContext:
    """The long-context suite."""

    info: SuiteInfo

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return every question at every length of ``request.lengths``.

        Questions go round the three tasks; there are four of each, or ``limit // len(lengths)`` questions
        in all where a limit is given (at least one question, then at as many lengths as the limit allows).
        With ``request.text_file`` the filler is that text, each question starting at a place of its own.

        Raises:
            UserError: no target to count tokens with, a length that is too short for its question, a length
                that this tokenizer cannot hit, or a filler text that cannot be read.
        """
        if request.count_tokens is None:
            raise UserError(
                "longctx measures its prompts in target tokens; name a target, or leave longctx out"
            )
        lengths = _checked_lengths(request.lengths)
        if request.limit is not None and request.limit < 1:
            raise UserError(f"the limit must be at least 1, got {request.limit}")
        sentences = sentences_of_file(request.text_file) if request.text_file is not None else None
        if request.limit is None:
            num_questions = QUESTIONS_PER_TASK * len(_TASKS)
        else:
            num_questions = max(1, request.limit // len(lengths))
            lengths = lengths[: request.limit]
        prompts = []
        fillers = []
        for number in range(num_questions):
            item, task = number // len(_TASKS), list(_TASKS)[number % len(_TASKS)]
            seed = f"{request.seed}/{task}/{item}"
            rng = random.Random(seed)
            filler, tail = _fillers(seed, rng, sentences)
            fillers.append(filler)
            depth = _DEPTHS[item % len(_DEPTHS)]
            question = _TASKS[task](rng, filler, depth)
            for length in lengths:
                shell = _shell(task, item, length, depth, question)
                prompts.append(_fit(shell, request.count_tokens, length, tail))
        self._warn_of_repeats(fillers, sentences, request)
        return prompts

    def _warn_of_repeats(
        self, fillers: Sequence[Filler], sentences: Sequence[str] | None, request: SuiteRequest
    ) -> None:
        most = max((f.num_used for f in fillers if isinstance(f, Excerpt)), default=0)
        if sentences is not None and most > len(sentences):
            warnings.warn(
                f"the filler text {request.text_file} has {len(sentences)} sentences and was repeated "
                f"to reach {max(request.lengths)} tokens; use a longer text, or none for generated filler",
                SpecbenchWarning,
                stacklevel=3,
            )


def _fillers(seed: str, rng: random.Random, sentences: Sequence[str] | None) -> tuple[Filler, Filler]:
    """Return (filler, text for the unfinished passage at its end)."""
    if sentences is None:
        return Generated(seed + "/filler"), Generated(seed + "/tail")
    start = rng.randrange(len(sentences))
    return Excerpt(sentences, start), Excerpt(sentences, start + len(sentences) // 2)


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    if not lengths:
        raise UserError("longctx needs at least one length in tokens, such as 4096")
    if bad := [length for length in lengths if length < 1]:
        raise UserError(f"longctx lengths are numbers of tokens above 0, got {bad[0]}")
    return tuple(sorted(set(lengths)))


_Build = Callable[[int, str], Prompt]


def _shell(task: str, item: int, length: int, depth: float, question: _Question) -> _Build:
    """Return the function from (number of filler sentences, tail) to the prompt."""

    def build(num_sentences: int, tail: str) -> Prompt:
        parts = question.parts(num_sentences, tail)
        return Prompt(
            id=f"longctx/{task}-{item}@{length}",
            suite="longctx",
            category=task,
            turns=(parts.turn,),
            history=parts.history,
            context=parts.context,
            reference=question.answer,
            meta={"task": task, "question": f"{task}-{item}", "length": str(length), "depth": str(depth)},
        )

    return build


def _fit(build: _Build, count: Callable[[Prompt], int], length: int, tail_filler: Filler) -> Prompt:
    """Return the prompt of exactly ``length`` tokens.

    Whole sentences first, by interpolation; then words of one last, unfinished passage; then single-token
    paddings.

    Raises:
        UserError: too short for the question, or no padding gives the last tokens.
    """
    bare = build(0, "")
    least = count(bare)
    if least > length:
        raise UserError(
            f"{bare.id}: the question alone takes {least} tokens with this target; ask for that or more"
        )
    words = _words(tail_filler)
    num_sentences, size = _approach(lambda n: count(build(n, "")), length, start=least, slack=96, most=None)
    num_words, size = _approach(
        lambda n: count(build(num_sentences, _tail(words, n))), length, start=size, slack=3, most=len(words)
    )
    # Where the last tokens cannot be had after these words (a merge in the way), fewer words leave other
    # ends.
    for fewer in range(num_words, max(-1, num_words - 12), -1):
        tail = _tail(words, fewer)
        if fewer < num_words:
            size = count(build(num_sentences, tail))
        found = _pad(lambda tail: build(num_sentences, tail), count, length, tail, size)
        if found is not None:
            return found
    raise UserError(
        f"{bare.id}: this target's tokenizer cannot be brought to exactly {length} tokens; try another length"
    )


def _words(filler: Filler) -> tuple[str, ...]:
    def endless() -> Iterator[str]:
        index = 0
        while True:
            yield from filler.sentence(index).split()
            index += 1

    return tuple(word for _, word in zip(range(_TAIL_WORDS), endless(), strict=False))


def _tail(words: Sequence[str], num_words: int) -> str:
    return "".join(" " + word for word in words[:num_words])


def _approach(
    size: Callable[[int], int], target: int, *, start: int, slack: int, most: int | None
) -> tuple[int, int]:
    """Find an n with ``target - slack <= size(n) <= target``, else the largest with ``size(n) <= target``.

    ``size`` grows nearly evenly, so each guess interpolates; where that has been slow the interval is
    halved, so the number of calls is logarithmic at worst.

    Args:
        size: tokens at n, the costly call.
        target: tokens wanted.
        start: ``size(0)``, at most ``target``.
        slack: tokens short of the target that will do.
        most: largest n allowed; None for no bound.

    Returns:
        (n, size(n)).
    """
    low, low_size = 0, start
    high: int | None = None
    high_size = 0
    rate = 16.0
    calls = 0
    while target - low_size > slack and (high is None or high - low > 1) and (most is None or low < most):
        if high is None:
            guess = low + max(1, math.floor((target - low_size) / rate))
            guess = guess if most is None else min(guess, most)
        elif calls < 8:
            step = math.floor((target - low_size) / (high_size - low_size) * (high - low))
            guess = low + min(max(step, 1), high - low - 1)
        else:
            guess = (low + high) // 2
        got = size(guess)
        calls += 1
        if got <= target:
            rate = max((got - low_size) / (guess - low), 1.0)
            low, low_size = guess, got
        else:
            high, high_size = guess, got
    return low, low_size


def _pad(
    build: Callable[[str], Prompt], count: Callable[[Prompt], int], length: int, tail: str, size: int
) -> Prompt | None:
    """Return the prompt padded after ``tail`` from ``size`` to ``length``; None where no padding fits."""
    prompt = build(tail)
    while size < length:
        for pad in _PADS:
            longer = build(tail + pad)
            new = count(longer)
            if size < new <= length:
                prompt, size, tail = longer, new, tail + pad
                break
        else:
            return None
    return prompt if size == length else None


LONGCTX = LongContext(
    info=SuiteInfo(
        name="longctx",
        description="needle, multi-document and long-dialogue questions of an exact length; generated",
        licence="Apache-2.0",
        citation="part of specbench",
    )
)
