"""A suite of two prompts, the second a dialogue.

Example: ``specbench run --suite haiku``
"""

from __future__ import annotations

from specbench.types import Prompt, SuiteInfo, SuiteRequest

_TURNS = {
    "frog": ("Write a haiku about a frog.",),
    "moon": ("Write a haiku about the moon.", "Now one about its shadow."),
}


class Haiku:
    """Implements ``specbench.types.Suite``."""

    info = SuiteInfo(name="haiku", description="two requests for haiku, from the example plug-in")

    def load(self, request: SuiteRequest) -> list[Prompt]:
        """Return the prompts."""
        prompts = [
            Prompt(id=f"haiku/{name}", suite="haiku", category="poetry", turns=turns)
            for name, turns in _TURNS.items()
        ]
        return prompts[: request.limit]
