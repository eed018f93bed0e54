"""From what a user writes after ``--suite`` to a suite.

Example: ``load_suite("mtbench")``, ``load_suite("questions.jsonl")`` and ``load_suite("lm-eval:gsm8k_cot")`` all
return something with ``info`` and ``load``.
"""

from __future__ import annotations

from pathlib import Path

from specbench import registry
from specbench.benchmarks.lm_eval_tasks import PREFIX, LmEvalSuite
from specbench.benchmarks.own_file import OwnFile
from specbench.errors import UserError
from specbench.types import Suite


def load_suite(name_or_path: str) -> Suite:
    """Return the suite of that name (built in or from a plug-in), the one that a file of the user's makes, or a task
    of lm-eval.

    A name that is registered is never taken for a path. A plug-in may register a suite or anything that
    returns one when called without arguments.

    Raises:
        UserError: no suite has the name and no file is there; a file bears a registered suite's name; the
            plug-in's object is no suite.
    """
    if name_or_path.startswith(PREFIX):
        return LmEvalSuite(name_or_path.removeprefix(PREFIX))
    known = registry.names("suites")
    if name_or_path not in known and (name_or_path.endswith(".jsonl") or Path(name_or_path).exists()):
        own = OwnFile(Path(name_or_path))
        if not own.path.exists():
            raise UserError(f"there is no prompt file {name_or_path}; check the spelling of the path")
        if own.info.name in known:
            raise UserError(
                f"{name_or_path} would be called {own.info.name!r} like a suite that exists; rename the file"
            )
        return own
    found = registry.load("suites", name_or_path)
    # A class satisfies the protocol's attribute check as its instances do, so it is told apart first.
    if isinstance(found, type) or (callable(found) and not isinstance(found, Suite)):
        found = found()
    if not isinstance(found, Suite):
        raise UserError(
            f"what is registered as the suite {name_or_path!r} has no 'info' and 'load'; mend the plug-in"
        )
    return found
