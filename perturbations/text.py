"""Text conditions: the user's words changed, the dialogue around them left alone.

Context and earlier turns that belong to the task stay as they are.

Example: ``text/typos_5`` gives one word in twenty a typing error: "What is the capitla of France?"
"""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
from collections.abc import Callable

from specbench.perturbations.condition import Draft, Setting, Stage
from specbench.perturbations.stages import Staged
from specbench.perturbations.turns import edit_user_text
from specbench.types import ConditionInfo

FAMILY = "text"

Edit = Callable[[str, random.Random], str]

_KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_LOOKALIKES = str.maketrans("aceijopsxyABCEHIKMOPTXY", "асеіјорѕхуАВСЕНІКМОРТХУ")
PHRASES = (
    ("Write a short", "Compose a brief"),
    ("Write", "Compose"),
    ("Explain", "Make clear"),
    ("Describe", "Give a description of"),
    ("List", "Enumerate"),
    ("Suggest", "Propose"),
    ("Recommend", "Suggest"),
    ("Solve", "Work out"),
    ("Name", "Mention"),
    ("Rewrite", "Reword"),
    ("Shorten", "Cut down"),
    ("Correct", "Put right"),
    ("Give me", "Provide me with"),
    ("Give", "Provide"),
    ("Show", "Set out"),
    ("Find", "Determine"),
    ("Calculate", "Compute"),
    ("Change", "Alter"),
    ("What is the difference between", "In what way is there a difference between"),
    ("What is", "Could you say what is"),
    ("What are", "Could you say what are"),
    ("How many", "What number of"),
    ("How much", "What amount of"),
    ("How can I", "In what way could I"),
    ("How do", "In what way do"),
    ("Why does", "For what reason does"),
    ("Why is", "For what reason is"),
    ("Please", "Kindly"),
    ("should", "ought to"),
    ("need to", "have to"),
    ("because", "since"),
    ("however", "nevertheless"),
    ("for example", "for instance"),
    ("each", "every single"),
    ("big", "large"),
    ("buying", "purchasing"),
)
"""Phrase -> another way to say it, in this case only; the longest that matches at a place wins."""

_FENCE = re.compile(r"(```([\w+#-]*)[^\n]*\n)(.*?)(```)", re.DOTALL)
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_PYTHON = ("", "python", "py", "python3")
_HASH = ("bash", "sh", "shell", "ruby", "r", "perl", "yaml", "toml")
_DASHES = ("sql", "lua", "haskell")


def with_typos(text: str, source: random.Random, rate: float) -> str:
    """Give each word of four letters or more a typing error with probability ``rate``.

    The error is a swap, an omission, a doubled letter or a neighbouring key, inside the word.
    """

    def spoil(match: re.Match[str]) -> str:
        word = match.group()
        if source.random() >= rate:
            return word
        at = 1 + int(source.random() * (len(word) - 2))
        kind = int(source.random() * 4)
        if kind == 0 and word[at] != word[at + 1]:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        if kind == 1:
            return word[:at] + word[at + 1 :]
        if kind == 2:
            return word[:at] + word[at] + word[at:]
        return word[:at] + _neighbour(word[at], source) + word[at + 1 :]

    return re.sub(r"[A-Za-z]{4,}", spoil, text)


def _neighbour(letter: str, source: random.Random) -> str:
    row = next(row for row in _KEY_ROWS if letter.lower() in row)
    at = row.index(letter.lower())
    beside = [row[i] for i in (at - 1, at + 1) if 0 <= i < len(row)]
    other = beside[int(source.random() * len(beside))]
    return other.upper() if letter.isupper() else other


def with_lookalikes(text: str, source: random.Random, rate: float) -> str:
    """Replace each letter that has a Cyrillic twin by it with probability ``rate``."""
    return "".join(letter.translate(_LOOKALIKES) if source.random() < rate else letter for letter in text)


def paraphrased(text: str, source: random.Random) -> str:
    """Replace whole phrases by the table's other wording; code is left alone."""
    table = dict(PHRASES)
    phrases = "|".join(re.escape(phrase) for phrase in sorted(table, key=len, reverse=True))
    pattern = re.compile(rf"{_CODE.pattern}|\b(?:{phrases})\b", re.DOTALL)
    return text if _is_python(text) else pattern.sub(lambda m: table.get(m.group(), m.group()), text)


def without_comments(text: str, source: random.Random) -> str:
    """Remove comments from code: fenced blocks, or the whole text where it is Python."""
    if _FENCE.search(text):
        return _FENCE.sub(
            lambda m: m.group(1) + _strip_comments(m.group(3), m.group(2).lower()) + m.group(4), text
        )
    return _strip_comments(text, "python") if _is_python(text) else text


def _is_python(text: str) -> bool:
    """Whether the text is a Python program, perhaps one that breaks off inside a function."""
    for ending in ("", "\n    pass\n"):
        try:
            body = ast.parse(text + ending).body
        except (SyntaxError, ValueError):
            continue
        return any(
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) for node in body
        )
    return False


def _strip_comments(code: str, language: str) -> str:
    """Remove the comments of ``code``: Python by its own tokenizer, other languages by their signs."""
    if language in _PYTHON:
        return _strip_python_comments(code)
    sign = "#" if language in _HASH else "--" if language in _DASHES else "//"
    if sign == "//":
        code = re.sub(r"/\*.*?\*/", "", code, flags=re.DOTALL)
    code = re.sub(rf"(?m)^[ \t]*{sign}[^\n]*\n", "", code)
    return re.sub(rf"(?m)[ \t]+{sign}[^\n]*$", "", code)


def _strip_python_comments(code: str) -> str:
    try:
        comments = [
            t.start
            for t in tokenize.generate_tokens(io.StringIO(code).readline)
            if t.type == tokenize.COMMENT
        ]
    except (tokenize.TokenError, SyntaxError):
        return code
    lines: list[str | None] = [*code.split("\n")]
    for row, column in comments:
        kept = str(lines[row - 1])[:column].rstrip()
        lines[row - 1] = kept or None
    return "\n".join(line for line in lines if line is not None)


def _punctuation_removed(text: str, source: random.Random) -> str:
    return re.sub(r"(?<=\w)[.,;:!?]+(?=\s|$)", "", text)


def _punctuation_added(text: str, source: random.Random) -> str:
    return re.sub(r"(?<=\w)[.!?](?=\s|$)", lambda match: match.group() * 3, text)


def _spaces_doubled(text: str, source: random.Random) -> str:
    return re.sub(r"(?<=\S) (?=\S)", lambda match: "  " if source.random() < 0.3 else " ", text)


def _spaces_collapsed(text: str, source: random.Random) -> str:
    return " ".join(text.split())


def _stage(name: str, edit: Edit) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        return edit_user_text(draft, setting, edit, name)

    return stage


def text_condition(
    name: str, edit: Edit, *, severity: int, description: str, reason: str = "", **parameters: str
) -> Staged:
    """Return a condition that changes the user's text; the one function an outside package needs.

    Args:
        name: the condition's id, ``family/name``.
        edit: takes a text and a generator seeded for it; returns the new text.
        severity: 1 to 3.
        description: one sentence.
        reason: why it happens in practice.
        **parameters: for the result rows.
    """
    return Staged(
        info=ConditionInfo(
            id=name,
            family=name.partition("/")[0],
            severity=severity,
            description=description,
            reason=reason,
            parameters=parameters,
        ),
        messages=(_stage(name, edit),),
        claims=frozenset({"words"}),
        keeps_text=False,
    )


def _rated(kind: Callable[[str, random.Random, float], str], rate: float) -> Edit:
    return lambda text, source: kind(text, source, rate)


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions."""
    typos = tuple(
        text_condition(
            f"text/typos_{percent}",
            _rated(with_typos, percent / 100),
            severity=severity,
            description=f"Typing errors in {percent} % of the longer words.",
            reason="People type fast.",
            typo_percent=str(percent),
        )
        for percent, severity in ((2, 1), (5, 2), (10, 2), (25, 3))
    )
    twins = tuple(
        text_condition(
            f"text/lookalikes_{percent}",
            _rated(with_lookalikes, percent / 100),
            severity=3,
            description=f"{percent} % of the letters replaced by Cyrillic ones that look the same.",
            reason="Text copied from PDFs and mails, and attempts to pass filters.",
            lookalike_percent=str(percent),
        )
        for percent in (5, 20)
    )
    return (*typos, *twins, *_plain_edits())


def _plain_edits() -> tuple[Staged, ...]:
    table: tuple[tuple[str, Edit, int, str, str], ...] = (
        ("lowercase", lambda t, r: t.lower(), 1, "Everything in small letters.", "Chat messages."),
        ("uppercase", lambda t, r: t.upper(), 2, "Everything in capitals.", "Caps lock and old systems."),
        ("double_spaces", _spaces_doubled, 1, "A third of the spaces doubled.", "Copied documents."),
        ("one_line", _spaces_collapsed, 2, "White space collapsed to single spaces.", "Web forms."),
        ("no_punctuation", _punctuation_removed, 1, "Punctuation after words left out.", "Dictated text."),
        ("extra_punctuation", _punctuation_added, 1, "Sentence ends tripled.", "Emphasis in chats."),
        ("paraphrase", paraphrased, 1, "Common phrases put another way.", "The task in other words."),
        ("no_comments", without_comments, 1, "Comments removed from code.", "Stripped sources."),
    )
    return tuple(
        text_condition(f"text/{name}", edit, severity=severity, description=description, reason=reason)
        for name, edit, severity, description, reason in table
    )
