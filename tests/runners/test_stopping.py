"""An answer ends at the same token for every runner, whoever drafts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.drafters.ngram import create
from specbench.runners.answers import Answerer
from specbench.runners.decode import DecodeRunner, NoDrafter
from specbench.runners.replay import ReplayRunner
from specbench.runners.runner import Outcome, RunSettings, Work
from specbench.runners.stopping import Ending, cut_rounds, read_answer
from specbench.runners.targets import Target
from specbench.types import ConditionInfo, RenderedPrompt, Round, Sampling, Span


def _tokenizer() -> Any:
    where = Path(__file__).parents[1] / "conftest.py"
    spec = importlib.util.spec_from_file_location("tests_conftest", where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_tokenizer()


TOKENIZER = _tokenizer()
CLEAN = ConditionInfo(id="template/regular", family="template", severity=0, description="")


@given(text=st.text("ab\nQé:", max_size=30), stop=st.text("ab\nQé:", min_size=1, max_size=3))
@settings(deadline=None, max_examples=150)
def test_the_end_is_where_the_text_first_holds_the_string(text: str, stop: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    ending = Ending((2,), TOKENIZER, (stop,))
    # byte by byte, without any window
    found = text.encode().find(stop.encode())
    wanted = len(ids) if found < 0 else found + len(stop.encode())
    assert ending.length(ids) == wanted
    assert read_answer(TOKENIZER, ids[:wanted], (stop,)) == (text if found < 0 else text[: text.find(stop)])


def test_stop_tokens_come_first_and_room_is_kept() -> None:
    ending = Ending((2,), TOKENIZER, ("zz",))
    a, z = TOKENIZER.encode("az", add_special_tokens=False)
    assert ending.received([a], [a, 2, z, z], 9) == 2
    assert ending.received([a, z], [z, a], 9) == 1
    assert ending.received([a], [z, a, z, a], 3) == 3
    assert Ending((2,)).received([], [a, a, 2, a], 2) == 2


def prompt(text: str, *stops: str) -> RenderedPrompt:
    ids = tuple(TOKENIZER.encode(f"<|im_start|>{text}", add_special_tokens=False))
    return RenderedPrompt(
        prompt_id=text,
        suite="s",
        category="c",
        turn=0,
        condition=CLEAN,
        token_ids=ids,
        spans=(Span(kind="user", start=0, end=len(ids)),),
        bos_count=1,
        template_hash="",
        stop_strings=stops,
    )


@pytest.fixture(scope="module")
def target(tiny_target_path: Path) -> Target:
    return Target.load(str(tiny_target_path), device="cpu")


def outcome(runner: Any, rendered: RenderedPrompt, drafters: dict[str, Any]) -> Outcome:
    work = [Work(prompt=rendered, drafters=tuple(drafters))]
    (found,) = runner.run(work, drafters, lambda count: None)
    assert not found.errors
    return found


def run_settings(limit: int) -> RunSettings:
    return RunSettings(depths=(3,), sampling=Sampling(), sampler="greedy", max_new_tokens=limit, batch_size=4)


@pytest.mark.parametrize("text", ["abcabcabc", "Hello, hello"])
def test_every_runner_stops_at_the_same_token(target: Target, text: str) -> None:
    (free,) = Answerer(target, taps=(), max_new_tokens=40).answer([prompt(text)])
    whole = free.answer_ids
    # a string the tiny model's own answer holds, in the middle and over two tokens
    for at in range(10, 30):
        stop = TOKENIZER.decode(list(whole[at : at + 2]))
        if "�" not in stop and len(stop) == 2:
            break
    else:
        pytest.fail("the tiny model says nothing readable; give the test another prompt")
    length = Ending(target.stop_ids, TOKENIZER, (stop,)).length(whole)
    assert 1 <= length <= at + 2
    stopping = prompt(text, stop)
    drafters = {"ngram": create(None, {}, target.weights()), "none": NoDrafter()}
    replayed = outcome(ReplayRunner(target, run_settings(40)), stopping, drafters)
    decoded = outcome(DecodeRunner(target, run_settings(40)), stopping, drafters)
    for found in (replayed, decoded):
        assert found.answer_ids == whole[:length]
        assert found.finish == "stop"
        for rounds in found.rounds.values():
            assert 1 + sum(r.num_emitted for r in rounds) == length
            assert all(r.num_accepted <= length - 1 - r.start for r in rounds)
    plain = outcome(DecodeRunner(target, run_settings(40)), prompt(text), drafters)
    for name in drafters:
        key = (name, 3)
        shapes = [(r.start, r.num_accepted, r.num_emitted, r.cut) for r in decoded.rounds[key]]
        assert shapes == [(r.start, r.num_accepted, r.num_emitted, r.cut) for r in replayed.rounds[key]]
        # an engine that does not know the strings, cut afterwards, tells the same
        cut = cut_rounds(plain.rounds[key], length, 3)
        assert shapes == [(r.start, r.num_accepted, r.num_emitted, r.cut) for r in cut]


def test_cut_rounds_by_hand() -> None:
    def entry(start: int, accepted: int, emitted: int) -> Round:
        return Round(
            index=0, start=start, num_drafted=3, num_accepted=accepted, num_emitted=emitted, cut=False
        )

    rounds = [entry(0, 2, 3), entry(3, 3, 4), entry(7, 0, 1)]
    cut = cut_rounds(rounds, 6, 3)
    assert [(r.num_accepted, r.num_emitted, r.cut) for r in cut] == [(2, 3, False), (2, 2, True)]
    assert cut_rounds(rounds, 1, 3) == []
