"""Edits of rendered markup: what stands around the messages, the messages themselves left alone.

Example: ``edit_parts(segments, ends_with("_head"), add_newline)`` gives every role header one more newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from specbench.perturbations.condition import Draft, Segment, SegmentEdit, Setting, Stage

_HEADERS = ("user_head", "assistant_head", "system_head", "generation", "default_open")
_ENDS = ("user_tail", "assistant_tail", "system_tail", "default_close")
_OTHER_ROLES = {"user": "human", "assistant": "bot", "model": "bot", "system": "context"}


def as_stage(edit: SegmentEdit) -> Stage:
    """Return the stage that adds ``edit`` to a draft."""

    def stage(draft: Draft, setting: Setting) -> Draft:
        return replace(draft, edits=(*draft.edits, edit))

    return stage


def _edit(
    segments: Sequence[Segment], parts: Sequence[str], change: Callable[[str], str]
) -> tuple[Segment, ...]:
    return tuple(replace(s, text=change(s.text)) if s.part in parts else s for s in segments)


def double_newline(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Write one newline more after every role header that ends in one."""
    return _edit(segments, _HEADERS, lambda text: text + "\n" if text.endswith("\n") else text)


def drop_newline(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Leave out the newlines that end role headers."""
    return _edit(segments, _HEADERS, lambda text: text.rstrip("\n"))


def newline_after_text(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Write a newline between each user text and what follows it."""
    changed: list[Segment] = []
    for at, segment in enumerate(segments):
        changed.append(segment)
        after = segments[at + 1] if at + 1 < len(segments) else None
        if segment.kind in ("user", "context") and (after is None or after.kind not in ("user", "context")):
            changed.append(Segment(text="\n", kind="markup", part="between"))
    return tuple(changed)


def trailing_space(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """End the prompt with a space."""
    kind = "generation" if segments[-1].kind == "generation" else "markup"
    return (*segments, Segment(text=" ", kind=kind, part="generation"))  # type: ignore[arg-type]


def drop_ends(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Leave out end-of-turn markup, keep the white space around it."""
    return _edit(segments, _ENDS, lambda text: text.replace(text.strip(), "") if text.strip() else text)


def rename_roles(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Call the user "human" and the assistant "bot", in the case the template uses."""
    return _edit(segments, _HEADERS, renamed)


def renamed(text: str) -> str:
    """Return ``text`` with the role names changed, in the same case."""

    def other(match: re.Match[str]) -> str:
        word = match.group()
        name = _OTHER_ROLES[word.lower()]
        return name.upper() if word.isupper() else name.capitalize() if word[0].isupper() else name

    return re.sub("|".join(_OTHER_ROLES), other, text, flags=re.IGNORECASE)


def drop_default_system(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Leave out the system block that the template writes when no system message is given; BOS stays."""
    kept = [segment for segment in segments if not segment.part.startswith("default_")]
    bos = setting.chat.bos_token
    opened = bool(bos) and len(kept) < len(segments) and segments[0].text.startswith(bos)
    if opened and not (kept and kept[0].text.startswith(bos)):
        kept.insert(0, Segment(text=bos, kind="markup", part="open"))
    return tuple(kept)


def without_bos_text(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """Leave out a BOS string that is no turn marker, where BOS is put in front as an id afterwards."""
    bos = setting.chat.bos_token
    if not bos or setting.chat.bos_is_marker or not segments[0].text.startswith(bos):
        return segments
    return (replace(segments[0], text=segments[0].text[len(bos) :]), *segments[1:])


def empty_thoughts(segments: tuple[Segment, ...], setting: Setting) -> tuple[Segment, ...]:
    """End the prompt with an empty think block."""
    return (*segments, Segment(text="<think>\n\n</think>\n\n", kind="generation", part="generation"))
