"""Other families' chat formats, written with the target's tokenizer: a format the target was not trained on.

The templates are files of our own under ``data/templates``. They write no BOS: the target's own is put in
front where its clean rendering has one.

Example: ``bundled("llama3").source`` is the Jinja text that writes
``<|start_header_id|>user<|end_header_id|>``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources

from specbench.perturbations.condition import Draft, Setting, Stage, Template
from specbench.perturbations.stages import Staged
from specbench.types import ConditionInfo

FORMATS = {
    "chatml": "ChatML (Qwen, SmolLM and many fine-tunes)",
    "llama2": "Llama 2 chat",
    "llama3": "Llama 3 instruct",
    "mistral": "Mistral instruct, as its Tekken tokenizers write it",
    "gemma": "Gemma instruct",
    "phi": "Phi 3",
    "vicuna": "Vicuna",
    "zephyr": "Zephyr",
    "deepseek": "DeepSeek V3 chat",
    "plain": "plain 'User:' and 'Assistant:' lines",
}
"""Name -> whose format it is."""


@cache
def bundled(name: str) -> Template:
    """Return a bundled format's template, which writes no BOS."""
    file = resources.files("specbench.perturbations") / "data" / "templates" / f"{name}.jinja"
    return Template(source=file.read_text(encoding="utf-8"), name=f"the bundled template {name}")


def _use(name: str) -> Stage:
    def stage(draft: Draft, setting: Setting) -> Draft:
        return replace(draft, template=bundled(name), bos="target")

    return stage


def foreign_conditions(claims: frozenset[str]) -> tuple[Staged, ...]:
    """Return one condition per format; each claims ``claims``."""
    return tuple(
        Staged(
            info=ConditionInfo(
                id=f"template/{name}",
                family="template",
                severity=3,
                description=f"The chat format of {whose}, tokenised by the target's tokenizer.",
                reason="A client or a server falls back on another model's template.",
                parameters={"template": name},
            ),
            template=(_use(name),),
            claims=claims,
        )
        for name, whose in FORMATS.items()
    )
