"""specbench as a model of lm-eval gives what lm-eval's own Hugging Face model gives, whoever drafts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specbench.cli import main
from specbench.errors import UserError
from specbench.runners.decode import DecodeRunner
from specbench.runners.targets import Target

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'specbench[lm-eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from specbench.runners.lm_eval_model import SpecbenchLM

UTILS = """
import re

def first_number(doc):
    return re.findall(r"[0-9]+", doc["question"])[0]
"""


def write_task(folder: Path, data: Path, **changes: Any) -> TaskManager:
    """A task whose score is neither 0 nor 1 for a small model: the answer's first number is the question's."""
    (folder / "utils.py").write_text(UTILS)
    settings = {
        "task": "first_number",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "num_fewshot": 0,
        "generation_kwargs": {"until": [".", "Question:"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {
                "name": "first",
                "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"}, {"function": "take_first"}],
            }
        ],
        "metadata": {"version": 1.0},
        **changes,
    }
    text = yaml.safe_dump(settings) + "doc_to_target: !function utils.first_number\n"
    (folder / "first_number.yaml").write_text(text)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def evaluate(model: Any, manager: TaskManager, limit: int, **more: Any) -> Any:
    return simple_evaluate(
        model=model, tasks=["first_number"], limit=limit, task_manager=manager, bootstrap_iters=0, **more
    )


def answers(results: Any) -> list[tuple[int, str, float]]:
    rows = results["samples"]["first_number"]
    return sorted((row["doc_id"], row["resps"][0][0], row["exact_match"]) for row in rows)


@pytest.mark.target
@pytest.mark.data
def test_same_answers_and_score_as_hf_with_every_zoo_drafter(
    smollm2_path: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = write_task(tmp_path, data_dir / "gsm8k_test.jsonl")
    target = Target.load(str(smollm2_path), device="cpu", dtype="float32")
    monkeypatch.setattr(Target, "load", lambda *_a, **_k: target)
    hf = HFLM(pretrained=target.model, tokenizer=target.tokenizer, batch_size=1, max_length=8192)
    wanted = evaluate(hf, manager, 3)
    score = wanted["results"]["first_number"]["exact_match,first"]
    assert 0 < score < 1, "the task no longer tells answers apart"
    assert len({text for _, text, _ in answers(wanted)}) == 3
    for drafter in ("none", "zoo:eagle3", "zoo:eagle3.1"):
        model = SpecbenchLM(target=str(smollm2_path), drafter=drafter, depth=4, device="cpu")
        found = evaluate(model, manager, 3)
        assert answers(found) == answers(wanted)
        assert found["results"]["first_number"]["exact_match,first"] == score
        info = found["config"]["specbench"]
        assert info["drafter"] == drafter and info["target_fingerprint"] == target.info.fingerprint
        if drafter != "none":
            rates = info["acceptance"]["first_number"]
            assert rates["answers"] == 3 and rates["rounds"] > 3
            assert rates["accepted_per_round"] == pytest.approx(sum(rates["marginal_rates"]))
            assert rates["accepted_per_round"] > 0.3


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} and {n}?"}) + "\n" for n in range(3)))
    return path


def tiny(path: Path, **arguments: Any) -> SpecbenchLM:
    return SpecbenchLM(target=str(path), device="cpu", **arguments)


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=0, metadata=("task", i, 1))
        for i, a in enumerate(arguments)
    ]


def test_log_likelihoods_are_hfs(tiny_target_path: Path) -> None:
    ours = tiny(tiny_target_path, max_length=48)
    model = ours.target.model
    hf = HFLM(pretrained=model, tokenizer=ours.tokenizer, batch_size=2, max_length=48)
    hf.add_bos_token = None
    pairs = requests(
        "loglikelihood", ("abc", " def"), ("abc ", "d"), ("", "hello"), ("x" * 60, "tail of it"), ("q", "r")
    )
    for mine, theirs in zip(ours.loglikelihood(pairs), hf.loglikelihood(pairs), strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3) and mine[1] == theirs[1]
    best = int(model(torch.tensor([ours.tok_encode("abc")])).logits[0, -1].argmax())
    greedy = ours._loglikelihood_tokens([(None, ours.tok_encode("abc"), [best])], disable_tqdm=True)
    assert greedy[0][1] and greedy[0][0] < 0
    texts = requests("loglikelihood_rolling", ("short",), ("long text " * 15,))
    for mine, theirs in zip(ours.loglikelihood_rolling(texts), hf.loglikelihood_rolling(texts), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4) and math.isfinite(mine)


def test_lm_evals_cache_and_the_target_alone(tiny_target_path: Path, rows: Path, tmp_path: Path) -> None:
    manager = write_task(tmp_path, rows)
    with_drafter = tiny(tiny_target_path, drafter="ngram", depth=3, check_lossless=True)
    first = evaluate(with_drafter, manager, 3, use_cache=str(tmp_path / "cached"))
    assert with_drafter.lossy == []
    assert first["config"]["specbench"]["lossless"] == {"different": 0, "samples": []}
    assert first["config"]["specbench"]["answers_cut_by_their_limit"] > 0
    again = tiny(tiny_target_path, drafter="ngram", depth=3)
    second = evaluate(again, manager, 3, use_cache=str(tmp_path / "cached"))
    assert answers(second) == answers(first) and again.acceptance == {}
    alone = tiny(tiny_target_path)
    assert answers(evaluate(alone, manager, 3)) == answers(first)


def test_a_lossy_drafter_is_shown_token_by_token(
    tiny_target_path: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that accepts everything makes every drafter lossy."""
    from specbench.runners import decode

    right = decode.verify

    def lenient(logits: Any, proposal: Any, *more: Any) -> tuple[int, list[int]]:
        count, emitted = right(logits, proposal, *more)
        return (count, emitted) if not proposal.tokens else (1, [proposal.tokens[0], 65])

    monkeypatch.setattr(decode, "verify", lenient)
    model = tiny(tiny_target_path, drafter="ngram", depth=3, check_lossless=True)
    found = evaluate(model, write_task(tmp_path, rows), 3)
    assert model.lossy
    entry = model.lossy[0]
    alone = tiny(tiny_target_path)
    prompt, settings = alone._prepare(
        requests("generate_until", ("", {}))[0],
        0,
        found["samples"]["first_number"][entry.doc]["arguments"][0][0],
        {"until": [".", "Question:"], "max_gen_toks": 24},
    )
    (own,) = alone._outcomes([prompt], settings, None)
    assert entry.tokens[0] == own.answer_ids[entry.position] != entry.tokens[1]
    assert entry.margin == own.margins[entry.position]
    assert f"token {entry.position} is {entry.tokens[0]} from the target alone" in entry.sentence()


def test_an_engine_gets_all_requests_at_once_and_may_answer_in_any_order(
    tiny_target_path: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = write_task(tmp_path, rows)
    wanted = answers(evaluate(tiny(tiny_target_path), manager, 3))
    calls: list[tuple[int, tuple[str, ...]]] = []

    class Engine:
        def __init__(self, target: Target, settings: Any) -> None:
            self.inner, self.settings = DecodeRunner(target, settings), settings

        def run(self, work: Any, drafters: Any, on_tokens: Any) -> Any:
            calls.append((len(work), tuple(drafters)))
            bare = [replace(item, drafters=()) for item in work]
            outcomes = list(self.inner.run(work if drafters else bare, drafters, on_tokens))
            for outcome in outcomes:
                outcome.margins = ()
            return reversed(outcomes)

        def close(self) -> None:
            calls.append((0, ()))

    monkeypatch.setattr("specbench.runners.vllm_engine.vllm_runner", Engine)
    model = tiny(tiny_target_path, runner="vllm", drafter="ngram", check_lossless=True)
    assert answers(evaluate(model, manager, 3)) == wanted
    assert calls == [(3, ("ngram",)), (3, ()), (0, ())] and model.lossy == []


def test_the_command(
    tiny_target_path: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_task(tmp_path, rows)
    # lm-eval reads its whole catalogue first, which takes longer than all of these tests
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    where = tmp_path / "acceptance.json"
    arguments = f"target={tiny_target_path},drafter=ngram,depth=2,acceptance_file={where}"
    words = ["--tasks", str(tmp_path / "first_number.yaml"), "--limit", "2"]
    out = ["--output_path", str(tmp_path / "out"), "--log_samples"]
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", "--model_args", arguments, *words, *out])
    shown = capsys.readouterr().out
    assert stop.value.code == 0, shown
    assert "|first_number|" in shown and "first_number: accepted_per_round" in shown
    (results,) = (tmp_path / "out").rglob("results_*.json")
    stored = json.loads(results.read_text())["config"]["specbench"]
    assert stored == json.loads(where.read_text())
    assert stored["acceptance"]["first_number"]["answers"] == 2
    assert list((tmp_path / "out").rglob("samples_first_number_*.jsonl"))


@pytest.mark.parametrize(
    ("words", "changes", "sentence"),
    [
        (["--tasks", "gsm8k_cott"], {}, "lm-eval has no task 'gsm8k_cott'; did you mean"),
        (["--tasks", "TASK"], {"unsafe_code": True}, "allow it with --confirm_run_unsafe_code"),
        (["--tasks", "TASK", "--model_args", "target=TARGET,depht=3"], {}, "has no argument 'depht'"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    tiny_target_path: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    changes: dict[str, Any],
    sentence: str,
) -> None:
    write_task(tmp_path, rows, **changes)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    task, target = str(tmp_path / "first_number.yaml"), str(tiny_target_path)
    arguments = [] if "--model_args" in words else ["--model_args", f"target={target}"]
    given = [w.replace("TASK", task).replace("TARGET", target) for w in words]
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", *given, *arguments, "--limit", "1"])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("specbench: ") and sentence in last


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"drafters": "ngram"}, "has no argument 'drafters'"),
        ({"depth": 0}, "depth= a whole number of 1 or more, not 0"),
        ({"drafter": "ngram,ngram@min_n=2"}, "takes one drafter"),
        ({"runner": "magic"}, "runner=decode or runner=vllm, not 'magic'"),
        ({"batch_size": "many"}, "batch_size= a whole number"),
    ],
)
def test_bad_arguments(tiny_target_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tiny(tiny_target_path, **arguments)


def test_bad_requests(tiny_target_path: Path) -> None:
    model = tiny(tiny_target_path, max_length=40)
    for asked, sentence in (
        ({"max_gen_toks": 64}, "asks for 64 answer tokens, but the target has 40 positions"),
        ({"max_gen_toks": 20}, "its prompt has 50 tokens.*room for 20; give a smaller --num_fewshot"),
        ({"max_gen_toks": 2, "num_beams": 4}, "generation setting 'num_beams'"),
    ):
        with pytest.raises(UserError, match=sentence):
            model.generate_until(requests("generate_until", ("x" * 50, asked)), disable_tqdm=True)
