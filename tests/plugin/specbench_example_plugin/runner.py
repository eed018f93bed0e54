"""A runner: replay, and every round checked for adding up to the answer.

Example: ``specbench run --runner careful-replay``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.targets import Target
from specbench.types import Drafter


class CarefulReplay:
    """Implements ``specbench.runners.runner.Runner``."""

    name = "careful-replay"

    def __init__(self, target: Target, settings: RunSettings) -> None:
        self.replay = ReplayRunner(target, settings)

    def run(
        self, work: Sequence[Work], drafters: Mapping[str, Drafter], on_tokens: Callable[[int], None]
    ) -> Iterator[Outcome]:
        """Yield an outcome for every piece of work."""
        for outcome in self.replay.run(work, drafters, on_tokens):
            for (drafter, _k), rounds in outcome.rounds.items():
                if 1 + sum(r.num_emitted for r in rounds) != len(outcome.answer_ids):
                    outcome.errors[drafter] = "its rounds do not add up to the answer"
            yield outcome


def careful_replay(target: Target, settings: RunSettings) -> CarefulReplay:
    """Make the runner."""
    return CarefulReplay(target, settings)
