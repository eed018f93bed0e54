"""The target's states for training drafters: computed on the fly, or once into a file.

The file holds one bfloat16 row per position: the taps, then the state after the final norm. It grows with the answer
file and is only ever appended to, so a kill loses one pass at most.

Example:
    cache = TapCache.open(Path("taps"), target, taps=(2, 15, 27), budget=16 << 30)
    cache.extend(examples)
    cache.read(examples[0]).final.shape   # (N-1, 576)
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.drafters.training.data import Example, Features
from specbench.errors import UserError
from specbench.runners.answer_file import Answer
from specbench.runners.engine import Engine, Segment, decoder_layers
from specbench.runners.targets import Target

_PASS_TOKENS = 2048
_HEAD_ROWS = 1024


def to_examples(answers: Sequence[Answer]) -> list[Example]:
    """Return answers as training examples."""
    return [Example(id=a.id, prompt_ids=a.prompt_ids, answer_ids=a.answer_ids) for a in answers]


class TargetStates:
    """Computes states on the fly; implements ``TapSource``."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target = target
        self.taps = tuple(taps)
        self._norm: Any = decoder_layers(target.model)[1]
        self._head: Tensor = target.weights().head
        self._checked = False

    def read(self, example: Example) -> Features:
        """Run the target over one example."""
        (features,) = self.compute([example])
        return features

    @torch.no_grad()
    def compute(self, examples: Sequence[Example]) -> list[Features]:
        """Run the target over several examples in one pass."""
        lengths = [e.num_rows for e in examples]
        last = self.target.info.num_layers
        wanted = sorted({*self.taps, last})
        engine = Engine(self.target.model, num_slots=len(examples), max_length=max(lengths), taps=wanted)
        segments = [Segment(slot=i, start=0, ids=e.ids[:-1]) for i, e in enumerate(examples)]
        out = engine.forward(segments, logits_at=[0])
        final = self._norm(out.taps[last])
        self._check(final[0], out.logits[0])
        states = {t: torch.split(out.taps[t], lengths) for t in self.taps}
        return [
            Features(taps=tuple(states[t][i] for t in self.taps), final=part, top=self._top(part, example))
            for i, (part, example) in enumerate(zip(torch.split(final, lengths), examples, strict=True))
        ]

    def _check(self, final: Tensor, logits: Tensor) -> None:
        """Make sure, once, that the head alone gives the target's logits.

        Raises:
            UserError: the target scales or caps them.
        """
        if self._checked:
            return
        own = (final @ self._head.T).float()
        if float((own - logits).abs().max()) > 0.05 * float(logits.abs().max()):
            raise UserError(
                f"target {self.target.info.name!r} scales, shifts or caps its logits behind the head, which training "
                "does not take into account yet"
            )
        self._checked = True

    def _top(self, final: Tensor, example: Example) -> Tensor:
        """Most probable next token of the answer rows; -1 before them: nobody is asked there."""
        top = torch.full((final.shape[0],), -1, dtype=torch.int64)
        first = len(example.prompt_ids) - 1
        for start in range(first, final.shape[0], _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            # max and not argmax: the same answer, several times faster on a CPU
            top[rows] = (final[rows] @ self._head.T).max(-1).indices.cpu()
        return top


def example_key(example: Example) -> str:
    """Hash of an example's ids and of where its answer starts."""
    ids = np.asarray([len(example.prompt_ids), *example.ids], dtype="<i8")
    return hashlib.sha256(ids.tobytes()).hexdigest()[:24]


@dataclass(slots=True)
class TapCache:
    """States on disk; implements ``TapSource``."""

    path: Path
    source: TargetStates
    budget: int
    _start: dict[str, tuple[int, int]]
    """Example key -> (first row, rows)."""
    _rows: int

    @staticmethod
    def taps_of(path: Path) -> tuple[int, ...] | None:
        """Return the taps of the cache at ``path``; None where there is none yet."""
        head = path / "cache.json"
        return tuple(json.loads(head.read_text())["taps"]) if head.exists() else None

    @classmethod
    def open(cls, path: Path, target: Target, *, taps: Sequence[int], budget: int) -> TapCache:
        """Open or start a cache.

        Args:
            path: its directory.
            target: computes what is missing.
            taps: ``hidden_states`` indices.
            budget: bytes it may take on disk.

        Raises:
            UserError: the directory holds states of another target, or other taps.
        """
        path.mkdir(parents=True, exist_ok=True)
        info = target.info
        meta = {
            "target": info.fingerprint, "dtype": info.dtype, "taps": list(taps), "width": info.hidden_size
        }  # fmt: skip
        head = path / "cache.json"
        if head.exists():
            found = json.loads(head.read_text())
            if found != meta:
                raise UserError(
                    f"{path} holds states of another target or other taps ({found}); use another --cache"
                )
        else:
            head.write_text(json.dumps(meta))
        cache = cls(path=path, source=TargetStates(target, taps), budget=budget, _start={}, _rows=0)
        index = path / "index.jsonl"
        if index.exists():
            whole, _, torn = index.read_text().rpartition("\n")
            if torn:
                index.write_text(whole + "\n" if whole else "")
            for row in map(json.loads, whole.splitlines()):
                cache._start[row["key"]] = (row["start"], row["rows"])
                cache._rows = row["start"] + row["rows"]
        return cache

    @property
    def _columns(self) -> int:
        return len(self.source.taps) + 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return 2 * self._columns * self.source.target.info.hidden_size + 4

    def missing(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples it has no states of."""
        return [e for e in examples if example_key(e) not in self._start]

    def extend(
        self, examples: Sequence[Example], on_progress: Callable[[int, int], None] = lambda _done, _all: None
    ) -> None:
        """Compute and append what is missing.

        Raises:
            UserError: the budget or the disk does not hold it; what is there stays.
        """
        missing = self.missing(examples)
        need = sum(e.num_rows for e in missing) * self.row_bytes
        if self._rows * self.row_bytes + need > self.budget:
            raise UserError(
                f"the states of {len(examples)} answers take {(self._rows * self.row_bytes + need) / 2**30:.1f} GiB, "
                f"more than the budget of {self.budget / 2**30:.1f} GiB; raise --cache-gb, or train without --cache"
            )
        free = shutil.disk_usage(self.path).free
        if need > free:
            raise UserError(
                f"the states need {need / 2**30:.1f} GiB, but {self.path} has {free / 2**30:.1f} GiB left; "
                "name another disk with --cache, or train without it"
            )
        done = 0
        for group in _groups(missing):
            self._append(group, self.source.compute(group))
            done += len(group)
            on_progress(done, len(missing))

    def _append(self, examples: Sequence[Example], features: Sequence[Features]) -> None:
        # rows first, index last: an index line vouches for its rows; a torn tail is overwritten
        states = [torch.stack([*f.taps, f.final], dim=1).to(torch.bfloat16).cpu() for f in features]
        tops = [f.top.to(torch.int32).cpu().numpy() for f in features]
        for name, width, parts in (
            (
                "states.bin",
                2 * self._columns * states[0].shape[-1],
                [s.view(torch.int16).numpy() for s in states],
            ),
            ("top.bin", 4, tops),
        ):
            file = self.path / name
            with file.open("r+b" if file.exists() else "w+b") as out:
                out.seek(self._rows * width)
                for part in parts:
                    out.write(part.tobytes())
        with (self.path / "index.jsonl").open("a") as index:
            for example in examples:
                key = example_key(example)
                index.write(json.dumps({"key": key, "start": self._rows, "rows": example.num_rows}) + "\n")
                self._start[key] = (self._rows, example.num_rows)
                self._rows += example.num_rows

    def read(self, example: Example) -> Features:
        """Read one example's states, computing them where they are missing."""
        where = self._start.get(example_key(example))
        if where is None:
            return self.source.read(example)
        start, rows = where
        width = self.source.target.info.hidden_size
        count = rows * self._columns * width
        states = np.fromfile(
            self.path / "states.bin", dtype=np.int16, count=count, offset=2 * start * self._columns * width
        )
        top = np.fromfile(self.path / "top.bin", dtype=np.int32, count=rows, offset=4 * start)
        table = torch.from_numpy(states).view(torch.bfloat16).view(rows, self._columns, width)
        columns = table.unbind(1)
        return Features(taps=columns[:-1], final=columns[-1], top=torch.from_numpy(top).long())


def _groups(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Whole examples of about ``_PASS_TOKENS`` tokens together."""
    group: list[Example] = []
    room = _PASS_TOKENS
    for example in examples:
        if group and example.num_rows > room:
            yield group
            group, room = [], _PASS_TOKENS
        group.append(example)
        room -= example.num_rows
    if group:
        yield group
