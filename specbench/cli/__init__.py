"""The command line: one file a command, imported only when that command runs, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import click

from specbench import __version__
from specbench.errors import SpecbenchWarning, UserError

# name -> (module:command, one line for --help); in the order in which a newcomer meets them
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("specbench.cli.run:run", "Score drafters on prompts under conditions: the main job."),
    "list": ("specbench.cli.listing:listing", "List suites, perturbations, targets, drafters or runners."),
    "show": (
        "specbench.cli.show:show",
        "Show a rendered prompt: spans in colour, BOS count, diff against clean.",
    ),
    "report": (
        "specbench.cli.report:report",
        "Print a run's tables again, grouped and formatted as you like.",
    ),
    "compare": (
        "specbench.cli.compare:compare",
        "Paired differences between drafters, conditions or runs, with intervals.",
    ),
    "check": (
        "specbench.cli.check:check",
        "Examine a checkpoint: is its config.json what it was trained with?",
    ),
    "diagnose": (
        "specbench.cli.diagnose:diagnose",
        "See why drafters lose the prompt: sizes, attention, depth, noise, windows.",
    ),
    "agree": ("specbench.cli.agree:agree", "Compare runners round by round: replay, decode, vLLM."),
    "lm-eval": (
        "specbench.cli.lm_eval:lm_eval",
        "Run lm-eval with specbench as its model: its metrics, acceptance beside them.",
    ),
    "trace": (
        "specbench.cli.trace:trace",
        "Keep a target's answers and states, to score drafters elsewhere.",
    ),
    "answers": ("specbench.cli.answers:answers", "Write the target's own answers to prompts: training data."),
    "train": ("specbench.cli.train:train", "Train a drafter, or all arms of a recipe."),
    "export": ("specbench.cli.export:export", "Write a drafter in another tool's checkpoint layout."),
    "convert": ("specbench.cli.convert:convert", "Rewrite a checkpoint in another layout, bit for bit."),
    "submit": ("specbench.cli.submit:submit", "Make a leaderboard entry of a run."),
    "leaderboard": ("specbench.cli.leaderboard:leaderboard", "Build a static site from leaderboard entries."),
    "schema": ("specbench.cli.schema:schema", "Print every column of the result tables with its meaning."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in reading order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_module, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, with the nearest names in the error."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from specbench.errors import unknown_name

            raise unknown_name("command", name, COMMANDS)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specbench")
def cli() -> None:
    """Measure speculative-decoding drafters: how many draft tokens are accepted, where, how deep, and what is left
    when the template, the system prompt or the context changes.

    \b
    A first run needs nothing but the bundled prompts and target:
        specbench run
    A checkpoint of your own, with public prompts:
        specbench run --suite mtbench,gsm8k --perturb templates --drafter eagle3=PATH
    Names of commands and options completed by the Tab key (bash; zsh_source and fish_source for those shells):
        eval "$(_SPECBENCH_COMPLETE=bash_source specbench)"
    """


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: Any = None,
) -> None:
    """Warnings meant for users are one plain line; others keep their place of origin."""
    if issubclass(category, SpecbenchWarning):
        click.echo(f"warning: {message}", err=True)
    elif not issubclass(category, DeprecationWarning | FutureWarning):
        click.echo(f"warning ({filename}:{lineno}): {message}", err=True)


def _one_sentence(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text}; see {context.command_path} --help"


def main(args: list[str] | None = None) -> None:
    """Entry point: user errors are one sentence on stderr and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        code = cli.main(args=args, prog_name="specbench", standalone_mode=False)
    except UserError as error:
        click.echo(f"specbench: {error}", err=True)
        sys.exit(2)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"specbench: {_one_sentence(error)}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("specbench: stopped; the same command goes on where this one ended", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)
