r"""Where an answer ends: at a stop token, or at the token that completes a stop string. One rule for every runner.

The end is a function of the answer's token ids alone, so an answer decoded with a drafter ends where the target's own
does. The token that completes a stop string belongs to the answer as a stop token does: the target had to make it for
anybody to know that the answer is over. The text that a user reads is cut before the string.

Example:
    ending = Ending(target.stop_ids, tokenizer, ("\n\n",))
    ending.reached([260, 198, 198])          # True: the last token completes the blank line
    read_answer(tokenizer, [260, 198, 198], ("\n\n",))   # " the"
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from specbench.runners.targets import Target
from specbench.types import RenderedPrompt, Round

_SLACK = 4
"""Tokens before the longest possible stop string, so that nothing the decoder does to a text's start reaches it."""


class Ending:
    """Tells whether an answer is over."""

    def __init__(self, stop_ids: Collection[int], tokenizer: Any = None, strings: Sequence[str] = ()) -> None:
        """Prepare.

        Args:
            stop_ids: tokens that end any answer.
            tokenizer: the target's; needed where there are strings.
            strings: texts that end this one.
        """
        self.stop_ids = frozenset(stop_ids)
        self.strings = tuple(text for text in strings if text)
        self.tokenizer = tokenizer
        # a token is a byte of text at least, or a special token that ends the match anyway
        self._window = _SLACK + max((len(text.encode()) for text in self.strings), default=0)

    @classmethod
    def of(cls, target: Target, prompt: RenderedPrompt) -> Ending:
        """Return the ending of one prompt's answer."""
        # most prompts have no strings, and then nothing needs to be decoded
        tokenizer = target.tokenizer if prompt.stop_strings else None
        return cls(target.stop_ids, tokenizer, prompt.stop_strings)

    def reached(self, answer: Sequence[int]) -> bool:
        """Whether the last token of ``answer`` ends it; the tokens before it are known not to."""
        if answer[-1] in self.stop_ids:
            return True
        if not self.strings:
            return False
        text = self.tokenizer.decode(list(answer[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def received(self, answer: Sequence[int], new: Sequence[int], room: int) -> int:
        """Return how many of ``new`` the user gets behind ``answer``: none behind the end, none beyond ``room``."""
        if not self.strings:
            ends = (i + 1 for i, token in enumerate(new[:room]) if token in self.stop_ids)
            return next(ends, min(len(new), room))
        grown = list(answer[-self._window :])
        for i, token in enumerate(new[:room]):
            grown.append(token)
            if self.reached(grown):
                return i + 1
        return min(len(new), room)

    def length(self, answer: Sequence[int]) -> int:
        """Return how many tokens of a whole answer, made without regard to the strings, count."""
        return self.received((), answer, len(answer)) if self.strings else len(answer)


def cut_rounds(rounds: Sequence[Round], length: int, depth: int) -> list[Round]:
    """Return the rounds of an answer that is cut to its first ``length`` tokens.

    They are those that a loop which stops there would have made: rounds that start behind the end never happen, and
    the one that reaches it accepts only what the user receives.
    """
    kept = []
    for entry in rounds:
        left = length - 1 - entry.start
        if left < 1:
            break
        kept.append(
            replace(
                entry,
                num_accepted=min(entry.num_accepted, left),
                num_emitted=min(entry.num_emitted, left),
                cut=left < depth,
            )
        )
    return kept


def read_answer(tokenizer: Any, ids: Sequence[int], strings: Sequence[str] = ()) -> str:
    """Return the text a user reads: special tokens left out, cut before the first stop string."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    for string in strings:
        if string:
            text = text.split(string)[0]
    return text
