"""The cross-check: several runners on the same token ids, compared round by round with the first of them.

Example:
    for pair in cross_check(target, prompts, drafters, settings, ("replay", "decode", "vllm")):
        pair.other, pair.drafter, pair.k, pair.agreement.equal, pair.differences
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specbench import registry
from specbench.errors import UserError
from specbench.runners.agreement import Agreement, Difference
from specbench.runners.runner import Outcome, Runner, RunSettings, Work
from specbench.runners.targets import Target
from specbench.runners.verdict import AnswerId, Judge
from specbench.types import Drafter, RenderedPrompt


@dataclass(slots=True, kw_only=True)
class Pair:
    """One drafter at one depth, seen by the reference and by one other runner."""

    reference: str
    other: str
    drafter: str
    k: int
    agreement: Agreement = field(default_factory=Agreement)
    differences: list[Difference] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """prompt id, or "" for all of them -> why there is nothing to compare."""

    @property
    def agrees(self) -> bool:
        """Whether everything was compared and differs in ties at most."""
        return not self.failures and all(d.explained for d in self.differences)


@dataclass(slots=True)
class Results:
    """Outcomes of one runner, a separate one for every drafter: each may have answered by itself."""

    by_drafter: dict[str, dict[AnswerId, Outcome]]

    @classmethod
    def of(
        cls,
        runner: Runner,
        work: Sequence[Work],
        drafters: Mapping[str, Drafter],
        on_tokens: Callable[[int], None],
    ) -> Results:
        """Run everything."""
        found: dict[str, dict[AnswerId, Outcome]] = {name: {} for name in drafters}
        for outcome in runner.run(work, drafters, on_tokens):
            for name in outcome.work.drafters or drafters:
                found[name][outcome.work.prompt.key] = outcome
        return cls(found)


def make_runners(names: Sequence[str], target: Target, settings: RunSettings) -> dict[str, Runner]:
    """Make runners by name.

    Raises:
        UserError: fewer than two, one twice, an unknown one, or one that cannot run here.
    """
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError("--runners takes two or more different runners, as in replay,decode,vllm")
    made: dict[str, Runner] = {}
    for name in names:
        engine = name.startswith("vllm")
        made[name] = registry.load("runners", name)(
            target, settings if engine else replace(settings, options={})
        )
    return made


def cross_check(
    target: Target,
    prompts: Sequence[RenderedPrompt],
    drafters: Mapping[str, Drafter],
    settings: RunSettings,
    runners: Mapping[str, Runner],
    on_start: Callable[[str], None] = lambda _name: None,
    on_tokens: Callable[[int], None] = lambda _count: None,
) -> Iterator[Pair]:
    """Compare every runner with the first one; yield a pair per drafter and depth as runners finish.

    Args:
        target: whose greedy answers are compared.
        prompts: token ids that all runners get.
        drafters: by name.
        settings: greedy.
        runners: by name, the reference first.
        on_start: hears which runner begins.
        on_tokens: hears of answer tokens.

    Raises:
        UserError: sampled settings.
    """
    if not settings.sampling.greedy:
        raise UserError("runners are compared at --temperature 0: samples differ for good reasons")
    work = [Work(prompt=prompt, drafters=tuple(drafters)) for prompt in prompts]
    reference, *others = runners
    on_start(reference)
    expected = Results.of(runners[reference], work, drafters, on_tokens)
    _close(runners[reference])
    judge = Judge(target, settings.max_new_tokens)
    for other in others:
        on_start(other)
        found = Results.of(runners[other], work, drafters, on_tokens)
        _close(runners[other])
        for name, drafter in drafters.items():
            for k in settings.depths:
                pair = Pair(reference=reference, other=other, drafter=name, k=k)
                compare(pair, expected.by_drafter[name], found.by_drafter[name], drafter, judge)
                yield pair


def compare(
    pair: Pair,
    expected: Mapping[AnswerId, Outcome],
    found: Mapping[AnswerId, Outcome],
    drafter: Drafter,
    judge: Judge,
) -> None:
    """Fill a pair from the outcomes of both runners, differences explained."""
    differences = []
    for key, one in expected.items():
        two = found.get(key)
        error = _error(one, pair.drafter) or ("no answer" if two is None else _error(two, pair.drafter))
        if error is not None:
            pair.failures[key[0]] = error
            continue
        assert two is not None
        difference = pair.agreement.add(one, two, pair.drafter, pair.k)
        if difference is not None:
            differences.append(difference)
    pair.differences = judge.explain(differences, expected, found, drafter, pair.k)
    reasons = set(pair.failures.values())
    if len(reasons) == 1 and len(pair.failures) == len(expected):
        pair.failures = {"": reasons.pop()}


def _error(outcome: Outcome, drafter: str) -> str | None:
    return outcome.errors.get(drafter) or outcome.errors.get("")


def _close(runner: Runner) -> None:
    """Engines hold memory that the next runner may need."""
    getattr(runner, "close", lambda: None)()
