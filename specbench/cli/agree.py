"""``specbench agree``: do runners count the same rounds on the same token ids, and if not, where and why?

Example: ``specbench agree --runners replay,decode,vllm --suite mini,gsm8k --limit 20 --drafter zoo:* --depth 3,8``
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from specbench.cli.options import engine_options, make_config, names, numbers, prompt_options, target_options
from specbench.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from specbench.runners.cross_check import Pair


@click.command()
@click.option(
    "--runners",
    callback=names,
    default="replay,decode",
    show_default=True,
    help="Who is compared, the reference first: replay, decode, vllm, vllm-server.",
)
@click.option("--drafter", default="default", help="Drafters, as for `specbench run`.")
@click.option("--depth", callback=numbers, default="3,8", show_default=True, help="Draft tokens per round.")
@click.option(
    "--differences", type=int, default=10, show_default=True, help="Differences printed per drafter."
)
@prompt_options
@target_options
@engine_options
@click.pass_context
def agree(ctx: click.Context, /, runners: tuple[str, ...], differences: int, **options: Any) -> int:
    """Compare runners round by round on the same token ids.

    Greedy answers to first turns under --perturb (default here: template/regular). Two correct runners may differ
    only where the target's or the drafter's two best tokens are closer than rounding. Anything else is shown with
    the round, the step, the tokens, the target's margin and, where it can be found, the mistake that explains it:
    taps, vocabulary map, norm flags, positions, BOS, counting behind the end. Exit code 1 where one is no tie.

    \b
    Examples:
      specbench agree --drafter ngram,eagle3=PATH --suite mini
      specbench agree --runners replay,decode,vllm --suite mini,gsm8k --limit 20 --drafter zoo:* --depth 3,8
    """
    if "vllm-server" not in runners and options.get("url"):
        raise UserError("--url names a running server: add vllm-server to --runners")
    url = options.pop("url")
    config = make_config(ctx, None, options)
    if ctx.get_parameter_source("perturb") is click.core.ParameterSource.DEFAULT:
        config = replace(config, perturb=("template/regular",))
    pairs = _run(config, runners, url)
    from rich.console import Console

    console = Console()
    console.print(_table(pairs), soft_wrap=True)
    for pair in pairs:
        _print_differences(console, pair, differences)
    return 0 if all(pair.agrees for pair in pairs) else 1


def _run(config: Any, runners: tuple[str, ...], url: str | None) -> list[Pair]:
    import transformers

    from specbench.drafters.resolve import load_drafter
    from specbench.runners.cross_check import cross_check, make_runners
    from specbench.runners.pipeline import drafter_specs, load_chat, run_settings
    from specbench.runners.plan import make_plan
    from specbench.runners.targets import Target

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    specs = drafter_specs(config)
    target = Target.load(
        config.target, device=config.device, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    plan = make_plan(config, load_chat(target.tokenizer, config), target.info.max_positions)
    for sentence in plan.refused:
        click.echo(f"left out: {sentence}", err=True)
    weights = target.weights()
    drafters = {spec.text: load_drafter(spec, weights) for spec in specs}
    settings = run_settings(config)
    if url:
        settings = replace(settings, options={**settings.options, "url": url})
    made = make_runners(runners, target, settings)
    click.echo(
        f"{len(plan.first_turns)} answers, {len(drafters)} drafters, k = {', '.join(map(str, settings.depths))}",
        err=True,
    )
    return list(
        cross_check(
            target,
            plan.first_turns,
            drafters,
            settings,
            made,
            on_start=lambda name: click.echo(f"{name} ...", err=True),
        )
    )


def _table(pairs: list[Pair]) -> Table:
    from rich.table import Table

    table = Table(title="rounds that are the same", title_justify="left")
    for name in ("runners", "drafter", "k", "answers", "equal", "rounds", "equal", "ties", "verdict"):
        table.add_column(
            name, justify="right" if name in ("k", "answers", "equal", "rounds", "ties") else "left"
        )
    for pair in pairs:
        found = pair.agreement
        ties = sum(d.explained for d in pair.differences)
        kinds = sorted({d.kind for d in pair.differences if not d.explained})
        verdict = "cannot run" if "" in pair.failures else ", ".join(kinds) or "agree"
        if pair.failures and "" not in pair.failures:
            verdict += f", {len(pair.failures)} failed"
        table.add_row(
            f"{pair.reference}, {pair.other}",
            pair.drafter,
            str(pair.k),
            *(str(n) for n in (found.answers, found.equal_answers, found.rounds, found.equal, ties)),
            verdict,
        )
    return table


def _print_differences(console: Any, pair: Pair, most: int) -> None:
    for where, reason in list(pair.failures.items())[:most]:
        console.print(f"{pair.other}, {pair.drafter}, {where or 'all prompts'}: {reason}", markup=False)
    for difference in pair.differences[:most]:
        first, second = difference.tokens
        margin = "" if difference.margin is None else f", target's margin {difference.margin:.2g}"
        console.print(
            f"{pair.reference}, {pair.other}, {pair.drafter}, k {pair.k}: {difference.prompt_id} "
            f"round {difference.round} step {difference.step}, tokens {first} and {second}{margin}: "
            f"{difference.verdict}",
            markup=False,
            soft_wrap=True,
        )
    left = len(pair.differences) - most
    if left > 0:
        console.print(f"... and {left} more of {pair.drafter}, k {pair.k}", markup=False)
