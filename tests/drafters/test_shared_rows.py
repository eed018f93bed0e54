"""What several traces begin with is computed once, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.drafters.chains import run_chains
from specbench.drafters.dflash_drafter import DFlashDrafter
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.mtp_drafter import MtpDrafter
from specbench.drafters.scoring import common_beginnings
from specbench.types import ScoreRequest, Trace

from . import test_dflash, test_mtp
from .helpers import HALF, SPANS, SWITCHES, WIDTH, build, make_model, make_prompt, make_target, make_trace

DEPTH = 4


def behind(first: Trace, other: Trace, count: int) -> Trace:
    """``other``, but its first ``count`` tokens and their states are those of ``first``."""
    ids = [*first.ids[:count], *other.ids[count:]]
    ids[count] = 2 + (first.ids[count] - 1) % 21  # not by chance the same
    # the state behind the last common token is common too: it has not seen what follows
    taps = {i: torch.cat((first.taps[i][:count], other.taps[i][count:])) for i in other.taps}
    length = other.prompt_length
    prompt = make_prompt(ids[:length], other.prompt.spans, name=other.prompt.prompt_id)
    return replace(other, prompt=prompt, answer_ids=tuple(ids[length:]), taps=taps)


def family(seed: int) -> list[Trace]:
    """Four traces: two prompts behind one beginning of nine tokens, the second answered twice, and a stranger."""
    first = make_trace((14, 6), seed, spans=SPANS, prefix=(1,))
    second = behind(first, make_trace((12, 7), seed + 1, spans=SPANS), 9)
    again = behind(second, make_trace((12, 8), seed + 2, spans=SPANS), 13)
    return [first, second, again, make_trace((7, 5), seed + 3, spans=SPANS)]


def test_the_common_beginning_is_found_and_no_more() -> None:
    traces = family(0)
    sequences = [(torch.tensor(t.ids), [t.taps[2], t.taps[4]]) for t in traces]
    # a row reads the token behind it: with nine common tokens eight rows are the same
    found = common_beginnings(sequences)
    assert found == [(0, 0), (0, 8), (1, 12), (0, 0)]
    # states that differ in one bit end it, in whichever tap
    changed = [t.clone() for t in sequences[1][1]]
    changed[1][5, 3] = torch.nextafter(changed[1][5, 3], torch.tensor(9.0))
    assert common_beginnings([sequences[0], (sequences[1][0], changed)]) == [(0, 0), (0, 5)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_common_beginnings_equal_a_search(ids: list[list[int]]) -> None:
    """States are a function of the tokens up to them, as a target's are."""
    sequences = []
    for tokens in ids:
        states = [[sum(t * 2**i for i, t in enumerate(tokens[: p + 1])) + p] for p in range(len(tokens) - 1)]
        sequences.append((torch.tensor(tokens), [torch.tensor(states, dtype=torch.float32).reshape(-1, 1)]))
    for i, (other, count) in enumerate(common_beginnings(sequences)):
        longest = 0
        for j in range(i):
            n = 0
            while n + 1 < min(len(ids[i]), len(ids[j])) and ids[i][: n + 2] == ids[j][: n + 2]:
                n += 1
            longest = max(longest, n)
        assert count == longest
        assert count == 0 or ids[i][: count + 1] == ids[other][: count + 1]


@settings(max_examples=25, deadline=None)
@given(switches=SWITCHES, seed=st.integers(0, 1000), block=st.sampled_from([3, 10, 4096]))
def test_chains_do_not_change(switches: dict[str, Any], seed: int, block: int) -> None:
    target = make_target()
    drafter = Eagle3Drafter(build(target, switches | {"num_layers": 1}, seed), target.info, "toy")
    traces = family(seed)

    def states(share: bool) -> list[torch.Tensor]:
        packed, rows = drafter.pack(traces, share=share)
        assert (packed.shared is not None) == share
        if packed.shared is not None:
            # 19 + 18 + 19 + 11 rows, 8 and 12 of them another's
            assert len(packed.shared.stands) == len(packed.taps[0]) == 47
        found: list[torch.Tensor] = []
        with torch.inference_mode():
            run_chains(
                drafter.model, packed, rows, DEPTH, lambda _s, _a, post: found.append(post), block_rows=block
            )
        return found

    for one, other in zip(states(False), states(True), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash"])
def test_scores_do_not_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter: Any
    if kind == "eagle3":
        drafter = Eagle3Drafter(make_model(target, target_ids=HALF), target.info, kind)
    elif kind == "mtp":
        normed = replace(target, norm=torch.ones(WIDTH))
        drafter = MtpDrafter(test_mtp.make_model(normed), target.info, kind)
    else:
        drafter = DFlashDrafter(test_dflash.make_model(target), target.info, kind)
    assert target.info.hidden_size == WIDTH
    traces = [t for seed in range(0, 40, 4) for t in family(seed)]
    request = ScoreRequest(depth=3, full_chains=True)
    together = drafter.score(traces, request)
    alone = [drafter.score([trace], request)[0] for trace in traces]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.accepted, other.accepted)
        assert one.forced is not None and other.forced is not None
        assert torch.equal(one.forced, other.forced)
    assert sum(int(s.forced.clamp(min=0).sum()) for s in together if s.forced is not None) > 5


def test_what_looks_at_every_row_refuses_shared_ones() -> None:
    target = make_target()
    drafter = Eagle3Drafter(make_model(target, num_layers=2), target.info, "toy")
    packed, rows = drafter.pack(family(0), share=True)
    with pytest.raises(AssertionError, match="one layer, no probe, no perturbation"):
        run_chains(drafter.model, packed, rows, 1, lambda _s, _a, _p: None)
    # scoring does not ask for it
    (scores, *_rest) = drafter.score(family(0), ScoreRequest(depth=2))
    assert len(scores.accepted) == 5
