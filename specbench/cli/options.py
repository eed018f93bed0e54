"""Options that several commands share, so that they mean and read the same everywhere.

Example:
    @click.command()
    @prompt_options
    @target_options
    def show(**options: Any) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from specbench.config import ANSWER_PATHS, RunConfig
from specbench.errors import UserError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def names(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Read names separated by commas."""
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def numbers(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read whole numbers separated by commas; ``4k`` is 4096.

    Raises:
        UserError: something else.
    """
    if value is None:
        return None
    found = []
    for text in value.split(","):
        try:
            scale = 1024 if text.strip().lower().endswith("k") else 1
            found.append(int(text.strip().lower().removesuffix("k")) * scale)
        except ValueError as error:
            raise UserError(
                f"--{param.name} takes whole numbers separated by commas, not {text!r}"
            ) from error
    return tuple(found)


def together(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Make one decorator of several, in the order in which ``--help`` shall name them."""

    def apply(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def given_options(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that the user wrote."""
    return {
        name: value
        for name, value in options.items()
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def make_config(ctx: click.Context, config_file: str | None, options: dict[str, Any]) -> RunConfig:
    """Make the configuration of the options, on top of a file's where one is given.

    Raises:
        UserError: an option is out of range, or the file holds no configuration.
    """
    if config_file is None:
        return RunConfig(**options)
    given = given_options(ctx, options)
    return RunConfig.from_json(RunConfig.from_file(Path(config_file)).to_json() | given)


prompt_options = together(
    click.option(
        "--suite",
        callback=names,
        default="mini",
        show_default=True,
        help="Prompt sets, comma-separated: names from `specbench list suites`, your own .jsonl files, or tasks of lm-eval: lm-eval:NAME, lm-eval:FILE.yaml.",
    ),
    click.option(
        "--perturb",
        callback=names,
        default="paper",
        show_default=True,
        help="Conditions: families (templates, system, ...), family/name, products like 'templates*system', or paper: the four template conditions of the drift paper. The clean one is always there.",
    ),
    click.option(
        "--severity", type=int, help="Leave out conditions of families above this severity (1 to 3)."
    ),
    click.option("--limit", type=int, help="At most this many prompts per suite."),
    click.option(
        "--num-fewshot",
        type=int,
        help="Solved examples before each question of an lm-eval task; default: the task's own number.",
    ),
    click.option(
        "--lengths",
        callback=numbers,
        default="512,2048",
        show_default=True,
        help="Prompt lengths for longctx in target tokens; 4k means 4096.",
    ),
    click.option(
        "--longctx-text", type=click.Path(dir_okay=False), help="Filler text for longctx instead of our own."
    ),
    click.option(
        "--data-dir",
        type=click.Path(file_okay=False),
        help="Folder with published prompt files; else SPECBENCH_DATA, else the hub.",
    ),
    click.option("--seed", type=int, default=0, show_default=True),
)
"""Which prompts, under which conditions."""

target_options = together(
    click.option(
        "--target",
        default="smollm2-135m",
        show_default=True,
        help="The model whose output is reproduced: a directory, a hub name, or smollm2-135m.",
    ),
    click.option(
        "--template",
        type=click.Path(dir_okay=False),
        help="A Jinja chat template instead of the tokenizer's own.",
    ),
    click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Answer tokens at most."),
    click.option(
        "--answer-path",
        type=click.Choice(ANSWER_PATHS),
        default="free",
        show_default=True,
        help="free: each condition has its own answer. forced: the clean answer under the "
        "condition's prompt.",
    ),
    click.option(
        "--temperature", type=float, default=0.0, show_default=True, help="Of the target; 0 is greedy."
    ),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0: off."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option(
        "--dtype", default="auto", show_default=True, help="auto: float32 on a CPU, bfloat16 on a GPU."
    ),
    click.option(
        "--batch-size", type=int, default=48, show_default=True, help="Answers at a time, memory permitting."
    ),
    click.option("--trust-remote-code", is_flag=True, help="Let the target's repository run its own code."),
)
"""Who answers them, and how."""

engine_options = together(
    click.option(
        "--engine",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the engine, several times if need be: max_num_seqs, kv_gib, gpu_memory, tensor_parallel, "
        "prefix_cache, eager, workaround (a known defect to repair).",
    ),
    click.option("--url", help="Address of a running server, for --runner vllm-server."),
)
"""How an engine runner is set up."""

config_options = together(
    click.option(
        "--config",
        "config_file",
        type=click.Path(dir_okay=False),
        help="Take the options of this run.json or pack.json; those given here override it.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and stop."),
)
"""Repeating, and looking before leaping."""
