r"""The built-in set: prompts of our own writing, so that a first run needs nothing from anywhere.

Example row of ``data/mini.jsonl``:

    {"id": "math-1", "category": "math", "turns": ["A baker fills 6 trays ..."], "reference": "49"}
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from specbench.benchmarks.reading import read_records, take_in_turn, unique
from specbench.types import Prompt, SuiteInfo, SuiteRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Mini:
    """The suite in the package's own data."""

    info: SuiteInfo

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return the prompts; ``limit`` takes categories in turn.

        Raises:
            UserError: the limit is below 1.
        """
        with resources.as_file(resources.files("specbench.benchmarks") / "data" / "mini.jsonl") as path:
            records = list(read_records(path))
        prompts = [
            Prompt(
                id=f"mini/{record.text('id')}",
                suite="mini",
                category=record.text("category"),
                turns=record.texts("turns"),
                reference=record.name("reference"),
            )
            for record in records
        ]
        return take_in_turn(unique(prompts, records), request.limit, lambda prompt: prompt.category)


MINI = Mini(
    info=SuiteInfo(
        name="mini",
        description="42 short prompts over chat, maths, code, rewriting and two-turn dialogue; built in",
        licence="Apache-2.0",
        citation="part of specbench",
    )
)
