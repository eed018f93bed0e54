r"""A prompt file of the user's own: ``.jsonl``, one JSON object a line.

Three forms, one of them a line; ``id``, ``category``, ``system`` and ``reference`` are optional, other
fields are left alone:

    {"id": "a", "turns": ["Name three rivers.", "Which one is the longest?"]}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]}
    {"prompt": "Say hello in French.", "category": "translation"}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specbench.benchmarks.reading import Record, read_records, take_in_turn, unique
from specbench.errors import UserError
from specbench.types import Message, Prompt, SuiteInfo, SuiteRequest

_FORMS = ("turns", "messages", "prompt")


@dataclass(frozen=True, slots=True)
class OwnFile:
    """The suite a ``.jsonl`` file makes; its name is the file's name without the ending.

    Args:
        path: the file.
    """

    path: Path
    _info: SuiteInfo = field(init=False, repr=False)

    def __post_init__(self) -> None:
        path = Path(self.path)
        object.__setattr__(self, "path", path)
        info = SuiteInfo(name=path.stem, description=f"your own prompts, {path.name}", files=(path.name,))
        object.__setattr__(self, "_info", info)

    @property
    def info(self) -> SuiteInfo:
        """Name and file."""
        return self._info

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return the file's prompts; ``limit`` takes categories in turn.

        Raises:
            UserError: the file is missing, empty or malformed (file, line, what was expected).
        """
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder; name the .jsonl file itself")
        records = list(read_records(self.path))
        prompts = unique([self._prompt(record) for record in records], records)
        return take_in_turn(prompts, request.limit, lambda prompt: prompt.category)

    def _prompt(self, record: Record) -> Prompt:
        present = [form for form in _FORMS if form in record.value]
        if len(present) != 1:
            got = " and ".join(repr(form) for form in present) or f"the fields {sorted(record.value)}"
            raise record.fail(f"exactly one of 'turns', 'messages' and 'prompt', got {got}")
        system = record.text("system") if record.value.get("system") is not None else None
        history: tuple[Message, ...] = ()
        if present[0] == "messages":
            if system is not None:
                raise record.fail("no 'system' field beside 'messages': put it in as the first message")
            system, history, turns = _from_messages(record)
        else:
            turns = record.texts("turns") if present[0] == "turns" else (record.text("prompt"),)
        name = record.name("id") or record.name("question_id") or str(record.index + 1)
        return Prompt(
            id=f"{self.info.name}/{name}",
            suite=self.info.name,
            category=record.name("category") or self.info.name,
            turns=turns,
            system=system,
            history=history,
            reference=record.value["reference"] if isinstance(record.value.get("reference"), str) else None,
        )


def _from_messages(record: Record) -> tuple[str | None, tuple[Message, ...], tuple[str, ...]]:
    """Split ``messages`` into (system prompt, finished dialogue, the open user turn).

    Raises:
        UserError: not a list of messages, a role out of turn, or no user message at the end.
    """
    raw = record.value["messages"]
    if not isinstance(raw, list) or not raw:
        raise record.fail("'messages' to be a non-empty list")
    messages = []
    for number, item in enumerate(raw, 1):
        if (
            not isinstance(item, dict)
            or not isinstance(item.get("content"), str)
            or not item["content"].strip()
        ):
            raise record.fail(f"message {number} to be an object with 'role' and a non-empty text 'content'")
        if item.get("role") not in ("system", "user", "assistant"):
            raise record.fail(
                f"message {number} to have the role system, user or assistant, got {item.get('role')!r}"
            )
        messages.append(Message(role=item["role"], content=item["content"]))
    system = messages.pop(0).content if messages[0].role == "system" else None
    for number, message in enumerate(messages):
        wanted = "user" if number % 2 == 0 else "assistant"
        if message.role != wanted:
            place = number + 1 + (system is not None)
            raise record.fail(
                f"message {place} to be the {wanted}'s (user and assistant take turns), got {message.role!r}"
            )
    if not messages or messages[-1].role != "user":
        raise record.fail("the last message to be the user's: it is the one to answer")
    return system, tuple(messages[:-1]), (messages[-1].content,)
