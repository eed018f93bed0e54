"""A whole run on a tiny target: what it writes, that it goes on where it stopped, and that trouble stays small."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench import drafters as drafter_names
from specbench import runners as runner_names
from specbench.cli import main
from specbench.config import RunConfig
from specbench.drafters.ngram import NgramDrafter
from specbench.errors import UserError
from specbench.results.aggregate import write_acceptance
from specbench.results.store import AnswerKey, RunStore
from specbench.runners import pipeline, replay
from specbench.runners.answers import Answerer
from specbench.runners.decode import DecodeRunner
from specbench.runners.pipeline import Observer, RunReport, run
from specbench.runners.plan import Plan
from specbench.runners.runner import RunSettings
from specbench.runners.targets import Target
from specbench.types import PositionScores, RenderedPrompt, ScoreRequest, TargetWeights, Trace

PROMPTS: list[dict[str, Any]] = [
    {"id": "sea", "turns": ["Name three seas.", "Which is the deepest?"], "category": "facts"},
    {"id": "sum", "prompt": "Add 2 and 3 and 2 and 3 and 2 and 3."},
    {
        "id": "tale",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A tale."}],
    },
    {"id": "echo", "turns": ["Say it: abc abc abc abc.", "Say it again.", "And again."]},
]
NUM_TURNS = 7
CONDITIONS = ("template/regular", "template/no_bos", "template/no_template")


def write_prompts(path: Path, prompts: Sequence[Mapping[str, Any]] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in prompts))
    return path


@pytest.fixture(scope="module")
def base(tiny_target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = write_prompts(tmp_path_factory.mktemp("prompts") / "own.jsonl")
    return RunConfig(
        suite=(str(path),),
        perturb=CONDITIONS[1:],
        target=str(tiny_target_path),
        drafter=f"ngram,draft-lm={tiny_target_path}",
        depth=(2, 4),
        max_new_tokens=20,
        device="cpu",
    )


@pytest.fixture(scope="module")
def finished(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on both answer paths; tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    report = done(replace(base, answer_path="both", out=str(out)))
    assert report.failures == {}
    return out


def done(config: RunConfig, observer: Observer | None = None) -> RunReport:
    report = run(config, observer or Observer(), command=["specbench", "run", "a file"])
    assert report is not None
    return report


def table(out: Path, name: str) -> pd.DataFrame:
    """A table of a run without timings, in an order of its own."""
    with RunStore(out, readonly=True) as store:
        frame = store.table(name).to_pandas()
    timings = ("seconds", "trace_seconds", "draft_ms", "verify_ms")
    frame = frame.drop(columns=[name for name in timings if name in frame])
    for column in frame:
        if frame[column].dtype == "category":
            frame[column] = frame[column].astype(str)
        elif frame[column].dtype == object:
            frame[column] = frame[column].map(
                lambda value: (
                    tuple(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
                )
            )
    keys = ("condition", "prompt_id", "turn", "answer_path", "drafter", "k", "round")
    return frame.sort_values([key for key in keys if key in frame]).reset_index(drop=True)


def assert_same_tables(one: Path, other: Path, names: Sequence[str] = ("rounds", "answers", "items")) -> None:
    """Counts and ids are equal; margins and entropies may feel what shared a batch, as rounding."""
    for name in names:
        left, right = table(one, name), table(other, name)
        assert len(left) > 0
        for column in ("margin", "mean_entropy"):
            if column in left:
                pd.testing.assert_series_equal(left.pop(column), right.pop(column), atol=1e-3, rtol=0)
        pd.testing.assert_frame_equal(left, right, check_exact=True)


class Counting:
    """How many answers the target made or re-read, by prompt id and turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered: Counter[tuple[str, int, str]] = Counter()
        self.forced: Counter[tuple[str, int, str]] = Counter()
        answer, force = Answerer.answer, Answerer.force

        def counted_answer(answerer: Answerer, prompts: Sequence[RenderedPrompt], *given: Any) -> Any:
            for trace in answer(answerer, prompts, *given):
                count = self.forced if trace.path == "forced" else self.answered
                count[trace.prompt.key] += 1
                yield trace

        def counted_force(answerer: Answerer, prompt: RenderedPrompt, *rest: Any) -> Trace:
            self.forced[prompt.key] += 1
            return force(answerer, prompt, *rest)

        monkeypatch.setattr(Answerer, "answer", counted_answer)
        monkeypatch.setattr(Answerer, "force", counted_force)


class Scripted(NgramDrafter):
    """Prompt lookup that calls back before it scores an answer or proposes."""

    def __init__(self, before: Callable[[Trace | RenderedPrompt], None]) -> None:
        super().__init__()
        self.before = before
        self.requests: list[tuple[int, int]] = []

    def score(self, traces: Sequence[Trace], request: ScoreRequest) -> list[PositionScores]:
        self.requests.append((len(traces), request.depth))
        for trace in traces:
            self.before(trace)
        return super().score(traces, request)

    def session(self, prompt: RenderedPrompt | None = None) -> Any:
        assert prompt is not None
        self.before(prompt)
        return super().session(prompt)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], Scripted]:
    """Register a drafter ``scripted`` that calls a function back."""

    def register(before: Callable[[Any], None]) -> Scripted:
        drafter = Scripted(before)
        module = ModuleType("scripted_drafter")

        def create(argument: str | None, options: Mapping[str, str], target: TargetWeights) -> Scripted:
            return drafter

        module.create = create  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "scripted_drafter", module)
        monkeypatch.setitem(drafter_names.BUILTIN, "scripted", "scripted_drafter:create")
        return drafter

    return register


# ---- what a run writes


def test_every_answer_is_there_once(finished: Path) -> None:
    answers = table(finished, "answers")
    assert answers.error.isna().all()
    found = Counter(zip(answers.condition, answers.answer_path, strict=True))
    forced = {(name, "forced"): NUM_TURNS for name in CONDITIONS[1:]}
    assert found == {(name, "free"): NUM_TURNS for name in CONDITIONS} | forced
    assert not answers.duplicated(["prompt_id", "turn", "condition", "answer_path"]).any()
    items = table(finished, "items")
    assert len(items) == 2 * len(answers)


def test_rounds_add_up_to_every_answer(finished: Path) -> None:
    keys = ["prompt_id", "turn", "condition", "answer_path"]
    answers = table(finished, "answers").set_index(keys).answer_tokens
    rounds = table(finished, "rounds")
    emitted = rounds.groupby([*keys, "drafter", "k"], observed=True).num_emitted.sum()
    assert len(emitted) == len(answers) * 4  # two drafters at two depths
    for (*key, _drafter, _k), total in emitted.items():
        assert 1 + total == answers[tuple(key)]
    items = table(finished, "items").groupby([*keys, "drafter"]).num_rows.sum()
    assert (rounds.groupby([*keys, "drafter"], observed=True).size().astype("int64") == items).all()


def test_target_as_its_own_drafter_is_always_right(finished: Path) -> None:
    rounds = table(finished, "rounds")
    own = rounds[rounds.drafter.str.startswith("draft-lm") & (rounds.answer_path == "free")]
    left = own.merge(
        table(finished, "answers")[["prompt_id", "turn", "condition", "answer_path", "answer_tokens"]]
    )
    assert len(left) == len(own) > 0
    expected = (left.answer_tokens - 1 - left.start).clip(upper=left.k)
    assert (left.num_accepted == expected).all()


def test_accepted_per_round_is_the_sum_of_marginal_rates(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    acceptance = pd.read_parquet(write_acceptance(out))
    rounds = table(out, "rounds")
    assert len(acceptance) > 0
    assert {2, 4} == set(acceptance.k)
    for _, row in acceptance.iterrows():
        mine = rounds[
            (rounds.condition == row.condition)
            & (rounds.answer_path == row.answer_path)
            & (rounds.drafter == row.drafter)
            & (rounds.k == row.k)
        ]
        reached = [int((mine.num_accepted >= i).sum()) for i in range(1, row.k + 1)]
        assert (row.rounds, row.accepted) == (len(mine), sum(reached))
        assert row.accepted_per_round == sum(reached) / len(mine)
        for i, count in enumerate(reached, 1):
            assert row[f"m_{i}"] == count / len(mine)
        assert row.accepted_per_round == pytest.approx(
            sum(row[f"m_{i}"] for i in range(1, row.k + 1)), rel=1e-14
        )
        assert row.tokens_per_round == row.accepted_per_round + 1


def test_answers_are_what_transformers_generates(finished: Path, tiny_target_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_target_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_path)
    answers = table(finished, "answers")
    clean = answers[(answers.condition == "template/regular")].set_index(["prompt_id", "turn"]).answer_ids
    for line in PROMPTS:
        messages = list(line.get("messages", []))
        for turn, text in enumerate(line.get("turns", [line.get("prompt")])):
            if text is not None:
                messages.append({"role": "user", "content": text})
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            with torch.no_grad():
                made = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
            assert list(clean[f"own/{line['id']}", turn]) == made
            messages.append(
                {"role": "assistant", "content": tokenizer.decode(made, skip_special_tokens=True)}
            )


def test_forced_path_replays_the_clean_answers(finished: Path) -> None:
    answers = table(finished, "answers").set_index(["prompt_id", "turn", "condition", "answer_path"])
    assert set(answers.index.get_level_values("answer_path")) == {"free", "forced"}
    differ = 0
    for (prompt, turn, condition, path), row in answers.iterrows():
        clean = answers.loc[(prompt, turn, "template/regular", "free")]
        if path == "forced":
            assert (row.answer_ids, row.finish) == (clean.answer_ids, clean.finish)
            assert row.ids_hash != clean.ids_hash
        elif condition != "template/regular":
            differ += row.answer_ids != clean.answer_ids
    assert differ > 0


def test_forced_alone_has_no_free_answers_of_conditions(
    base: RunConfig, finished: Path, tmp_path: Path
) -> None:
    class Planned(Observer):
        def planned(self, plan: Plan, config: RunConfig) -> None:
            self.plan = plan

    observer = Planned()
    done(replace(base, answer_path="forced", out=str(tmp_path / "run")), observer)
    answers, both = table(tmp_path / "run", "answers"), table(finished, "answers")
    assert len(answers) == observer.plan.answers == 3 * NUM_TURNS
    expected = both[(both.condition == "template/regular") | (both.answer_path == "forced")]
    columns = ["prompt_id", "turn", "condition", "answer_path", "answer_ids", "finish", "ids_hash"]
    pd.testing.assert_frame_equal(answers[columns], expected[columns].reset_index(drop=True))


def test_run_record_is_written_before_work_and_says_everything(
    base: RunConfig, tmp_path: Path, scripted: Callable[[Callable[[Any], None]], Scripted], monkeypatch: Any
) -> None:
    out = tmp_path / "run"
    there: list[bool] = []
    answer = Answerer.answer

    def looking(answerer: Answerer, prompts: Sequence[RenderedPrompt]) -> Any:
        there.append((out / "run.json").is_file())
        return answer(answerer, prompts)

    monkeypatch.setattr(Answerer, "answer", looking)
    drafter = scripted(lambda _trace: None)
    config = replace(base, drafter="ngram,scripted", out=str(out), limit=2, seed=11)
    done(config)
    assert there and all(there)

    record = json.loads((out / "run.json").read_text())
    assert RunConfig.from_json(record["config"]) == config
    assert record["config"]["seed"] == 11
    assert record["run_id"] == config.identity()
    assert shlex.split(record["command"]) == ["specbench", "run", "a file"]
    for package in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "duckdb"):
        assert record["versions"][package] == metadata.version(package)
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["versions"]["specbench"] == record["specbench_version"]
    target = Target.load(config.target, device="cpu").info
    assert record["target"]["fingerprint"] == target.fingerprint
    assert (record["target"]["dtype"], record["target"]["num_layers"]) == ("float32", 8)
    assert {d["name"]: d["fingerprint"] for d in record["drafters"]} == {
        "ngram": "ngram-2-5",
        "scripted": drafter.info.fingerprint,
    }
    assert [c["id"] for c in record["conditions"]] == list(CONDITIONS)


# ---- going on


def test_same_run_again_redoes_nothing(
    base: RunConfig,
    tmp_path: Path,
    scripted: Callable[[Callable[[Any], None]], Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(base, drafter="ngram,scripted", answer_path="both", out=str(tmp_path / "run"))
    seen: list[Any] = []
    scripted(seen.append)
    counting = Counting(monkeypatch)
    first = done(config)
    num_answers = 5 * NUM_TURNS
    assert (first.resumed, len(seen)) == (0, num_answers)
    assert (counting.answered.total(), counting.forced.total()) == (3 * NUM_TURNS, 2 * NUM_TURNS)
    record = (tmp_path / "run" / "run.json").read_bytes()
    files = sorted(path.name for path in (tmp_path / "run").rglob("*.parquet"))

    second = done(replace(config, batch_size=1))  # how fast it goes does not make it another run
    assert (second.resumed, second.failures) == (num_answers, {})
    assert len(seen) == num_answers
    assert (counting.answered.total(), counting.forced.total()) == (3 * NUM_TURNS, 2 * NUM_TURNS)
    assert (tmp_path / "run" / "run.json").read_bytes() == record
    assert sorted(path.name for path in (tmp_path / "run").rglob("*.parquet")) == files


@pytest.fixture
def in_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_SCORE_TRACES", 3)
    monkeypatch.setattr(pipeline, "_FLUSH", 2)


@pytest.mark.usefixtures("in_small_groups")
@pytest.mark.parametrize("runner", ["replay", "decode"])
def test_a_killed_run_goes_on_to_the_same_rows(
    runner: str, base: RunConfig, tmp_path: Path, scripted: Callable[[Callable[[Any], None]], Scripted]
) -> None:
    config = replace(base, drafter="ngram,scripted", runner=runner, perturb=CONDITIONS[1:2], depth=(2,))
    config = replace(config, max_new_tokens=6)
    num_answers = 2 * NUM_TURNS
    whole: list[Any] = []
    scripted(whole.append)
    done(replace(config, out=str(tmp_path / "whole")))
    assert len(whole) == num_answers

    for after in (0, 6, 11):  # at once, within the first turn, within a later one
        calls: list[Any] = []

        def kill(trace: Any, after: int = after, calls: list[Any] = calls) -> None:
            if len(calls) == after:
                raise KeyboardInterrupt
            calls.append(trace)

        scripted(kill)
        config = replace(config, out=str(tmp_path / f"killed-{after}"))
        with pytest.raises(KeyboardInterrupt):
            done(config)
        with RunStore(config.out, readonly=True) as store:
            kept = len(store.answers())
        # scored in groups of at most three; with decode nothing finished is lost at all
        assert after - 3 < kept <= after if runner == "replay" else kept == after

        again: list[Any] = []
        scripted(again.append)
        report = done(config)
        assert (report.resumed, report.failures) == (kept, {})
        assert len(again) == num_answers - kept
        assert_same_tables(tmp_path / "whole", Path(config.out))


def test_a_drafter_that_failed_is_tried_again_without_new_answers(
    base: RunConfig,
    tmp_path: Path,
    scripted: Callable[[Callable[[Any], None]], Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(trace: Any) -> None:
        prompt = trace.prompt
        if (prompt.prompt_id, prompt.turn, prompt.condition.id) == ("own/echo", 1, "template/no_bos"):
            raise RuntimeError("out of something")

    config = replace(base, drafter="scripted,ngram", out=str(tmp_path / "run"))
    scripted(fails)
    report = done(config)
    assert report.failures == {
        "own/echo, turn 2, template/no_bos, scripted": "RuntimeError: out of something"
    }
    items = table(tmp_path / "run", "items")
    (bad,) = items[items.error.notna()].to_dict("records")
    assert (bad["prompt_id"], bad["turn"], bad["condition"], bad["drafter"], bad["num_rows"]) == (
        ("own/echo", 1, "template/no_bos", "scripted", 0)
    )
    assert len(items) == 2 * 3 * NUM_TURNS  # the other prompts, turns and the other drafter finished
    assert table(tmp_path / "run", "answers").error.isna().all()

    seen: list[Any] = []
    scripted(seen.append)
    counting = Counting(monkeypatch)
    report = done(config)
    assert (report.failures, report.resumed) == ({}, 3 * NUM_TURNS)
    assert [trace.prompt.key for trace in seen] == [("own/echo", 1, "template/no_bos")]
    assert (counting.answered.total(), counting.forced.total()) == (0, 1)
    done(replace(config, out=str(tmp_path / "whole")))
    assert_same_tables(tmp_path / "run", tmp_path / "whole", ("rounds", "answers"))


def crash_on(prompt_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target's pass over a batch with this prompt die."""
    prefill = Answerer._prefill

    def dying(answerer: Answerer, engine: Any, fresh: Sequence[Any], *rest: Any, **more: Any) -> None:
        if any(request.prompt.prompt_id == prompt_id for request in fresh):
            raise RuntimeError("device-side assert")
        prefill(answerer, engine, fresh, *rest, **more)

    monkeypatch.setattr(Answerer, "_prefill", dying)


def test_a_prompt_that_crashes_the_target_costs_itself_alone(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(base, drafter="ngram,ngram@min=1", max_new_tokens=8, out=str(tmp_path / "run"))
    with monkeypatch.context() as broken:
        crash_on("own/echo", broken)
        report = done(config)
    assert report.failures == {f"own/echo, {name}": "RuntimeError: device-side assert" for name in CONDITIONS}
    answers = table(tmp_path / "run", "answers")
    failed = answers[answers.error.notna()]
    # its later turns would follow an answer that is not there
    assert set(zip(failed.prompt_id, failed.turn, strict=True)) == {("own/echo", 0)}
    assert (failed.answer_tokens == 0).all() and len(answers) - len(failed) == 3 * (NUM_TURNS - 3)
    items = table(tmp_path / "run", "items")
    assert set(items[items.error.notna()].prompt_id) == {"own/echo"}
    assert len(items[items.error.isna()]) == 2 * 3 * (NUM_TURNS - 3)

    assert done(config).failures == {}
    done(replace(config, out=str(tmp_path / "whole")))
    assert_same_tables(tmp_path / "run", tmp_path / "whole", ("rounds",))
    with (
        RunStore(tmp_path / "run", readonly=True) as one,
        RunStore(tmp_path / "whole", readonly=True) as other,
    ):
        ids = [
            {AnswerKey(*(row[n] for n in AnswerKey._fields)): row["answer_ids"] for row in store.answers()}
            for store in (one, other)
        ]
    assert ids[0] == ids[1]


def arguments(config: RunConfig) -> list[str]:
    """The command line of a configuration (those options that tests change)."""
    return [
        "run", "--suite", ",".join(config.suite), "--perturb", ",".join(config.perturb), "--target", config.target,
        "--drafter", config.drafter, "--depth", ",".join(map(str, config.depth)), "--max-new-tokens",
        str(config.max_new_tokens), "--device", config.device, "--out", config.out,
    ]  # fmt: skip


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_exit_code_says_that_something_failed(
    base: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(base, drafter="ngram", out=str(tmp_path / "run"))
    with monkeypatch.context() as broken:
        crash_on("own/sum", broken)
        assert exit_code(*arguments(config)) == 1
    out, err = capsys.readouterr()
    assert "own/sum, template/regular: RuntimeError: device-side assert" in err
    assert "accepted_per_round" in out  # the table of all that worked
    assert exit_code(*arguments(config)) == 0
    assert "own/sum" not in capsys.readouterr().err


def test_exit_code_when_nothing_worked(
    base: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scripted: Callable[[Callable[[Any], None]], Scripted],
) -> None:
    def fails(_trace: Any) -> None:
        raise RuntimeError("out of something")

    scripted(fails)
    config = replace(base, drafter="scripted", perturb=(), out=str(tmp_path / "run"))
    assert exit_code(*arguments(config)) == 1
    assert "own/sum, template/regular, scripted: RuntimeError: out of something" in capsys.readouterr().err


def test_a_stopped_command_says_how_to_go_on(
    base: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scripted: Callable[[Callable[[Any], None]], Scripted],
) -> None:
    def stop(_trace: Any) -> None:
        raise KeyboardInterrupt

    scripted(stop)
    config = replace(base, drafter="scripted", perturb=(), out=str(tmp_path / "run"))
    assert exit_code(*arguments(config)) == 130
    assert capsys.readouterr().err.endswith(
        "specbench: stopped; the same command goes on where this one ended\n"
    )
    scripted(lambda _trace: None)
    assert exit_code(*arguments(config)) == 0


def test_config_file_repeats_the_run_exactly(
    base: RunConfig, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    assert exit_code("run", "--config", str(finished / "run.json"), "--out", str(again)) == 0
    assert_same_tables(finished, again)
    before, now = (json.loads((path / "run.json").read_text()) for path in (finished, again))
    assert before["config"] | {"out": ""} == now["config"] | {"out": ""}
    for key in ("run_id", "prompts_hash", "later_turns_hash", "target", "drafters", "conditions"):
        assert before[key] == now[key]
    # an option beside it changes that one thing
    assert (
        exit_code("run", "--config", str(again / "run.json"), "--limit", "1", "--out", str(tmp_path / "one"))
        == 0
    )
    one = json.loads((tmp_path / "one" / "run.json").read_text())
    assert one["config"] == now["config"] | {"limit": 1, "out": str(tmp_path / "one")}


# ---- what is refused


def test_another_run_in_the_same_directory_is_refused(
    base: RunConfig, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    for change in ({"depth": (2,)}, {"seed": 1}, {"drafter": "ngram"}, {"limit": 2}, {"answer_path": "free"}):
        config = replace(base, **({"answer_path": "both"} | change), out=str(finished))
        with pytest.raises(UserError, match=r"holds a different run .*give another --out") as caught:
            run(config, Observer())
        assert "\n" not in str(caught.value) and str(finished / "run.json") in str(caught.value)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    assert not counting.answered


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda lines: lines[0]["turns"].__setitem__(0, "Name two seas."), "the prompts"),
        (lambda lines: lines[0]["turns"].__setitem__(1, "Which is the coldest?"), "the prompts"),
        (lambda lines: lines.append({"prompt": "One more."}), "the prompts"),
        (lambda lines: lines.pop(), "the prompts"),
    ],
    ids=["a first turn", "a later turn", "one more", "one less"],
)
def test_changed_prompts_are_refused(change: Any, what: str, base: RunConfig, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "own.jsonl", PROMPTS[:2])
    config = replace(base, suite=(str(path),), perturb=(), drafter="ngram", out=str(tmp_path / "run"))
    done(config)
    lines = json.loads(json.dumps(PROMPTS[:2]))
    change(lines)
    write_prompts(path, lines)
    with pytest.raises(UserError, match=f"^{what} changed since .*run.json was written; give another --out$"):
        run(config, Observer())
    write_prompts(path, PROMPTS[:2])
    assert done(config).failures == {}


def change_weights(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] += 0.5
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("changed", "what"), [("drafter", "drafter draft-lm=.*"), ("target", "the target")])
def test_changed_model_files_are_refused(
    changed: str, what: str, base: RunConfig, tiny_target_path: Path, tmp_path: Path
) -> None:
    for name in ("drafter", "target"):
        shutil.copytree(tiny_target_path, tmp_path / name)
    config = replace(
        base,
        perturb=(),
        limit=1,
        target=str(tmp_path / "target"),
        drafter=f"draft-lm={tmp_path / 'drafter'}",
        out=str(tmp_path / "run"),
    )
    done(config)
    change_weights(tmp_path / changed)
    with pytest.raises(UserError, match=f"^{what} changed since .*give another --out$"):
        run(config, Observer())


def test_another_number_format_is_refused(base: RunConfig, tmp_path: Path, monkeypatch: Any) -> None:
    config = replace(base, perturb=(), limit=1, drafter="ngram", out=str(tmp_path / "run"))
    done(config)
    load = Target.load
    # what dtype=auto means on a GPU
    monkeypatch.setattr(
        Target, "load", lambda name, **options: load(name, **(options | {"dtype": "bfloat16"}))
    )
    with pytest.raises(UserError, match=r"the target's dtype \(float32, now bfloat16\) changed"):
        run(config, Observer())


def test_a_directory_of_other_things_is_refused(base: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "thesis.txt").write_text("my only copy")
    with pytest.raises(UserError, match="is not empty and holds no run.json"):
        run(replace(base, out=str(tmp_path)), Observer())
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "er", "thesis.txt"]


@pytest.mark.parametrize("content", ["", "[]", '{"run_id": "1"}', '{"run_id": 1'], ids=repr)
def test_a_record_that_is_none_is_refused(content: str, base: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match="run.json .*a run's record.*give another --out$"):
        run(replace(base, out=str(tmp_path)), Observer())


def test_a_start_that_was_refused_does_not_block_the_next(base: RunConfig, tmp_path: Path) -> None:
    config = replace(base, perturb=(), limit=1, drafter="draft-lm=nowhere", out=str(tmp_path / "run"))
    with pytest.raises(UserError):
        run(config, Observer())
    assert not (tmp_path / "run" / "run.json").exists()
    assert done(replace(config, drafter="ngram")).failures == {}


def test_dry_run_touches_nothing(base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "load", None)
    assert run(replace(base, out=str(tmp_path / "run")), Observer(), dry_run=True) is None
    assert not (tmp_path / "run").exists()


# ---- depths


def test_several_depths_cost_one_replay(
    base: RunConfig,
    tmp_path: Path,
    scripted: Callable[[Callable[[Any], None]], Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(base, drafter="scripted", out=str(tmp_path / "many"), depth=(1, 2, 4))
    drafter = scripted(lambda _trace: None)
    counting = Counting(monkeypatch)
    done(config)
    assert set(counting.answered.values()) == {1} and len(counting.answered) == 3 * NUM_TURNS
    assert {depth for _count, depth in drafter.requests} == {4}
    assert sum(count for count, _depth in drafter.requests) == 3 * NUM_TURNS
    many = table(tmp_path / "many", "rounds").drop(columns="run_id")
    assert set(many.k) == {1, 2, 4}
    for depth in (1, 2, 4):
        done(replace(config, depth=(depth,), out=str(tmp_path / f"only-{depth}")))
        only = table(tmp_path / f"only-{depth}", "rounds").drop(columns="run_id")
        pd.testing.assert_frame_equal(many[many.k == depth].reset_index(drop=True), only)


def test_decode_makes_the_rounds_that_replay_foresaw(base: RunConfig, tmp_path: Path) -> None:
    for runner in ("replay", "decode"):
        done(replace(base, runner=runner, perturb=("template/no_bos",), out=str(tmp_path / runner)))
    columns = [
        "prompt_id",
        "turn",
        "condition",
        "drafter",
        "k",
        "round",
        "start",
        "num_accepted",
        "num_emitted",
        "cut",
    ]
    one, other = (table(tmp_path / name, "rounds")[columns] for name in ("replay", "decode"))
    pd.testing.assert_frame_equal(one, other)


# ---- a runner that stops by itself


def test_what_was_finished_before_a_refusal_is_kept(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Giving(DecodeRunner):
        def run(self, work: Any, drafters: Any, on_tokens: Any) -> Any:
            for number, outcome in enumerate(super().run(work, drafters, on_tokens)):
                if number == 3:
                    raise UserError("the engine is gone")
                yield outcome

    module = ModuleType("giving_runner")
    module.create = Giving  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "giving_runner", module)
    assert isinstance(runner_names.BUILTIN, dict)
    monkeypatch.setitem(runner_names.BUILTIN, "giving", "giving_runner:create")
    config = replace(base, runner="giving", drafter="ngram", perturb=(), out=str(tmp_path / "run"))
    with pytest.raises(UserError, match="the engine is gone"):
        run(config, Observer())
    assert len(table(tmp_path / "run", "answers")) == 3


# ---- the configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": (0,)}, "--depth must be 1 or more"),
        ({"depth": (4, -1)}, "--depth must be 1 or more"),
        ({"depth": ()}, "--depth must be 1 or more"),
        ({"limit": 0}, "--limit must be 1 or more"),
        ({"max_new_tokens": 1}, "--max-new-tokens must be 2 or more"),
        ({"batch_size": 0}, "--batch-size must be 1 or more"),
        ({"temperature": -0.1}, "--temperature >= 0"),
        ({"temperature": float("nan")}, "--temperature >= 0"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": float("nan")}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
        ({"sampler": "greedy", "temperature": 1.0}, "--sampler greedy needs --temperature 0"),
        ({"sampler": "rejection"}, "--sampler rejection needs --temperature above 0"),
        (
            {"sampler": "rejecton", "temperature": 1.0},
            "unknown sampler 'rejecton'; did you mean 'rejection'?",
        ),
        ({"answer_path": "fre"}, "unknown answer path 'fre'; did you mean 'free' or 'forced'?"),
        ({"answer_path": "forced", "runner": "decode"}, "--answer-path forced needs --runner replay"),
        ({"keep_traces": True, "runner": "decode"}, "--keep-traces needs --runner replay"),
        ({"traces": "pack", "runner": "decode"}, "leave out --runner decode"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        RunConfig(**options)
    assert message in str(caught.value)


WORDS = st.text(min_size=1, max_size=12)
NUMBERS = st.integers(1, 2**40)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "suite": st.lists(WORDS, max_size=3).map(tuple),
    "perturb": st.lists(WORDS, max_size=3).map(tuple),
    "severity": st.none() | st.integers(0, 3),
    "target": WORDS,
    "drafter": WORDS,
    "depth": st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple),
    "limit": st.none() | NUMBERS,
    "seed": st.integers(-(2**40), 2**40),
    "max_new_tokens": st.integers(2, 2**20),
    "temperature": st.just(0.0) | st.floats(0.01, 10),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 1000),
    "sampler": st.just("auto"),
    "runner": st.sampled_from(["replay", "decode", "vllm"]),
    "answer_path": st.just("free"),
    "full_chains": st.booleans(),
    "device": WORDS,
    "dtype": WORDS,
    "batch_size": NUMBERS,
    "data_dir": st.none() | WORDS,
    "lengths": st.lists(NUMBERS, max_size=3).map(tuple),
    "longctx_text": st.none() | WORDS,
    "template": st.none() | WORDS,
    "traces": st.none(),
    "keep_traces": st.just(False),
    "engine": st.just(()),
    "url": st.none(),
    "throughput": st.just(()),
    "trust_remote_code": st.booleans(),
    "num_fewshot": st.none() | st.integers(0, 64),
    "score": st.booleans(),
    "run_generated_code": st.just(False),
    "out": WORDS,
}


def test_the_strategy_covers_every_option() -> None:
    assert set(OPTIONS) == {field.name for field in fields(RunConfig)}


@given(st.fixed_dictionaries({}, optional=OPTIONS))
def test_configuration_survives_json(options: dict[str, Any]) -> None:
    config = RunConfig(**options)
    again = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.identity() == config.identity()


@given(st.fixed_dictionaries({}, optional=OPTIONS), st.data())
def test_identity_changes_with_what_is_measured_and_with_nothing_else(
    options: dict[str, Any], data: Any
) -> None:
    config = RunConfig(**options)
    name = data.draw(st.sampled_from(sorted(OPTIONS)))
    changed = replace(config, **{name: data.draw(OPTIONS[name])})
    after_the_rounds = {
        "out",
        "device",
        "batch_size",
        "keep_traces",
        "throughput",
        "score",
        "run_generated_code",
    }
    same = changed == config or name in after_the_rounds
    assert (changed.identity() == config.identity()) == same


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dept": [4]}, "unknown option 'dept'; did you mean 'depth'?"),
        ({"depth": 4}, "'depth' takes tuple[int], not 4"),
        ({"depth": ["4"]}, "'depth' takes tuple[int], not ['4']"),
        ({"depth": [True]}, "'depth' takes tuple[int], not [True]"),
        ({"limit": "8"}, "'limit' takes int | None, not '8'"),
        ({"suite": "mini"}, "'suite' takes tuple[str], not 'mini'"),
        ({"temperature": None}, "'temperature' takes float, not None"),
        ({"full_chains": 1}, "'full_chains' takes bool, not 1"),
        ({"target": None}, "'target' takes str, not None"),
    ],
    ids=str,
)
def test_configurations_of_wrong_types_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        RunConfig.from_json(values)
    assert message in str(caught.value)


def test_run_settings_ask_for_each_depth_once(base: RunConfig) -> None:
    settings: RunSettings = pipeline.run_settings(
        replace(base, depth=(4, 1, 4), temperature=0.5, seed=9, top_k=3)
    )
    assert (settings.depths, settings.depth) == ((1, 4), 4)
    assert (settings.sampler, settings.sampling.seed, settings.sampling.top_k) == ("match", 9, 3)
