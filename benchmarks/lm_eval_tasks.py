r"""Tasks of lm-eval as suites: prompts made by lm-eval's own code, answered, perturbed and scored here.

Every ``generate_until`` task that lm-eval's task manager can load is a suite: by name (tasks, groups and tags), or as
a YAML file of the user's own. lm-eval writes the messages (description, few-shot examples, question, the beginning of
the answer), the target's template is applied here. Other output types have no answer to draft and are refused.

Example: ``LmEvalSuite("gsm8k_cot").load(SuiteRequest(limit=4, num_fewshot=2))`` returns four prompts whose history is
two solved examples, and whose ``stop_strings`` are the task's ``until``.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specbench.benchmarks.sandbox import CodeEval
from specbench.errors import SpecbenchWarning, UserError
from specbench.types import Message, Prompt, SuiteInfo, SuiteRequest

PREFIX = "lm-eval:"
"""What a suite's name begins with when it is a task of lm-eval."""

FEWSHOT_SEED = 1234
"""lm-eval's own default; a run's seed is added to it."""

INSTALL = "pip install 'specbench[lm-eval]'"

_MARK = "\x00messages"
"""Before the messages that lm-eval hands to the chat template, which is not applied there but here."""

_LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_PLAIN = frozenset({"until", "do_sample", "temperature", *_LIMIT_NAMES})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A task of lm-eval, ready to make prompts and to score answers."""

    name: str
    version: str
    task: Any
    """The lm-eval ``Task``."""
    num_fewshot: int | None = None
    """The task's own number of solved examples, where it has one."""

    @property
    def suite(self) -> str:
        """The suite's name in rows."""
        return PREFIX + self.name

    @property
    def runs_code(self) -> bool:
        """Whether scoring executes what the model wrote."""
        return bool(getattr(self.task, "UNSAFE_CODE", False))


@dataclass(frozen=True, slots=True)
class LmEvalSuite:
    """The suite that a task, a group or a tag of lm-eval makes, or a YAML file.

    Args:
        spec: what follows ``lm-eval:`` on the command line.
    """

    spec: str

    @property
    def info(self) -> SuiteInfo:
        """Name and where the prompts come from."""
        return SuiteInfo(name=PREFIX + self.spec, description=f"the lm-eval task {self.spec}")

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return the prompts of all its tasks, at most ``limit`` of each.

        Raises:
            UserError: lm-eval is not installed, no such task, its data cannot be had, or it is of a kind that no
                drafter can be measured on.
        """
        seed = FEWSHOT_SEED + request.seed
        return [
            prompt
            for loaded in load_tasks(self.spec)
            for prompt in task_prompts(loaded, request.num_fewshot, seed, request.limit)
        ]


def require_lm_eval(what: str) -> None:
    """Check that lm-eval is installed.

    Raises:
        UserError: it is not; says how to get it.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        missing = "" if error.name == "lm_eval" else f" ({error})"
        raise UserError(f"{what} needs lm-eval, which is not installed here{missing}: {INSTALL}") from error


def load_tasks(spec: str) -> list[LoadedTask]:
    """Return the ``generate_until`` tasks that ``spec`` names.

    Raises:
        UserError: see :meth:`LmEvalSuite.load`.
    """
    if not spec:
        raise UserError(f"{PREFIX} needs the name of a task behind it, or a YAML file")
    require_lm_eval(f"the suite {PREFIX + spec}")
    path = Path(spec).expanduser()
    stamp = path.stat().st_mtime_ns if path.is_file() else 0
    return list(_load(spec, stamp))


@lru_cache(maxsize=64)
def _load(spec: str, stamp: int) -> tuple[LoadedTask, ...]:
    del stamp  # only tells apart the states of a file that is edited within one process
    with quiet():
        manager, name = _manager(spec)
        _refuse_types(spec, manager, name)
        try:
            with (
                CodeEval.in_place_of_evaluate() if _may_run_code(manager, name) else contextlib.nullcontext()
            ):
                found = manager.load([name])["tasks"]
        except Exception as error:  # tasks, data sets and the hub's client raise whatever they like
            raise _unloadable(spec, manager, name, error) from error
    tasks = [
        LoadedTask(name=n, version=str(_version(t)), task=t, num_fewshot=t.get_config("num_fewshot"))
        for n, t in found.items()
    ]
    usable = [t for t in tasks if _output_type(t.task) == "generate_until"]
    if not usable:
        raise _wrong_type(spec, sorted({str(_output_type(t.task)) for t in tasks}))
    if len(usable) < len(tasks):
        left = ", ".join(t.name for t in tasks if t not in usable)
        warnings.warn(
            f"{PREFIX + spec}: {left} ask for log-likelihoods and have no answer to draft; they are left out, "
            f"name the others one by one to be rid of this line",
            SpecbenchWarning,
            stacklevel=2,
        )
    return tuple(usable)


def _manager(spec: str) -> tuple[Any, str]:
    """Return a task manager that knows ``spec``, and the name to ask it for.

    The whole catalogue takes many seconds to read, so the folders that a name points at are tried first.
    """
    from lm_eval.tasks import TaskManager

    path = Path(spec).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"there is no task file {spec}; check the spelling of the path")
        settings = _raw(path)
        near = TaskManager(include_path=path.resolve().parent, include_defaults=False)
        if "group" not in settings or "class" in settings:
            return near, str(path)
        known = set(_members(settings)) <= set(near.all_tasks)
        # lm-eval finds a group by its name only
        return near if known else TaskManager(include_path=path.resolve().parent), str(settings["group"])
    for folder in _folders(spec):
        near = TaskManager(include_path=folder, include_defaults=False)
        if spec in near.all_subtasks:
            return near, spec
    everything = _catalogue()
    if spec not in everything.all_tasks:
        close = difflib.get_close_matches(spec, everything.all_tasks, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(PREFIX + name) for name in close)}?" if close else ""
        raise UserError(f"lm-eval has no task {spec!r}; {hint or '`lm_eval ls tasks` lists all of them'}")
    return everything, spec


@lru_cache(maxsize=1)
def _catalogue() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def lm_eval_folder() -> Path:
    """Return the folder of lm-eval's own tasks."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _folders(name: str) -> list[Path]:
    """Return the folders of lm-eval's own tasks whose name begins ``name``, the longest first."""
    root = lm_eval_folder()
    names = (name[:end] for end in range(len(name), 2, -1))
    return [root / n for n in names if re.fullmatch(r"[\w-]+", n) and (root / n).is_dir()]


def _raw(path: Path) -> Mapping[str, Any]:
    """Return a task file's settings, its functions not imported.

    Raises:
        UserError: it is no YAML, or no task.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        settings: Mapping[str, Any] = load_yaml(path, resolve_func=False)
    except Exception as error:  # YAML, includes and files each have their own
        reason = " ".join(str(error).split())
        raise UserError(f"the task file {path} cannot be read: {reason}") from error
    if not {"task", "group", "class"} & set(settings):
        raise UserError(f"{path} is no lm-eval task: it has none of the keys task, group and class")
    return settings


def _members(settings: Mapping[str, Any]) -> list[str]:
    """Return the names that a group's file lists."""
    listed = settings.get("task")
    if not isinstance(listed, list):
        return []
    return [str(m.get("task") or m.get("group")) if isinstance(m, dict) else str(m) for m in listed]


def _settings(manager: Any, name: str) -> Mapping[str, Any]:
    """Return what a task's file says, before anything is imported or fetched; empty for tags."""
    entry = manager.task_index.get(name)
    if entry is not None:
        return entry.cfg or {}
    path = Path(name).expanduser()
    return _raw(path) if path.is_file() else {}


def _may_run_code(manager: Any, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether the task, or one of a group or tag, runs code that a model wrote."""
    settings = _settings(manager, name)
    entry = manager.task_index.get(name)
    members = {*_members(settings), *(entry.tags if entry is not None and not settings else ())} - seen
    return bool(settings.get("unsafe_code")) or any(
        _may_run_code(manager, m, seen | members) for m in members
    )


def _refuse_types(spec: str, manager: Any, name: str) -> None:
    """Refuse a task of another output type before its data is fetched.

    Raises:
        UserError: it has one.
    """
    settings = _settings(manager, name)
    kind = settings.get("output_type", "generate_until")
    if "class" not in settings and "group" not in settings and kind != "generate_until":
        raise _wrong_type(spec, [str(kind)])


def _wrong_type(spec: str, kinds: Sequence[str]) -> UserError:
    asked = " and ".join(kinds)
    return UserError(
        f"{PREFIX + spec} asks for {asked}, which no answer is generated for, so there is nothing to draft; name a "
        f"generate_until task, or score it with `specbench lm-eval`, where the target runs alone"
    )


def _output_type(task: Any) -> Any:
    return task.OUTPUT_TYPE or task.get_config("output_type")


def _version(task: Any) -> Any:
    metadata = task.get_config("metadata")
    named = metadata.get("version") if isinstance(metadata, dict) else None
    return named if named is not None else task.VERSION


def _unloadable(spec: str, manager: Any, name: str, error: Exception) -> UserError:
    """Return the sentence about a task that could not be loaded."""
    data = _settings(manager, name).get("dataset_path")
    where = f"its data set {data}" if data else "its data"
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 8:
        chain.append(cause)  # type: ignore[arg-type]
    text = " ".join(f"{type(e).__name__} {e}" for e in chain).lower()
    if "gated" in text or "401" in text or "403" in text or "awaiting a review" in text:
        return UserError(
            f"{PREFIX + spec}: {where} is gated; ask for access on its page on the hub and log in with 'hf auth login'"
        )
    offline = ("connect", "offline", "resolve", "timed out", "localentrynotfound", "max retries")
    if data not in (None, "json", "csv", "parquet", "arrow") and any(word in text for word in offline):
        return UserError(
            f"{PREFIX + spec}: {where} is not in the local cache and the Hugging Face hub is out of reach; connect "
            f"once, or copy the task file and name local files under dataset_path and dataset_kwargs"
        )
    said = (str(error).strip().splitlines() or [""])[0].rstrip(".") or type(error).__name__
    return UserError(
        f"{PREFIX + spec} cannot be loaded: {type(error).__name__}: {said}; mend the task or its data"
    )


def task_prompts(
    loaded: LoadedTask, num_fewshot: int | None, seed: int, limit: int | None = None
) -> list[Prompt]:
    """Return a task's prompts as lm-eval makes them.

    Args:
        loaded: the task.
        num_fewshot: solved examples; None: the task's own number. As in lm-eval, a task that sets 0 keeps it.
        seed: of the choice of examples.
        limit: at most this many.

    Raises:
        UserError: the task needs more than text, or fails on one of its documents.
    """
    instances = build_instances(loaded, num_fewshot, seed, limit)
    shots = int(loaded.task.get_config("num_fewshot") or 0)
    _say_unused(loaded, instances[0].args[1])
    note = f"lm-eval task {loaded.name}, version {loaded.version}, {shots} examples, few-shot seed {seed}"
    return [_prompt(loaded, instance, note, {"num_fewshot": shots, "seed": seed}) for instance in instances]


def build_instances(
    loaded: LoadedTask, num_fewshot: int | None = None, seed: int = FEWSHOT_SEED, limit: int | None = None
) -> list[Any]:
    """Return a task's requests, one a document; their first argument holds the messages.

    Raises:
        UserError: see :func:`task_prompts`.
    """
    task, own = loaded.task, loaded.num_fewshot
    task.set_config("num_fewshot", (own or 0) if num_fewshot is None or own == 0 else num_fewshot)
    task.set_fewshot_seed(seed=seed)
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{loaded.suite} needs images or sound; specbench measures text alone, leave it out")
    try:
        # progress bars of lm-eval would run across ours
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            task.build_all_requests(
                limit=limit, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=_keep_messages
            )
    except Exception as error:  # a task's own code may raise anything
        said = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{loaded.suite} fails while it makes its prompts: {type(error).__name__}: {said}; mend the task, or "
            f"choose another --num-fewshot"
        ) from error
    return list(task.instances)


def _keep_messages(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    return _MARK + json.dumps(list(messages))


def messages_of(text: str) -> list[Message]:
    """Return the messages behind a request; a task that writes plain text has one."""
    if not text.startswith(_MARK):
        return [Message(role="user", content=text)]
    return [Message(role=m["role"], content=m["content"]) for m in json.loads(text.removeprefix(_MARK))]


def _prompt(loaded: LoadedTask, instance: Any, note: str, facts: Mapping[str, Any]) -> Prompt:
    text, asked = instance.args[:2]
    messages = messages_of(text)
    system = messages.pop(0).content if messages[0].role == "system" else None
    prefill = messages.pop().content if messages[-1].role == "assistant" else ""
    if not messages:
        raise UserError(f"{loaded.suite} asks nothing in document {instance.doc_id}; mend its doc_to_text")
    until = asked.get("until") or ()
    target = loaded.task.doc_to_target(instance.doc)
    limits = [asked[name] for name in _LIMIT_NAMES if asked.get(name) is not None]
    return Prompt(
        id=f"{loaded.suite}/{instance.doc_id}",
        suite=loaded.suite,
        category=loaded.name,
        turns=(messages[-1].content,),
        system=system,
        history=tuple(messages[:-1]),
        reference=target if isinstance(target, str) else None,
        max_new_tokens=int(limits[0]) if limits else None,
        prefill=prefill,
        stop_strings=(until,) if isinstance(until, str) else tuple(until),
        meta={
            "note": note,
            "lm_eval_task": loaded.name,
            "lm_eval_version": loaded.version,
            "lm_eval_doc": str(instance.doc_id),
            "num_fewshot": str(facts["num_fewshot"]),
            "fewshot_seed": str(facts["seed"]),
        },
    )


def _say_unused(loaded: LoadedTask, asked: Mapping[str, Any]) -> None:
    """Name what a task asks for and a run does not do."""
    temperature = float(asked.get("temperature") or 0.0)
    unused = [f"{name} {asked[name]}" for name in sorted(set(asked) - _PLAIN)]
    if asked.get("do_sample") and temperature > 0:
        unused.append(f"temperature {temperature:g}")
    if unused:
        warnings.warn(
            f"{loaded.suite} asks for {', '.join(unused)}; the run's own --temperature, --top-p and --top-k count",
            SpecbenchWarning,
            stacklevel=3,
        )
    repeats = int(loaded.task.get_config("repeats") or 1)
    if repeats > 1:
        warnings.warn(
            f"{loaded.suite} asks for {repeats} answers to each question; a run takes one, so its score is not "
            f"lm-eval's: use `specbench lm-eval` for that",
            SpecbenchWarning,
            stacklevel=3,
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's chatter about defaults, and progress bars of data sets, off the terminal."""
    import datasets

    logger = logging.getLogger("lm_eval")
    before, shown = logger.level, datasets.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(before)
        if shown:
            datasets.enable_progress_bars()
