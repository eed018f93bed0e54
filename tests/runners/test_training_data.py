"""States for training, against transformers' own hidden states and logits; the cache on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.training.data import Example
from specbench.errors import UserError
from specbench.runners.targets import Target
from specbench.runners.training_data import TapCache, TargetStates

TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu", dtype="float32")


def make_examples(count: int) -> list[Example]:
    g = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        ids = torch.randint(3, 259, (6 + 7 * i,), generator=g).tolist()
        found.append(Example(id=str(i), prompt_ids=tuple(ids[:4]), answer_ids=tuple(ids[4:])))
    return found


def check(features: Any, example: Example, target: Target, tolerance: float) -> None:
    with torch.no_grad():
        reference = target.model(torch.tensor([example.ids[:-1]]), output_hidden_states=True)
    for tap, state in zip(TAPS, features.taps, strict=True):
        torch.testing.assert_close(
            state.float(), reference.hidden_states[tap][0], rtol=tolerance, atol=tolerance
        )
    # transformers' last entry is the state after the final norm
    torch.testing.assert_close(
        features.final.float(), reference.hidden_states[-1][0], rtol=tolerance, atol=tolerance
    )
    first = len(example.prompt_ids) - 1
    assert features.top[:first].tolist() == [-1] * first
    assert torch.equal(features.top[first:], reference.logits[0, first:].argmax(-1))


def test_states_are_the_models_own(target: Target) -> None:
    states = TargetStates(target, TAPS)
    examples = make_examples(4)
    for features, example in zip(states.compute(examples), examples, strict=True):
        check(features, example, target, 2e-4)


def test_the_cache_gives_the_same_in_bfloat16_and_grows(target: Target, tmp_path: Path) -> None:
    examples = make_examples(5)
    cache = TapCache.open(tmp_path, target, taps=TAPS, budget=1 << 30)
    seen: list[tuple[int, int]] = []
    cache.extend(examples[:3], lambda done, everything: seen.append((done, everything)))
    assert seen[-1] == (3, 3)
    again = TapCache.open(tmp_path, target, taps=TAPS, budget=1 << 30)
    assert again.missing(examples) == examples[3:]
    size = (tmp_path / "states.bin").stat().st_size
    assert size == sum(e.num_rows for e in examples[:3]) * 4 * 64 * 2
    again.extend(examples)
    for example in examples:
        check(again.read(example), example, target, 2e-2)
    # what is not in the cache is computed
    check(cache.read(examples[4]), examples[4], target, 2e-4)


def test_a_torn_cache_is_mended(target: Target, tmp_path: Path) -> None:
    examples = make_examples(3)
    TapCache.open(tmp_path, target, taps=TAPS, budget=1 << 30).extend(examples[:2])
    index = tmp_path / "index.jsonl"
    lines = index.read_text().splitlines()
    index.write_text(lines[0] + "\n" + lines[1][:20])
    cache = TapCache.open(tmp_path, target, taps=TAPS, budget=1 << 30)
    assert cache.missing(examples) == examples[1:]
    cache.extend(examples)
    for reader in (cache, TapCache.open(tmp_path, target, taps=TAPS, budget=1 << 30)):
        assert reader.missing(examples) == []
        for example in examples:
            check(reader.read(example), example, target, 2e-2)


def test_budget_and_foreign_caches_are_refused(target: Target, tmp_path: Path) -> None:
    examples = make_examples(3)
    cache = TapCache.open(tmp_path, target, taps=TAPS, budget=1000)
    with pytest.raises(UserError, match=r"more than the budget.*--cache-gb"):
        cache.extend(examples)
    with pytest.raises(UserError, match="another target or other taps"):
        TapCache.open(tmp_path, target, taps=(1, 2, 3), budget=1 << 30)


def test_a_target_with_capped_logits_is_refused(target: Target) -> None:
    class Capped(TargetStates):
        pass

    states = Capped(target, TAPS)
    states._head = states._head * 2
    with pytest.raises(UserError, match="scales, shifts or caps its logits"):
        states.read(make_examples(1)[0])
