"""Filler text of our own: rules, stories and notes to any length, from patterns and word lists.

Example: ``Prose("policy", seed=0).text(3)`` is the opening line and three rules of an invented support desk.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

from specbench.errors import UserError
from specbench.perturbations.turns import random_for

Kind = Literal["policy", "story", "related"]

SENTENCES_PER_PARAGRAPH = 6

# Short words and signs that lengthen a text by few tokens in any vocabulary, tried when a length is just
# missed.
_STOPGAPS = (" so", " a", ".", " and", "!", " the", "s", " I", "-", " to", "e")
_MAX_TRIES = 100


@cache
def data() -> Mapping[str, Any]:
    """Return the bundled prose and its patterns."""
    file = resources.files("specbench.perturbations") / "data" / "prose.json"
    loaded: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


class Prose:
    """An endless text: the first n sentences are the same whatever is asked later."""

    def __init__(self, kind: Kind, *, seed: object = 0, words: Sequence[str] = ()) -> None:
        """Begin a text.

        Args:
            kind: which patterns.
            seed: anything that prints the same on every machine.
            words: take the place of the bundled ``{word}`` list.
        """
        self._lists: dict[str, Any] = dict(data()[kind])
        if words:
            self._lists["word"] = list(words)
        self._random = random_for(kind, seed)
        self._sentences: list[str] = [self._lists["opening"]]

    def text(self, num_sentences: int) -> str:
        """Return the opening and ``num_sentences`` sentences, in paragraphs."""
        while len(self._sentences) <= num_sentences:
            self._sentences.append(self._sentence())
        wanted = self._sentences[: num_sentences + 1]
        size = SENTENCES_PER_PARAGRAPH
        return "\n\n".join(" ".join(wanted[i : i + size]) for i in range(0, len(wanted), size))

    def _sentence(self) -> str:
        pattern = _pick(self._lists["patterns"], self._random)

        def fill(match: re.Match[str]) -> str:
            name = match.group(1)
            if name == "n":
                return str(2 + int(self._random.random() * 28))
            if name == "m":
                return str(10 * (1 + int(self._random.random() * 40)))
            return _pick(self._lists[name], self._random)

        return re.sub(r"\{(\w+)\}", fill, pattern)


def _pick(items: Sequence[str], source: random.Random) -> str:
    return items[int(source.random() * len(items))]


def fit(prose: Prose, measure: Callable[[str], int], length: int, what: str) -> str:
    """Return a beginning of ``prose`` for which ``measure`` gives exactly ``length``.

    Args:
        prose: the text to cut.
        measure: tokens of whatever the text is put into; grows with the text.
        length: wanted.
        what: for the error message.

    Raises:
        UserError: no cut of the text comes to that length.
    """
    text, tokens = _beginning(prose, measure, length)
    words = [0, *(match.end() for match in re.finditer(r"\S+", text))]
    rate = tokens / len(words)
    low, high = 0, len(words)
    guess = int(length / rate)
    while high - low > 1:
        guess = guess if low < guess < high else (low + high) // 2
        missing = length - measure(text[: words[guess]])
        low, high = (guess, high) if missing >= 0 else (low, guess)
        guess += max(1, int(missing / rate)) if missing >= 0 else min(-1, int(missing / rate))
    # The count need not grow by one a word, so a shorter cut may be reachable where the longest is not.
    for count in range(low, max(low - 8, -1), -1):
        found = _fill_up(text[: words[count]], measure, length)
        if found is not None:
            return found
    raise UserError(f"{what}: no text of exactly {length} tokens was found; take another length")


def _beginning(prose: Prose, measure: Callable[[str], int], length: int) -> tuple[str, int]:
    """Return a text that measures at least ``length``, and what it measures."""
    count = max(4, length // 16)
    while (tokens := measure(text := prose.text(count))) < length:
        count *= 2
    return text, tokens


def _fill_up(text: str, measure: Callable[[str], int], length: int) -> str | None:
    """Lengthen ``text`` by a few short words until it measures ``length``; None where a bounded search fails."""
    tries = 0

    def search(text: str, now: int) -> str | None:
        nonlocal tries
        if now == length:
            return text
        for word in _STOPGAPS:
            tries += 1
            if tries > _MAX_TRIES:
                return None
            longer = measure(text + word)
            if now < longer <= length and (found := search(text + word, longer)) is not None:
                return found
        return None

    return search(text, measure(text))
