"""Trace packs: a target's answers and states on disk, to score drafters where the target is not installed.

A pack is a directory of plain files, none of which can hold code:

- ``pack.json``: format version, target facts, the configuration that made it, taps, dtype, prompts hash, and the size
  and SHA-256 of every other file;
- ``head.safetensors``: what drafters share with the target: ``embed``, ``head`` unless tied, ``norm``;
- ``shard-00000.safetensors`` ...: for trace 000012 the tensors ``000012.tap.2`` [N-1, H], ``000012.logprobs``,
  ``000012.margins`` and ``000012.entropies`` [A]; the header repeats the shard's index rows, so that a writer that was
  killed finds its way without the index;
- ``index.parquet``: one row per trace, with token ids, spans and the condition.

Files are written whole under another name and renamed, ``pack.json`` last.

Example:
    pack = TracePack("packs/first")
    [entry.prompt_id for entry in pack.entries]      # "mini/chat-01", ...
    pack.trace(0).taps[15].shape                     # [N-1, 576], mapped from the file
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench import __version__
from specbench.config import TARGET_OPTIONS, RunConfig
from specbench.errors import UserError
from specbench.types import (
    AnswerPath,
    ConditionInfo,
    RenderedPrompt,
    Sampling,
    Span,
    TargetInfo,
    TargetWeights,
    Trace,
)

FORMAT_VERSION = 1
PACK_FILE = "pack.json"
HEAD_FILE = "head.safetensors"
INDEX_FILE = "index.parquet"
_PARTIAL = ".partial"
_LOCK_FILE = ".lock"
_ROWS = "rows"
"""Key of the index rows in a shard's header."""
SHARD_BYTES = 64 << 20
"""A shard is closed at this size: what a killed writer can lose, and about what it holds in memory."""
_OPEN_SHARDS = 4


class TraceKey(NamedTuple):
    """One trace within a pack."""

    prompt_id: str
    turn: int
    condition: str
    answer_path: str


def _index_schema() -> Any:
    import pyarrow as pa

    span = pa.struct([("kind", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("suite", pa.string()),
            ("category", pa.string()),
            ("turn", pa.int32()),
            ("condition", pa.string()),
            ("family", pa.string()),
            ("severity", pa.int32()),
            ("description", pa.string()),
            ("reason", pa.string()),
            ("parameters", pa.string()),  # JSON: conditions differ in what they have
            ("answer_path", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("answer_ids", pa.list_(pa.int32())),
            ("spans", pa.list_(span)),
            ("bos_count", pa.int32()),
            ("template_hash", pa.string()),
            ("notes", pa.list_(pa.string())),
            ("max_new_tokens", pa.int32()),
            ("finish", pa.string()),
            ("temperature", pa.float64()),
            ("top_p", pa.float64()),
            ("top_k", pa.int32()),
            ("sampling_seed", pa.int64()),
            ("shard", pa.string()),
            ("key", pa.string()),
        ]
    )


def _trace_row(trace: Trace, shard: str, key: str) -> dict[str, Any]:
    prompt, condition, sampling = trace.prompt, trace.prompt.condition, trace.sampling
    return {
        "prompt_id": prompt.prompt_id,
        "suite": prompt.suite,
        "category": prompt.category,
        "turn": prompt.turn,
        "condition": condition.id,
        "family": condition.family,
        "severity": condition.severity,
        "description": condition.description,
        "reason": condition.reason,
        "parameters": json.dumps(dict(condition.parameters)),
        "answer_path": trace.path,
        "token_ids": list(prompt.token_ids),
        "answer_ids": list(trace.answer_ids),
        "spans": [asdict(span) for span in prompt.spans],
        "bos_count": prompt.bos_count,
        "template_hash": prompt.template_hash,
        "notes": list(prompt.notes),
        "max_new_tokens": prompt.max_new_tokens,
        "finish": trace.finish,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "sampling_seed": sampling.seed,
        "shard": shard,
        "key": key,
    }


def _row_key(row: Mapping[str, Any]) -> TraceKey:
    return TraceKey(*(row[name] for name in TraceKey._fields))


def _condition(row: Mapping[str, Any]) -> ConditionInfo:
    return ConditionInfo(
        id=row["condition"],
        family=row["family"],
        severity=row["severity"],
        description=row["description"],
        reason=row["reason"],
        parameters=json.loads(row["parameters"]),
    )


def _prompt(row: Mapping[str, Any]) -> RenderedPrompt:
    return RenderedPrompt(
        prompt_id=row["prompt_id"],
        suite=row["suite"],
        category=row["category"],
        turn=row["turn"],
        condition=_condition(row),
        token_ids=tuple(row["token_ids"]),
        spans=tuple(Span(**span) for span in row["spans"]),
        bos_count=row["bos_count"],
        template_hash=row["template_hash"],
        notes=tuple(row["notes"]),
        max_new_tokens=row["max_new_tokens"],
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _publish(work: Path, path: Path) -> None:
    """Give a finished file its name, so that it is there whole or not at all, power cuts included."""
    with work.open("rb+") as file:
        os.fsync(file.fileno())
    work.replace(path)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    work = path.with_name(path.name + _PARTIAL)
    work.write_text(json.dumps(record, indent=1) + "\n")
    _publish(work, path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    work = path.with_name(path.name + _PARTIAL)
    save_file(dict(tensors), work, metadata=dict(header))
    work.chmod((path.parent / PACK_FILE).stat().st_mode)  # safetensors leaves files to their owner alone
    _publish(work, path)


def _read_record(path: Path) -> dict[str, Any]:
    """Read a pack's ``pack.json`` and check that this version of specbench can make sense of it."""
    file = path / PACK_FILE
    try:
        record = json.loads(file.read_text())
        version = record["format_version"]
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is no trace pack: it has no {PACK_FILE}; `specbench trace --out {path}` makes one"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is not a trace pack's record; copy the pack again, or trace again"
        ) from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file} is of trace pack format {version}, and this specbench {__version__} reads format "
            f"{FORMAT_VERSION}; use the specbench that wrote it "
            f"({record.get('specbench_version', 'unknown')}), or trace again"
        )
    assert isinstance(record, dict)
    return record


class PackWriter:
    """Writes a trace pack, or goes on with one that was begun.

    ``add`` may be given to ``ReplayRunner.on_trace``. The pack can be read once :meth:`finish` was called; what
    :meth:`close` alone leaves behind is what the next writer goes on with.
    """

    def __init__(
        self,
        path: str | Path,
        weights: TargetWeights,
        *,
        config: RunConfig,
        taps: Sequence[int],
        prompts_hash: str,
        command: str = "",
        versions: Mapping[str, str] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Make the directory and its head, or pick up what is there.

        Args:
            path: the pack's directory.
            weights: of the target.
            config: the run whose answers these are.
            taps: ``hidden_states`` indices kept of every trace.
            prompts_hash: of the run's plan.
            command: recorded.
            versions: of packages, recorded.
            shard_bytes: a shard is closed once it holds this much.

        Raises:
            UserError: the directory cannot be written, is in use, or holds something else.
        """
        self.path = Path(path).expanduser()
        self.taps = tuple(sorted(set(taps)))
        self.shard_bytes = shard_bytes
        self._record: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "specbench_version": __version__,
            "complete": False,
            "target": json.loads(json.dumps(asdict(weights.info), default=str)),
            "tied": _same_tensor(weights.head, weights.embed),
            "taps": list(self.taps),
            "dtype": weights.info.dtype,
            "prompts_hash": prompts_hash,
            "config": config.to_json(),
            "command": command,
            "versions": dict(versions or {}),
            "num_traces": 0,
            "num_tokens": 0,
            "files": {},
        }
        self._rows: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._waiting: list[dict[str, Any]] = []
        self._bytes = 0
        self._lock: Any = None
        try:
            self._open(weights)
        except OSError as error:
            self._unlock()
            raise self._disk_error(error) from error
        except BaseException:
            self._unlock()
            raise
        self._keys = {_row_key(row) for row in self._rows}

    def _open(self, weights: TargetWeights) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(self.path)
        if (self.path / PACK_FILE).exists():
            before = _read_record(self.path)
            self._check_same(before)
            self._record["files"] = dict(before["files"])
        elif any(p.name != _LOCK_FILE and not p.name.endswith(_PARTIAL) for p in self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and holds no {PACK_FILE}; give another directory")
        for left in self.path.glob("*" + _PARTIAL):
            left.unlink()
        self._recover()
        self._save_record()
        if not (self.path / HEAD_FILE).exists():
            tensors = {"embed": weights.embed, "norm": weights.norm}
            if not self._record["tied"]:
                tensors["head"] = weights.head
            kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
            _write_tensors(self.path / HEAD_FILE, kept, {})
        self._save_record(HEAD_FILE)

    def _check_same(self, before: Mapping[str, Any]) -> None:
        """A pack that goes on must be the pack that was begun."""
        changed = [
            label
            for label, name in (("the taps", "taps"), ("the prompts", "prompts_hash"), ("the dtype", "dtype"))
            if before.get(name) != self._record[name]
        ]
        if before["target"].get("fingerprint") != self._record["target"]["fingerprint"]:
            changed.append("the target")
        old, new = before["config"], self._record["config"]
        # where the prompt files lie does not matter as long as the prompts are the same
        options = [name for name in TARGET_OPTIONS if name != "data_dir" and old.get(name) != new[name]]
        changed += [f"--{name.replace('_', '-')}" for name in options]
        if changed:
            raise UserError(
                f"{self.path} holds another trace pack: {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} "
                "different; give another directory"
            )

    def _recover(self) -> None:
        """Read back the rows of the shards that are there."""
        from safetensors import SafetensorError, safe_open

        for shard in sorted(self.path.glob("shard-*.safetensors")):
            try:
                with safe_open(shard, "pt") as file:
                    self._rows += json.loads(file.metadata()[_ROWS])
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{shard} is corrupt; delete it and give the command again, which redoes what it held"
                ) from error

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The index rows of all traces so far, as plain values."""
        return [*self._rows, *self._waiting]

    def has(self, key: tuple[str, int, str, str]) -> bool:
        """Whether the pack holds the trace of (prompt id, turn, condition id, answer path)."""
        return TraceKey(*key) in self._keys

    def add(self, trace: Trace) -> None:
        """Keep one trace; a trace that is there already is passed over.

        Raises:
            UserError: the disk refuses.
        """
        prompt = trace.prompt
        key = TraceKey(prompt.prompt_id, prompt.turn, prompt.condition.id, trace.path)
        if key in self._keys:
            return
        number = f"{len(self._rows) + len(self._waiting):06d}"
        tensors = {f"{number}.tap.{tap}": trace.taps[tap] for tap in self.taps}
        for name in ("logprobs", "margins", "entropies"):
            tensors[f"{number}.{name}"] = getattr(trace, name)
        for name, tensor in tensors.items():
            # a copy: the states may be views of buffers that the next answer overwrites
            self._tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            self._bytes += tensor.numel() * tensor.element_size()
        self._waiting.append(_trace_row(trace, self._shard_name(), number))
        self._keys.add(key)
        if self._bytes >= self.shard_bytes:
            self.flush()

    def _shard_name(self) -> str:
        taken = [int(row["shard"][6:11]) for row in self._rows[-1:]]
        return f"shard-{taken[0] + 1 if taken else 0:05d}.safetensors"

    def flush(self) -> None:
        """Write what waits as a shard, whatever its size.

        Raises:
            UserError: the disk refuses.
        """
        if not self._waiting:
            return
        name = self._waiting[0]["shard"]
        try:
            _write_tensors(self.path / name, self._tensors, {_ROWS: json.dumps(self._waiting)})
            self._rows += self._waiting
            self._waiting, self._tensors, self._bytes = [], {}, 0
            self._save_record(name)
        except OSError as error:
            raise self._disk_error(error) from error

    def finish(self, prompts: Sequence[str] = (), conditions: Sequence[str] = ()) -> None:
        """Write the index and mark the pack as complete.

        Args:
            prompts: prompt ids in the order in which the index shall name them.
            conditions: condition ids, likewise.

        Raises:
            UserError: the disk refuses.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.flush()
        place = {name: i for i, name in enumerate(prompts)}
        rank = {name: i for i, name in enumerate(conditions)}
        rows = sorted(
            self._rows,
            key=lambda r: (
                r["turn"],
                r["answer_path"] == "forced",
                rank.get(r["condition"], len(rank)),
                place.get(r["prompt_id"], len(place)),
            ),
        )
        try:
            work = self.path / (INDEX_FILE + _PARTIAL)
            pq.write_table(pa.Table.from_pylist(rows, schema=_index_schema()), work, compression="zstd")
            _publish(work, self.path / INDEX_FILE)
            missing = {row["shard"] for row in rows} - set(self._record["files"])
            self._record["complete"] = True
            self._save_record(INDEX_FILE, *sorted(missing))
        except OSError as error:
            raise self._disk_error(error) from error

    def close(self) -> None:
        """Write what waits and let others at the directory; does not complete the pack."""
        try:
            if self._lock is not None:
                self.flush()
        finally:
            self._unlock()

    def _save_record(self, *files: str) -> None:
        """Write ``pack.json``, with new checksums of ``files``."""
        for name in files:
            self._record["files"][name] = _file_entry(self.path / name)
        self._record["files"] = dict(sorted(self._record["files"].items()))
        self._record["num_traces"] = len(self._rows)
        self._record["num_tokens"] = sum(len(r["token_ids"]) + len(r["answer_ids"]) for r in self._rows)
        _write_json(self.path / PACK_FILE, self._record)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _disk_error(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write the trace pack {self.path}: {error.strerror or error}; free space, mend its rights, or give "
            "another directory"
        )


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.device == b.device and a.shape == b.shape and a.data_ptr() == b.data_ptr())


def _take_lock(path: Path) -> Any:
    """Hold an exclusive lock on the pack, where the platform has one."""
    handle = (path / _LOCK_FILE).open("w")
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise UserError(
                f"another process writes to {path}; wait for it or give another directory"
            ) from error
    return handle


@dataclass(frozen=True, slots=True, kw_only=True)
class PackEntry:
    """What the index says of one trace, without its tokens."""

    number: int
    """Row in the index; what :meth:`TracePack.trace` takes."""
    prompt_id: str
    suite: str
    category: str
    turn: int
    condition: ConditionInfo
    path: AnswerPath
    prompt_tokens: int
    answer_tokens: int

    @property
    def key(self) -> TraceKey:
        """Names the trace."""
        return TraceKey(self.prompt_id, self.turn, self.condition.id, self.path)


class TracePack:
    """A finished trace pack, read one trace at a time; shards are mapped, not loaded.

    Head and index are checked against their checksums when they are read, a shard when it is first touched.

    Args:
        path: the pack's directory.

    Raises:
        UserError: no pack, another format version, an unfinished pack, a file that is missing or is not what was
            written (named).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._record = _read_record(self.path)
        try:
            self._files: dict[str, dict[str, Any]] = dict(self._record["files"])
            self.taps = tuple(int(tap) for tap in self._record["taps"])
            """``hidden_states`` indices that every trace has."""
            self.info = _target_info(self._record["target"])
            """Facts of the target."""
            self.config = RunConfig.from_json(self._record["config"])
            """The configuration that made the pack."""
            self.prompts_hash = str(self._record["prompts_hash"])
            """16 hex digits over the rendered first turns."""
            complete = bool(self._record["complete"])
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path / PACK_FILE} is not a trace pack's record; copy the pack again, or trace again"
            ) from error
        if not complete:
            raise UserError(
                f"the trace pack {self.path} is unfinished ({self._record.get('num_traces', 0)} traces so far); give "
                "the command that makes it again, it goes on where it stopped"
            )
        self.checksum = _sha256(self.path / PACK_FILE)[:16]
        """Over ``pack.json``, which holds the SHA-256 of every other file: equal checksum, equal pack."""
        self._verified: set[str] = set()
        self._shards: dict[str, Any] = {}
        self._check_files()

    def _check_files(self) -> None:
        for name, facts in self._files.items():
            file = self.path / name
            if Path(name).name != name:
                raise UserError(f"{self.path / PACK_FILE} names the file {name!r}, which is outside the pack")
            if not file.is_file():
                raise UserError(f"the trace pack lacks {file}; copy the pack again, or trace again")
            if file.stat().st_size != facts.get("bytes"):
                raise self._damaged(name)

    def _damaged(self, name: str) -> UserError:
        return UserError(
            f"{self.path / name} is not what was written (its checksum differs); copy the pack again, or trace again"
        )

    def _checked(self, name: str) -> Path:
        """Return the path of a file of the pack, after one look at its checksum."""
        if name not in self._files:
            raise UserError(f"the trace pack {self.path} lacks {name}; copy the pack again, or trace again")
        path = self.path / name
        if name not in self._verified:
            if _sha256(path) != self._files[name].get("sha256"):
                raise self._damaged(name)
            self._verified.add(name)
        return path

    def verify(self) -> None:
        """Read every file once.

        Raises:
            UserError: one of them is not what was written.
        """
        for name in self._files:
            self._checked(name)

    @property
    def num_bytes(self) -> int:
        """Size of all files but ``pack.json``."""
        return sum(int(facts["bytes"]) for facts in self._files.values())

    @cached_property
    def _table(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self._checked(INDEX_FILE)
        try:
            return pq.read_table(file).cast(_index_schema())
        except (pa.ArrowInvalid, ValueError, KeyError) as error:
            raise UserError(f"{file} is not a trace pack's index: {error}; trace again") from error

    @cached_property
    def entries(self) -> tuple[PackEntry, ...]:
        """All traces, in the order of the run that made them: turns, conditions, prompts."""
        import pyarrow.compute as pc

        table = self._table
        lengths = [pc.list_value_length(table[name]).to_pylist() for name in ("token_ids", "answer_ids")]
        names = [name for name in table.column_names if name not in ("token_ids", "answer_ids", "spans")]
        rows = table.select(names).to_pylist()
        return tuple(
            PackEntry(
                number=i,
                prompt_id=row["prompt_id"],
                suite=row["suite"],
                category=row["category"],
                turn=row["turn"],
                condition=_condition(row),
                path=row["answer_path"],
                prompt_tokens=prompt_tokens,
                answer_tokens=answer_tokens,
            )
            for i, (row, prompt_tokens, answer_tokens) in enumerate(zip(rows, *lengths, strict=True))
        )

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Trace]:
        return (self.trace(i) for i in range(len(self)))

    def prompt(self, number: int) -> RenderedPrompt:
        """Return the prompt of trace ``number``."""
        return _prompt(self._table.slice(number, 1).to_pylist()[0])

    def trace(self, number: int, taps: Iterable[int] | None = None) -> Trace:
        """Return trace ``number``.

        Args:
            number: row of the index.
            taps: those wanted; default all.

        Raises:
            UserError: its shard is not what was written, or the pack has no such tap.
        """
        row = self._table.slice(number, 1).to_pylist()[0]
        wanted = self.taps if taps is None else tuple(taps)
        lacking = sorted(set(wanted) - set(self.taps))
        if lacking:
            raise UserError(
                f"the trace pack {self.path} has the taps {', '.join(map(str, self.taps))}, not {lacking[0]}"
            )
        shard, key = self._shard(row["shard"]), row["key"]
        trace = Trace(
            prompt=_prompt(row),
            answer_ids=tuple(row["answer_ids"]),
            taps={tap: shard.get_tensor(f"{key}.tap.{tap}") for tap in wanted},
            logprobs=shard.get_tensor(f"{key}.logprobs"),
            margins=shard.get_tensor(f"{key}.margins"),
            entropies=shard.get_tensor(f"{key}.entropies"),
            finish=row["finish"],
            sampling=Sampling(
                temperature=row["temperature"],
                top_p=row["top_p"],
                top_k=row["top_k"],
                seed=row["sampling_seed"],
            ),
            path=row["answer_path"],
        )
        return trace

    def _shard(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._shards:
            if len(self._shards) >= _OPEN_SHARDS:
                self._shards.pop(next(iter(self._shards)))
            self._shards[name] = safe_open(self._checked(name), "pt")
        return self._shards[name]

    def weights(self, device: str = "cpu") -> TargetWeights:
        """Return the tensors drafters share with the target; ``path`` is None, since its files are not here.

        Raises:
            UserError: the head is not what was written.
        """
        from safetensors.torch import load_file

        tensors = load_file(self._checked(HEAD_FILE), device=device)
        embed = tensors["embed"]
        return TargetWeights(
            info=self.info,
            embed=embed,
            head=tensors.get("head", embed),
            norm=tensors.get("norm"),
        )


def _target_info(values: Mapping[str, Any]) -> TargetInfo:
    known = {f.name for f in fields(TargetInfo)}
    facts: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known
    }
    return TargetInfo(**facts)
