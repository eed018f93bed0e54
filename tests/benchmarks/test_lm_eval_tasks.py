"""Tasks of lm-eval as suites: lm-eval makes the prompts, and what we keep of them is all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from specbench.benchmarks import lm_eval_tasks
from specbench.benchmarks.lm_eval_tasks import load_tasks, messages_of
from specbench.benchmarks.resolve import load_suite
from specbench.errors import SpecbenchWarning, UserError
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.template import REGULAR
from specbench.types import Message, Prompt, SuiteRequest

pytest.importorskip("lm_eval", reason="the lm-eval suites need it: pip install 'specbench[lm-eval]'")

ROWS = [
    {"question": f"What is {n} and {n + 1}?", "answer": f"We add them.\n#### {2 * n + 1}"} for n in range(6)
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lm_eval_tasks._load.cache_clear()


def write_task(folder: Path, name: str = "sums", **changes: Any) -> Path:
    """A task file over local data, its functions in a module beside it."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data), "train": str(data)}},
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "description": "Add the numbers.\n\n",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Q:", "\n\n"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 2.5},
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def load(path: Path | str, **request: Any) -> list[Prompt]:
    return load_suite(f"lm-eval:{path}").load(SuiteRequest(**request))


def test_prompts_are_lm_evals_messages(tmp_path: Path) -> None:
    prompts = load(write_task(tmp_path), num_fewshot=2, limit=3, seed=1)
    assert [p.id for p in prompts] == [f"lm-eval:sums/{i}" for i in range(3)]
    # an independent reading of the same requests: lm-eval's plain text, made without any chat template
    (loaded,) = load_tasks(str(tmp_path / "sums.yaml"))
    loaded.task.set_fewshot_seed(seed=1235)
    loaded.task.build_all_requests(limit=3)
    for prompt, row, instance in zip(prompts, ROWS, loaded.task.instances, strict=False):
        assert prompt.turns == (f"Q: {row['question']}\nA:",)
        assert [m.role for m in prompt.history] == ["user", "assistant"] * 2
        shots = [
            f"{question.content} {answer.content}\n\n"
            for question, answer in zip(prompt.history[::2], prompt.history[1::2], strict=True)
        ]
        assert instance.args[0] == f"{prompt.system}{''.join(shots)}{prompt.turns[0]}"
        assert prompt.system == "Add the numbers.\n\n"
        assert prompt.stop_strings == ("Q:", "\n\n") and prompt.max_new_tokens == 24
        assert prompt.reference == row["answer"]
        assert prompt.meta["note"] == "lm-eval task sums, version 2.5, 2 examples, few-shot seed 1235"


def test_a_tasks_own_zero_is_kept(tmp_path: Path) -> None:
    two = write_task(tmp_path, "two", num_fewshot=2)
    assert [len(load(two, limit=1, num_fewshot=n)[0].history) for n in (1, None)] == [2, 4]
    path = write_task(tmp_path, num_fewshot=0)
    assert all(not p.history for p in load(path, num_fewshot=3, limit=2))
    assert all(not p.history for p in load(write_task(tmp_path, "other"), limit=2))


def test_the_answers_beginning_is_kept(tmp_path: Path) -> None:
    (prompt,) = load(write_task(tmp_path, gen_prefix="Let us see:"), limit=1)
    assert prompt.prefill == "Let us see:" and prompt.turns[0].startswith("Q:")


@pytest.mark.parametrize("changes", [{}, {"gen_prefix": "Let us see:"}])
def test_the_clean_rendering_is_the_chat_template_of_the_same_messages(
    tmp_path: Path, tiny_target_path: Path, changes: dict[str, str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_path)
    prompts = load(write_task(tmp_path, num_fewshot=1, **changes), limit=3)

    def template(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    (loaded,) = load_tasks(str(tmp_path / "sums.yaml"))
    loaded.task.set_fewshot_seed(seed=1234)
    loaded.task.build_all_requests(
        limit=3, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=template
    )
    chat = ChatTokenizer(tokenizer)
    for prompt, instance in zip(prompts, loaded.task.instances, strict=True):
        ids = REGULAR.render(prompt, 0, [], chat, 0).token_ids
        assert list(ids) == tokenizer.encode(instance.args[0], add_special_tokens=False)


def test_groups_and_what_cannot_be_drafted(tmp_path: Path) -> None:
    write_task(tmp_path, "one")
    write_task(tmp_path, "two", output_type="loglikelihood", generation_kwargs=None)
    write_task(tmp_path, "three")
    group = tmp_path / "all.yaml"
    group.write_text(yaml.safe_dump({"group": "all_sums", "task": ["one", "two", "three"]}))
    with pytest.warns(SpecbenchWarning, match="two ask for log-likelihoods"):
        prompts = load(group, limit=1)
    assert [p.suite for p in prompts] == ["lm-eval:one", "lm-eval:three"]
    with pytest.raises(UserError, match="asks for loglikelihood, .*nothing to draft"):
        load(tmp_path / "two.yaml")


def test_python_tasks(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from lm_eval.api.task import ConfigurableTask\n"
        "class Loud(ConfigurableTask):\n"
        "    def __init__(self, config=None):\n"
        "        super().__init__(config={k: v for k, v in config.items() if k != 'class'})\n"
        "    def doc_to_text(self, doc, doc_to_text=None):\n"
        "        return doc['question'].upper()\n"
    )
    text = (tmp_path / "sums.yaml").read_text().replace("task: sums", "task: loud")
    (tmp_path / "loud.yaml").write_text(text + "class: !function mine.Loud\n")
    (prompt,) = load(tmp_path / "loud.yaml", limit=1)
    assert prompt.turns == ("WHAT IS 0 AND 1?",) and prompt.suite == "lm-eval:loud"


def test_plain_text_is_one_user_turn() -> None:
    assert messages_of("Q: a\nA:") == [Message(role="user", content="Q: a\nA:")]


def test_sampling_the_run_does_not_follow_is_named(tmp_path: Path) -> None:
    asked = {"until": ["Q:"], "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    with pytest.warns(SpecbenchWarning, match=r"asks for top_p 0.9, temperature 0.7; the run's own"):
        load(write_task(tmp_path, generation_kwargs=asked), limit=1)


def test_standard_names_load_where_their_data_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a folder of the data set's name is what `datasets` opens in the place of the hub's copy of it
    folder = tmp_path / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(lines)
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    head = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": files}]})
    (folder.parent / "README.md").write_text(f"---\n{head}---\n")
    monkeypatch.chdir(tmp_path)
    prompts = load("gsm8k_cot_zeroshot", limit=2, num_fewshot=5)
    assert prompts[1].turns == ("Q: What is 1 and 2?\nA: Let's think step by step.",)
    assert prompts[0].stop_strings[0] == "Q:" and not prompts[0].history
    five = load("gsm8k", limit=1)
    assert len(five[0].history) == 10 and five[0].meta["num_fewshot"] == "5"


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    small = TaskManager(include_path=lm_eval_tasks.lm_eval_folder() / "gsm8k", include_defaults=False)
    monkeypatch.setattr(lm_eval_tasks, "_catalogue", lambda: small)
    with pytest.raises(UserError, match="no task 'gsm8k_cott'; did you mean 'lm-eval:gsm8k_cot'"):
        load("gsm8k_cott")
    with pytest.raises(UserError, match="needs the name of a task"):
        load("")
    with pytest.raises(UserError, match="no task file .*gone.yaml"):
        load(tmp_path / "gone.yaml")
    (tmp_path / "no.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match="no.yaml is no lm-eval task"):
        load(tmp_path / "no.yaml")
    (tmp_path / "broken.yaml").write_text("task: [1\n")
    with pytest.raises(UserError, match="broken.yaml cannot be read"):
        load(tmp_path / "broken.yaml")
    with pytest.raises(UserError, match="fails while it makes its prompts: .*mend the task"):
        load(write_task(tmp_path, "few"), num_fewshot=40)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "Dataset 'x/y' is a gated dataset on the Hub. Visit the page to ask for access.",
            "is gated; ask for",
        ),
        (
            "Couldn't reach 'x/y' on the Hub (ConnectionError)",
            "the Hugging Face hub is out of reach; connect",
        ),
    ],
)
def test_data_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, sentence: str
) -> None:
    def refuse(*_arguments: Any, **_settings: Any) -> None:
        raise ConnectionError(said)

    monkeypatch.setattr("datasets.load_dataset", refuse)
    path = write_task(tmp_path, dataset_path="x/y", dataset_kwargs=None)
    with pytest.raises(UserError, match=f"its data set x/y .*{sentence}"):
        load(path)


def test_without_lm_eval_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        UserError, match=r"needs lm-eval, which is not installed.*pip install 'specbench\[lm-eval\]'"
    ):
        load("gsm8k")


def test_specbench_alone_does_not_import_lm_eval() -> None:
    program = (
        "import sys, specbench.benchmarks.resolve, specbench.benchmarks.scoring, specbench.cli\n"
        "found = {'lm_eval', 'evaluate', 'datasets'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
