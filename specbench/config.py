"""Everything a run depends on, in one record that can be written down and read back.

Example: ``RunConfig(suite=("mini",), drafter="ngram", depth=(8,)).identity()`` names the run; two runs with the same
identity give the same rounds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specbench.errors import UserError, unknown_name

ANSWER_PATHS = ("free", "forced", "both")
SAMPLERS = ("greedy", "match", "rejection")
# How fast or where a run happens, and what is kept of it, does not change what it measures.
_NOT_IDENTITY = ("out", "device", "batch_size", "keep_traces", "throughput", "score", "run_generated_code")
# Count only where they are set, so that runs from before they existed keep their identity.
_IDENTITY_IF_SET = ("engine", "url", "num_fewshot")

TARGET_OPTIONS = (
    "suite",
    "perturb",
    "severity",
    "target",
    "limit",
    "seed",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "answer_path",
    "dtype",
    "data_dir",
    "lengths",
    "longctx_text",
    "template",
    "trust_remote_code",
    "num_fewshot",
)
"""What the target's answers depend on, whatever drafter is scored on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The options of ``specbench run``; every field has a default that works."""

    suite: tuple[str, ...] = ("mini",)
    perturb: tuple[str, ...] = ("paper",)
    """``paper``: the four template conditions that the drift paper measures."""
    severity: int | None = None
    target: str = "smollm2-135m"
    drafter: str = "default"
    """``default``: the bundled drafters of the demo target, and prompt lookup for any other."""
    depth: tuple[int, ...] = (8,)
    limit: int | None = None
    seed: int = 0
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    sampler: str = "auto"
    """auto: greedy at temperature 0, match above."""
    runner: str = "replay"
    answer_path: str = "free"
    full_chains: bool = False
    device: str = "auto"
    dtype: str = "auto"
    batch_size: int = 48
    data_dir: str | None = None
    lengths: tuple[int, ...] = (512, 2048)
    longctx_text: str | None = None
    template: str | None = None
    """A Jinja file used instead of the tokenizer's own template."""
    traces: str | None = None
    """A trace pack to score on instead of running a target; empty ``suite`` and ``perturb`` then mean all it holds."""
    keep_traces: bool = False
    engine: tuple[str, ...] = ()
    """``NAME=VALUE`` options of an engine runner (vllm, vllm-server)."""
    url: str | None = None
    """Of a server that runs already (vllm-server)."""
    throughput: tuple[int, ...] = ()
    """Numbers of users for which tokens/s are measured once the rounds are there (vllm)."""
    trust_remote_code: bool = False
    num_fewshot: int | None = None
    """Solved examples before each question of an lm-eval task; None: the task's own number."""
    score: bool = False
    """Score the answers, where the suite has a scorer."""
    run_generated_code: bool = False
    """Let scoring execute what the target wrote."""
    out: str = "runs/latest"

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UserError: one of them is off.
        """
        if not self.depth or min(self.depth) < 1:
            raise UserError("--depth must be 1 or more: it is the number of draft tokens proposed in a round")
        if self.limit is not None and self.limit < 1:
            raise UserError("--limit must be 1 or more prompts")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError("--num-fewshot must be 0 or more solved examples")
        if self.run_generated_code and not self.score:
            raise UserError("--run-generated-code is for scoring: add --score")
        if self.score and self.traces is not None:
            raise UserError(
                "--score needs the prompts' own references, which a trace pack does not hold: leave it out"
            )
        if self.max_new_tokens < 2:
            raise UserError(
                "--max-new-tokens must be 2 or more: the first token comes from the prefill, without a round"
            )
        if self.batch_size < 1:
            raise UserError("--batch-size must be 1 or more")
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError("sampling needs --temperature >= 0, 0 < --top-p <= 1 and --top-k >= 0")
        if self.answer_path not in ANSWER_PATHS:
            raise unknown_name("answer path", self.answer_path, ANSWER_PATHS)
        if self.answer_path != "free" and self.runner in ("decode", "vllm", "vllm-server"):
            raise UserError(
                f"--answer-path {self.answer_path} needs --runner replay; {self.runner} makes every answer itself"
            )
        if self.sampler != "auto" and self.sampler not in SAMPLERS:
            raise unknown_name("sampler", self.sampler, ("auto", *SAMPLERS))
        if self.traces is not None and (self.keep_traces or self.runner != "replay"):
            other = "--keep-traces" if self.keep_traces else f"--runner {self.runner}"
            raise UserError(f"--traces scores the answers a pack holds, no target runs: leave out {other}")
        if self.keep_traces and self.runner != "replay":
            raise UserError(f"--keep-traces needs --runner replay; the runner {self.runner} makes no traces")
        if self.throughput and (self.runner != "vllm" or min(self.throughput) < 1):
            raise UserError(
                "--throughput takes numbers of users of 1 or more, as in 1,4,16, and needs --runner vllm"
            )
        if self.url is not None and self.runner != "vllm-server":
            raise UserError(f"--url names a running server: it needs --runner vllm-server, not {self.runner}")
        self.engine_options()
        if self.traces is None:
            self.check_sampler()

    def check_sampler(self) -> None:
        """Check that sampler and temperature go together; on a trace pack, once its temperature is known.

        Raises:
            UserError: they do not.
        """
        if self.sampler == "greedy" and self.temperature > 0:
            raise UserError("--sampler greedy needs --temperature 0; use match or rejection")
        if self.sampler in ("match", "rejection") and self.temperature == 0:
            raise UserError(
                f"--sampler {self.sampler} needs --temperature above 0; greedy is what temperature 0 means"
            )

    def engine_options(self) -> dict[str, str]:
        """Return ``engine`` as a mapping.

        Raises:
            UserError: an entry is no NAME=VALUE, or comes twice.
        """
        options: dict[str, str] = {}
        for text in self.engine:
            name, equals, value = text.partition("=")
            if not equals or not name or not value:
                raise UserError(f"--engine takes NAME=VALUE, not {text!r}")
            if name in options:
                raise UserError(f"--engine {name} is given twice; leave one out")
            options[name] = value
        return options

    @property
    def resolved_sampler(self) -> str:
        """The sampler after ``auto`` is settled."""
        if self.sampler != "auto":
            return self.sampler
        return "greedy" if self.temperature == 0 else "match"

    def identity(self) -> str:
        """16 hex digits that name what is measured: equal for two runs that must give the same rounds."""
        settled = {
            k: v
            for k, v in asdict(self).items()
            if k not in _NOT_IDENTITY and (v not in (None, ()) or k not in _IDENTITY_IF_SET)
        }
        return hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """Read back what :meth:`to_json` wrote.

        Raises:
            UserError: an option this version does not know, or a value of another type.
        """
        known = {f.name: str(f.type) for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise unknown_name("option", name, known)
            if not _fits(value, known[name]):
                raise UserError(
                    f"the option {name!r} takes {known[name].replace(', ...', '')}, not {value!r}"
                )
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**options)

    @classmethod
    def from_file(cls, path: Path) -> RunConfig:
        """Read the configuration of a run's ``run.json`` (or a bare configuration).

        Raises:
            UserError: no such file, or no configuration in it.
        """
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not JSON: byte {error.start + 1} is not UTF-8") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
        values = content.get("config", content) if isinstance(content, dict) else None
        if not isinstance(values, dict):
            raise UserError(f"{path} holds no run configuration; give a run.json that `specbench run` wrote")
        try:
            return cls.from_json(values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


def _fits(value: Any, annotation: str) -> bool:
    """Whether a JSON value is of a field's type as annotated: ``int | None``, ``tuple[str, ...]``."""
    if annotation.startswith("tuple["):
        inner = annotation.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, list | tuple) and all(_fits(item, inner) for item in value)
    for name in annotation.split(" | "):
        if name == "None":
            if value is None:
                return True
        elif name == "float":
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif type(value).__name__ == name:
            return True
    return False
