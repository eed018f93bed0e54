"""``specbench lm-eval``: lm-eval's own command line, with specbench among its models.

Example:
    specbench lm-eval --model_args target=smollm2-135m,drafter=zoo:eagle3.1,depth=5 --tasks gsm8k --limit 20
"""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING

import click

from specbench.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specbench.runners.lm_eval_model import SpecbenchLM

_OTHERS = ("ls", "validate")


@click.command(
    name="lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> int:
    """Run lm-eval with specbench as its model: lm-eval's tasks and metrics, acceptance beside them.

    ARGUMENTS are lm-eval's own; `--model specbench` is put in where no model is named. Its --model_args are
    target, drafter (or none), depth, runner (decode or vllm), check_lossless, acceptance_file, dtype, seed,
    max_length, add_bos_token and trust_remote_code.

    \b
    Examples:
      specbench lm-eval --model_args target=smollm2-135m,drafter=zoo:eagle3.1,depth=5 --tasks gsm8k
      specbench lm-eval --model_args drafter=zoo:eagle3,check_lossless=True --tasks my_task --include_path tasks/
    """
    from specbench.benchmarks.lm_eval_tasks import require_lm_eval

    require_lm_eval("specbench lm-eval")
    words = list(arguments)
    if words[:1] in (["--help"], ["-h"]):
        click.echo(click.get_current_context().get_help())
        return 0
    if words[:1] != ["run"] and (not words or words[0] not in _OTHERS):
        words.insert(0, "run")
    if words[0] == "run" and not any(w in ("--model", "-M") or w.startswith("--model=") for w in words):
        words[1:1] = ["--model", "specbench"]
    models = _run(words)
    for model in models:
        _print_acceptance(model.get_model_info()["specbench"])
    return 1 if any(model.lossy for model in models) else 0


def _run(words: list[str]) -> list[SpecbenchLM]:
    """Hand over to lm-eval; return the models it made.

    Raises:
        UserError: what lm-eval refuses, in its words.
    """
    import transformers
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from specbench.runners.lm_eval_model import SpecbenchLM

    transformers.utils.logging.disable_progress_bar()
    before, made = sys.argv, len(SpecbenchLM.made)
    sys.argv = ["specbench lm-eval", *words]
    try:
        setup_logging()
        cli = HarnessCLI()
        cli.execute(cli.parse_args())
    except UserError:
        raise
    except (ValueError, KeyError, OSError, AssertionError) as error:
        raise _refusal(error) from error
    finally:
        sys.argv = before
    return SpecbenchLM.made[made:]


def _refusal(error: Exception) -> UserError:
    from specbench.benchmarks.lm_eval_tasks import lm_eval_folder

    text = " ".join(str(error.args[0] if error.args else error).split())
    if "Tasks not found: " in text:
        missing = text.partition("Tasks not found: ")[2].split(", ")[0]
        # the files' names: lm-eval's catalogue takes many seconds to read, and has been read once already
        known = {path.stem for path in lm_eval_folder().rglob("*.yaml")}
        near = difflib.get_close_matches(missing, sorted(known), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm_eval ls tasks` lists them"
        return UserError(f"lm-eval has no task {missing!r}; {hint}")
    if "confirm_run_unsafe_code" in text:
        task = text.partition("task: ")[2].split(" ")[0]
        return UserError(
            f"the lm-eval task {task} runs code that the model wrote; allow it with --confirm_run_unsafe_code"
        )
    return UserError(f"lm-eval stopped: {type(error).__name__}: {text[:300].rstrip('.')}")


def _print_acceptance(info: Mapping[str, object]) -> None:
    """Print what lm-eval's table has no columns for."""
    acceptance = info["acceptance"]
    assert isinstance(acceptance, dict)
    click.echo(
        f"drafter {info['drafter']}, k {info['depth']}, runner {info['runner']}, target {info['target']}"
    )
    for task, found in acceptance.items():
        rate = found["accepted_per_round"]
        shown = (
            "no rounds" if rate is None else f"accepted_per_round {rate:.3f}, tokens_per_round {rate + 1:.3f}"
        )
        click.echo(f"  {task}: {shown}, {found['rounds']} rounds in {found['answers']} answers")
    if cut := info["answers_cut_by_their_limit"]:
        click.echo(
            f"  {cut} answers met no stop string and were cut by their limit; raise max_gen_toks to be sure"
        )
    lossless = info["lossless"]
    if isinstance(lossless, dict):
        click.echo(f"  answers that differ from the target's own: {lossless['different']}")
        for sentence in lossless["samples"][:20]:
            click.echo(f"    {sentence}")
