"""``specbench list``: what there is, a line each.

Example: ``specbench list suites``
"""

from __future__ import annotations

import click

from specbench import registry
from specbench.registry import Kind

KINDS = ("suites", "perturbations", "targets", "drafters", "runners")


@click.command(name="list")
@click.argument("kind", type=click.Choice(KINDS))
def listing(kind: str) -> None:
    """List suites, perturbations, targets, drafters or runners, a line each."""
    rows = {
        "suites": _suites,
        "perturbations": _perturbations,
        "targets": _targets,
        "drafters": _drafters,
        "runners": _runners,
    }[kind]()
    width = max((len(name) for name, _text in rows), default=0)
    for name, text in rows:
        click.echo(f"{name:{width}}  {text}")


def _suites() -> list[tuple[str, str]]:
    from specbench.benchmarks.resolve import load_suite

    rows = [(name, load_suite(name).info.description) for name in registry.names("suites")]
    return [
        *rows,
        ("FILE.jsonl", "your own prompts: one JSON a line with turns, messages or prompt"),
        ("lm-eval:NAME", "any generate_until task of lm-eval; or lm-eval:FILE.yaml, a task file of your own"),
    ]


def _perturbations() -> list[tuple[str, str]]:
    from specbench.perturbations.resolve import all_conditions

    rows = []
    for condition in all_conditions():
        info = condition.info
        reason = f" {info.reason}" if info.reason else ""
        rows.append((info.id, f"[severity {info.severity}] {info.description}{reason}"))
    return rows


def _targets() -> list[tuple[str, str]]:
    from specbench.runners import TARGETS

    return list(TARGETS.items())


def _drafters() -> list[tuple[str, str]]:
    from specbench.drafters import DESCRIPTIONS
    from specbench.drafters.resolve import zoo_names

    rows = [
        (name, DESCRIPTIONS.get(name) or _origin("drafters", name)) for name in registry.names("drafters")
    ]
    rows += [(f"zoo:{name}", "bundled, trained on the demo target") for name in zoo_names()]
    return [*rows, ("PATH", "a drafter checkpoint; what it is stands in its config.json")]


def _runners() -> list[tuple[str, str]]:
    from specbench.runners import DESCRIPTIONS

    return [(name, DESCRIPTIONS.get(name) or _origin("runners", name)) for name in registry.names("runners")]


def _origin(kind: Kind, name: str) -> str:
    return f"from the package {registry.package(kind, name)!r}"
