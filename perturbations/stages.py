"""Conditions made of stages, how they compose, and the checks each rendering passes.

Example:
    Staged(info=ConditionInfo(id="text/shout", family="text", severity=2, description="Everything in
    capitals."),
           messages=lambda draft, setting: edit_user_text(draft, str.upper), claims=frozenset({"text"}),
           keeps_text=False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specbench.errors import UserError
from specbench.perturbations.condition import UNCHANGED, BosRule, Draft, Piece, Segment, Setting, Stage, Turn
from specbench.perturbations.rendering import FIXED_DATE, JOIN, ChatTokenizer, template_hash
from specbench.types import CLEAN, ConditionInfo, Prompt, RenderedPrompt

Claim = str
"""What a condition decides alone: "layout" (which template, or none), "BOS", "system prompt", "context",
..."""

LAYOUT_CLAIMS: frozenset[Claim] = frozenset({"layout", "thinking", "tools", "default system"})
"""What a condition with a template of its own decides."""

RAW_CLAIMS: frozenset[Claim] = LAYOUT_CLAIMS | {
    "generation header",
    "turn ends",
    "header newlines",
    "text ends",
    "role names",
    "markup tokens",
}
"""What a condition without a template decides: all of the markup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A condition as up to three stages, run in this order whatever is composed with it."""

    info: ConditionInfo
    messages: tuple[Stage, ...] = ()
    """Edit the turns."""
    template: tuple[Stage, ...] = ()
    """Choose the layout, its variables and the edits of the rendered segments."""
    ids: tuple[Stage, ...] = ()
    """Say what happens to BOS."""
    claims: frozenset[Claim] = frozenset()
    """Two conditions that claim the same thing do not compose."""
    requires: tuple[Callable[[ChatTokenizer], str | None], ...] = ()
    """Each returns None, or the sentence why the condition makes no sense for this tokenizer."""
    keeps_text: bool = True
    """Whether the user's text must come through untouched."""
    same_ids: bool = False

    def available(self, chat: ChatTokenizer) -> str | None:
        """Return None, or the sentence why the condition makes no sense for this tokenizer and template."""
        return next((reason for check in self.requires if (reason := check(chat))), None)

    def render(
        self, prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer, seed: int
    ) -> RenderedPrompt:
        """Return the token ids for one turn of a prompt; see ``Condition.render``."""
        if self.info.id == CLEAN:
            return _clean(self, prompt, turn, answers, chat, seed)
        if reason := self.available(chat):
            raise UserError(f"{self.info.id}: {reason}")
        rendered = _render(self, prompt, turn, answers, chat, seed)
        if not self.same_ids and clean_ids(prompt, turn, answers, chat) == rendered.token_ids:
            note = f"{UNCHANGED} {self.info.id} leaves the token ids of this prompt as they are under {CLEAN}"
            rendered = replace(rendered, notes=(*rendered.notes, note))
        return rendered


def compose(first: Staged, second: Staged) -> Staged:
    """Return the condition that does both, stage by stage.

    Raises:
        UserError: both decide the same thing.
    """
    clash = sorted(first.claims & second.claims)
    if clash:
        decided = "layout" if "layout" in clash else " and the ".join(clash)
        raise UserError(
            f"{first.info.id} and {second.info.id} do not compose: both decide the {decided}; pick one"
        )
    if first.info.id == CLEAN or second.info.id == CLEAN:
        return second if first.info.id == CLEAN else first
    a, b = first.info, second.info
    info = ConditionInfo(
        id=f"{a.id}+{b.id}",
        family=f"{a.family}+{b.family}",
        severity=max(a.severity, b.severity),
        description=f"{a.description} {b.description}",
        reason=f"{a.reason} {b.reason}".strip(),
        parameters={**a.parameters, **b.parameters},
    )
    return Staged(
        info=info,
        messages=first.messages + second.messages,
        template=first.template + second.template,
        ids=first.ids + second.ids,
        claims=first.claims | second.claims,
        requires=first.requires + second.requires,
        keeps_text=first.keeps_text and second.keeps_text,
        same_ids=first.same_ids and second.same_ids,
    )


def start(prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer) -> Draft:
    """Return the draft of a prompt before any stage.

    Raises:
        UserError: the prompt has no such turn, or its ``context`` is not part of its first turn.
    """
    if not 0 <= turn < len(prompt.turns):
        raise UserError(f"prompt {prompt.id} has {len(prompt.turns)} turns, so no turn {turn}")
    assert len(answers) >= turn, "every earlier turn needs the target's answer"
    turns: list[Turn] = []
    if prompt.system is not None:
        turns.append(Turn(role="system", pieces=(Piece(text=prompt.system, kind="system"),)))
    turns += [Turn(role=m.role, pieces=(Piece(text=m.content, kind=m.role),)) for m in prompt.history]
    for i in range(turn + 1):
        pieces = _context_pieces(prompt) if i == 0 else (Piece(text=prompt.turns[i], kind="user"),)
        turns.append(Turn(role="user", pieces=pieces))
        if i < turn:
            turns.append(Turn(role="assistant", pieces=(Piece(text=answers[i], kind="assistant"),)))
    return Draft(turns=tuple(turns), template=chat.template, bos="template" if chat.template else "auto")


def clean_ids(prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer) -> tuple[int, ...]:
    """Return the token ids under the clean condition (cached)."""
    key = (prompt.id, prompt.turns, prompt.system, prompt.history, turn, tuple(answers[:turn]))

    def make() -> tuple[int, ...]:
        return _ids(start(prompt, turn, answers, chat), Setting(prompt=prompt, turn=turn, chat=chat, seed=0))

    ids: tuple[int, ...] = chat.remember(("clean", key), make)
    return ids


def system_fallback(draft: Draft, chat: ChatTokenizer) -> Draft:
    """Put system texts the template does not take at the head of the next user message, and say so."""
    own = draft.template == chat.template
    role = chat.system_role if own or draft.template is None else chat.system_role_of(draft.template)
    if role == "yes" or not any(turn.role == "system" for turn in draft.turns):
        return draft
    turns: list[Turn] = []
    waiting: tuple[Piece, ...] = ()
    for turn in draft.turns:
        if turn.role == "system":
            waiting += (*turn.pieces, Piece(text="\n\n", kind="system"))
        elif turn.role == "user" and waiting:
            turns.append(replace(turn, pieces=waiting + turn.pieces))
            waiting = ()
        else:
            turns.append(turn)
    why = "rejects a system message" if role == "rejected" else "leaves a system message out"
    return replace(draft, turns=tuple(turns)).note(
        f"the template {why}: its text opens the user's message instead"
    )


def _context_pieces(prompt: Prompt) -> tuple[Piece, ...]:
    text = prompt.turns[0]
    if not prompt.context:
        return (Piece(text=text, kind="user"),)
    before, found, after = text.partition(prompt.context)
    if not found:
        raise UserError(
            f"prompt {prompt.id}: its context is not a part of its first turn, verbatim; mend the suite"
        )
    pieces = (
        Piece(text=before, kind="user"),
        Piece(text=found, kind="context"),
        Piece(text=after, kind="user"),
    )
    return tuple(piece for piece in pieces if piece.text)


def _clean(
    condition: Staged, prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer, seed: int
) -> RenderedPrompt:
    rendered = _render(condition, prompt, turn, answers, chat, seed)
    notes = list(rendered.notes)
    if chat.template is None:
        notes.append("the tokenizer has no chat template: the clean condition is raw text")
    elif chat.tokenizer_adds_bos and chat.clean_bos == 0:
        notes.append("the chat template writes no BOS although the tokenizer puts one before raw text")
    elif chat.clean_bos > 1:
        notes.append(f"the chat template itself writes {chat.clean_bos} BOS tokens")
    if chat.template is not None and "strftime_now" in chat.template.source:
        notes.append(f"the chat template asks for today's date and is always told {FIXED_DATE}")
    return replace(rendered, notes=tuple(notes))


def _run(stages: tuple[Stage, ...], draft: Draft, setting: Setting) -> Draft:
    prompt, turn, chat, seed = setting.prompt, setting.turn, setting.chat, setting.seed
    for i, stage in enumerate(stages):
        draft = stage(draft, Setting(prompt=prompt, turn=turn, chat=chat, seed=seed, rest=stages[i + 1 :]))
    return system_fallback(draft, setting.chat)


def _segments(draft: Draft, setting: Setting) -> tuple[Segment, ...]:
    segments = setting.chat.lay_out(draft)
    for edit in draft.edits:
        segments = edit(segments, setting)
    return segments + _prefill(segments, setting)


def _prefill(segments: Sequence[Segment], setting: Setting) -> tuple[Segment, ...]:
    """Return what the answer is made to begin with; raw text keeps it apart as it keeps turns apart."""
    text = setting.prompt.prefill
    if not text or setting.turn != len(setting.prompt.turns) - 1:
        return ()
    joined = bool(segments) and (segments[-1].part == "generation" or segments[-1].text[-1:].isspace())
    return (Segment(text=text if joined else JOIN + text, kind="assistant"),)


def measure(draft: Draft, setting: Setting) -> int:
    """Return how many tokens ``draft`` comes to once the stages after the present one have run."""
    return len(_ids(draft, setting))


def _ids(draft: Draft, setting: Setting) -> tuple[int, ...]:
    draft = _run(setting.rest, draft, setting)
    return setting.chat.tokenise(_segments(draft, setting), draft.bos, draft.plain)[0]


def _render(
    condition: Staged, prompt: Prompt, turn: int, answers: Sequence[str], chat: ChatTokenizer, seed: int
) -> RenderedPrompt:
    setting = Setting(prompt=prompt, turn=turn, chat=chat, seed=seed)
    stages = (*condition.messages, *condition.template, *condition.ids)
    draft = _run(stages, start(prompt, turn, answers, chat), setting)
    segments = _segments(draft, setting)
    ids, spans, num_bos = chat.tokenise(segments, draft.bos, draft.plain)
    notes = (*draft.notes, *_special_notes(segments, chat, draft.plain))
    _check(condition, draft, segments, num_bos, setting)
    return RenderedPrompt(
        prompt_id=prompt.id,
        suite=prompt.suite,
        category=prompt.category,
        turn=turn,
        condition=condition.info,
        token_ids=ids,
        spans=spans,
        bos_count=num_bos,
        template_hash=chat.template_hash
        if draft.template == chat.template
        else template_hash(draft.template),
        notes=notes,
        max_new_tokens=prompt.max_new_tokens,
        stop_strings=prompt.stop_strings,
    )


def _special_notes(segments: Sequence[Segment], chat: ChatTokenizer, plain: bool) -> list[str]:
    if plain:
        return []
    found: dict[tuple[str, str], None] = {}
    for segment in segments:
        if not segment.part and segment.kind != "markup":
            found.update(dict.fromkeys((segment.kind, name) for name in chat.special_strings(segment.text)))
    return [
        f"the {kind} text contains {name}, which is tokenised as the special token" for kind, name in found
    ]


def _check(
    condition: Staged, draft: Draft, segments: Sequence[Segment], num_bos: int, setting: Setting
) -> None:
    """Hold a rendering to what its condition declares: the user's text is there, BOS is as many as said."""
    if condition.keeps_text:
        text = "".join(s.text for s in segments if s.kind in ("user", "context"))
        for said in setting.prompt.turns[: setting.turn + 1]:
            if said.strip() not in text:
                raise UserError(
                    f"{condition.info.id} loses or changes the user's text of {setting.prompt.id}"
                )
    chat = setting.chat
    has_bos = chat.bos_id is not None
    # What the target's own template writes is right by definition, unless it was edited.
    written = chat.clean_bos if draft.edits else num_bos
    declared: Mapping[BosRule, int] = {
        "template": written,
        "target": chat.clean_bos,
        "auto": int(has_bos),
        "drop": 0,
        "double": chat.clean_bos + 1,
    }
    wanted = declared[draft.bos]
    if wanted != num_bos and not setting.chat.special_strings("".join(setting.prompt.turns)):
        raise UserError(
            f"{condition.info.id} declares {wanted} BOS tokens but gives {num_bos} for {setting.prompt.id}"
        )
