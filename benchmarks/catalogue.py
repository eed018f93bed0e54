r"""The public prompt sets as data: files, hub copies, licences, and what a row of each becomes.

Example rows, as published:

    mtbench   {"question_id": 81, "category": "writing", "turns": ["Compose ...", "Rewrite ..."]}
    gsm8k     {"question": "Janet's ducks ...", "answer": "... #### 18"}
    humaneval {"task_id": "HumanEval/0", "prompt": "def f(...): ...", "entry_point": "f", "test": "..."}
    mbpp      {"task_id": 2, "prompt": "Write a function ...", "code": "...", "test_list": ["assert ..."]}

The user's text is the published question and nothing else, except for the two code sets, whose rows are code
and tests rather than requests: HUMANEVAL_INSTRUCTION and MBPP_INSTRUCTION are put before them, and the
published text stands verbatim after the instruction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specbench.benchmarks.published import HubSource, PublishedSuite
from specbench.benchmarks.reading import Record
from specbench.types import Prompt, SuiteInfo

HUMANEVAL_INSTRUCTION = (
    "Complete the following Python function. Reply with the whole function in one code block."
)
MBPP_INSTRUCTION = "Write Python code for the task below. Reply with the code in one code block."

_SPEC_BENCH_TASKS = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})


def _references(value: Any) -> dict[str, Any]:
    """Split a published reference into ``reference`` (its first text) and ``meta`` (all of it, if more)."""
    flat = [value] if isinstance(value, str) else list(value or ())
    while flat and isinstance(flat[0], list):
        flat = [*flat[0], *flat[1:]]
    texts = [text for text in flat if isinstance(text, str) and text.strip()]
    if not texts:
        return {}
    meta = {"references": json.dumps(value, ensure_ascii=False)} if len(flat) > 1 else {}
    return {"reference": texts[0], "meta": meta}


def _turns(
    suite: str, category: str, *, first_id: int = 0, group: Callable[[str], str] | None = None
) -> Callable[[Record], Prompt]:
    """Return the parser of FastChat's question format, which EAGLE and Spec-Bench share.

    Args:
        suite: name of the suite.
        category: where the row has none.
        first_id: the published id of the first row, for copies that dropped the ids but kept the order.
        group: maps a published category to the one used; the published one is then kept in ``meta``.
    """

    def parse(record: Record) -> Prompt:
        # The hub's copies call "turns" "prompt": a list for MT-Bench, one text for single-turn sets.
        if "turns" not in record.value and isinstance(record.value.get("prompt"), str):
            turns: tuple[str, ...] = (record.text("prompt"),)
        else:
            turns = record.texts("turns", "prompt")
        published = record.value.get("category") or category
        if not isinstance(published, str):
            raise record.fail(f"'category' to be a string, got {published!r}")
        more = _references(record.value.get("reference"))
        meta = dict(more.pop("meta", {}))
        if group is not None:
            meta["published_category"] = published
        number = record.name("question_id") or str(first_id + record.index)
        return Prompt(
            id=f"{suite}/{number}",
            suite=suite,
            category=group(published) if group is not None else published,
            turns=turns,
            meta=meta,
            **more,
        )

    return parse


def _gsm8k(record: Record) -> Prompt:
    solution = record.text("answer")
    _, mark, final = solution.rpartition("####")
    if not mark:
        raise record.fail("'answer' to end in '#### number'")
    return Prompt(
        id=f"gsm8k/{record.index}",
        suite="gsm8k",
        category="math",
        turns=(record.text("question"),),
        reference=final.strip(),
        meta={"solution": solution},
    )


def _math500(record: Record) -> Prompt:
    # Published as question / answer (the worked solution, then "The answer is: X"), on the hub as problem /
    # solution / answer (X alone); both end as the same prompt.
    answer = record.text("answer")
    solution, mark, final = answer.rpartition("The answer is:")
    meta = {"solution": record.text("solution") if "solution" in record.value else solution or answer}
    for name in ("subject", "level", "unique_id"):
        value = record.name(name)
        if value is not None:
            meta[name] = value
    return Prompt(
        id=f"math500/{record.index}",
        suite="math500",
        category="math",
        turns=(record.text("question", "problem"),),
        reference=(final if mark else answer).strip(),
        meta=meta,
    )


def _humaneval(record: Record) -> Prompt:
    code = record.text("prompt")
    scoring = {"entry_point": record.text("entry_point"), "test": record.text("test"), "prompt": code}
    block = code if code.endswith("\n") else code + "\n"
    return Prompt(
        id=f"humaneval/{record.text('task_id').removeprefix('HumanEval/')}",
        suite="humaneval",
        category="code",
        turns=(f"{HUMANEVAL_INSTRUCTION}\n\n```python\n{block}```",),
        reference=record.text("canonical_solution"),
        meta={"scoring": json.dumps(scoring)},
    )


def _mbpp(record: Record) -> Prompt:
    task, tests = record.text("prompt"), record.texts("test_list")
    number = record.name("task_id")
    imports = record.value.get("test_imports")
    if number is None or not isinstance(imports, list) or not all(isinstance(line, str) for line in imports):
        raise record.fail("a 'task_id' and a list 'test_imports' (the sanitised MBPP format)")
    shown = "\n".join([*imports, *tests])
    return Prompt(
        id=f"mbpp/{number}",
        suite="mbpp",
        category="code",
        turns=(
            f"{MBPP_INSTRUCTION}\n\n{task}\n\nThe code must pass these tests:\n\n```python\n{shown}\n```",
        ),
        reference=record.text("code"),
        meta={"scoring": json.dumps({"test_imports": imports, "test_list": list(tests)})},
    )


def _suite(
    info: SuiteInfo, size: int, parse: Callable[[Record], Prompt], url: str, hub: HubSource | None = None
) -> PublishedSuite:
    return PublishedSuite(info=info, size=size, parse=parse, url=url, hub=hub)


_EAGLE = "github.com/SafeAILab/EAGLE"
_EAGLE_CITATION = "Li et al., EAGLE-3: Scaling up inference acceleration of large language models, 2025"

_MTBENCH_HUB = HubSource(
    dataset="HuggingFaceH4/mt_bench_prompts",
    revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
    splits=("train",),
)
_GSM8K_HUB = HubSource(
    dataset="openai/gsm8k", revision="740312add88f781978c0658806c59bc2815b9866", config="main"
)
_HUMANEVAL_HUB = HubSource(
    dataset="openai/openai_humaneval",
    revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
    config="openai_humaneval",
)
_MATH500_HUB = HubSource(
    dataset="HuggingFaceH4/MATH-500", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
)
# The sanitised file is one list of 427; the hub deals it out to four splits.
_MBPP_HUB = HubSource(
    dataset="google-research-datasets/mbpp",
    revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
    config="sanitized",
    splits=("train", "test", "validation", "prompt"),
    order_by="task_id",
)


def _speculators_hub(data_file: str) -> HubSource:
    return HubSource(
        dataset="RedHatAI/speculator_benchmarks",
        revision="2ae86affa2cb97a972b7fc681dd51c04fbff083e",
        splits=("train",),
        data_file=data_file,
    )


MTBENCH = _suite(
    SuiteInfo(
        name="mtbench",
        description="MT-Bench: 80 two-turn questions in 8 categories",
        licence="Apache-2.0",
        citation="Zheng et al., Judging LLM-as-a-judge with MT-Bench and Chatbot Arena, NeurIPS 2023",
        files=("mt_bench.jsonl", "mt_bench/question.jsonl"),
        hub=_MTBENCH_HUB.dataset,
        revision=_MTBENCH_HUB.revision,
    ),
    80,
    _turns("mtbench", "chat", first_id=81),
    "github.com/lm-sys/FastChat, fastchat/llm_judge/data/mt_bench/question.jsonl",
    _MTBENCH_HUB,
)

GSM8K = _suite(
    SuiteInfo(
        name="gsm8k",
        description="GSM8K: 1,319 grade-school word problems, the question alone",
        licence="MIT",
        citation="Cobbe et al., Training verifiers to solve math word problems, 2021",
        files=("gsm8k_test.jsonl", "gsm8k/test.jsonl", "grade_school_math/data/test.jsonl"),
        hub=_GSM8K_HUB.dataset,
        revision=_GSM8K_HUB.revision,
    ),
    1319,
    _gsm8k,
    "github.com/openai/grade-school-math, grade_school_math/data/test.jsonl",
    _GSM8K_HUB,
)

HUMANEVAL = _suite(
    SuiteInfo(
        name="humaneval",
        description="HumanEval: 164 Python functions to complete, with a one-line instruction",
        licence="MIT",
        citation="Chen et al., Evaluating large language models trained on code, 2021",
        files=("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        hub=_HUMANEVAL_HUB.dataset,
        revision=_HUMANEVAL_HUB.revision,
    ),
    164,
    _humaneval,
    "github.com/openai/human-eval, data/HumanEval.jsonl.gz",
    _HUMANEVAL_HUB,
)

MATH500 = _suite(
    SuiteInfo(
        name="math500",
        description="MATH-500: 500 competition problems, the problem alone",
        licence="MIT",
        citation="Lightman et al., Let's verify step by step, 2023; Hendrycks et al., MATH, 2021",
        files=("math500.jsonl", "math_splits/test.jsonl"),
        hub=_MATH500_HUB.dataset,
        revision=_MATH500_HUB.revision,
    ),
    500,
    _math500,
    "github.com/openai/prm800k, prm800k/math_splits/test.jsonl",
    _MATH500_HUB,
)

MBPP = _suite(
    SuiteInfo(
        name="mbpp",
        description="MBPP, sanitised: 427 short Python tasks with their tests and a one-line instruction",
        licence="CC-BY-4.0",
        citation="Austin et al., Program synthesis with large language models, 2021",
        files=("sanitized-mbpp.json",),
        hub=_MBPP_HUB.dataset,
        revision=_MBPP_HUB.revision,
    ),
    427,
    _mbpp,
    "github.com/google-research/google-research, mbpp/sanitized-mbpp.json",
    _MBPP_HUB,
)

ALPACA = _suite(
    SuiteInfo(
        name="alpaca",
        description="80 Alpaca instructions, EAGLE's evaluation set",
        licence="as the source: Alpaca (CC-BY-NC-4.0, no commercial use)",
        citation=f"Taori et al., Stanford Alpaca, 2023; selection: {_EAGLE_CITATION}",
        files=("alpaca_eagle.jsonl", "alpaca/question.jsonl"),
    ),
    80,
    _turns("alpaca", "instruction"),
    f"{_EAGLE}, eagle/data/alpaca/question.jsonl",
)

EAGLE_SUM = _suite(
    SuiteInfo(
        name="eagle-sum",
        description="80 news articles to summarise (CNN/DailyMail), EAGLE's evaluation set",
        licence="as the source: CNN/DailyMail (Apache-2.0 data set)",
        citation=f"Nallapati et al., CNN/DailyMail, 2016; selection: {_EAGLE_CITATION}",
        files=("sum_eagle.jsonl", "sum/question.jsonl"),
        hub="RedHatAI/speculator_benchmarks",
        revision=_speculators_hub("").revision,
    ),
    80,
    _turns("eagle-sum", "summarization", first_id=241),
    f"{_EAGLE}, eagle/data/sum/question.jsonl",
    _speculators_hub("summarization.jsonl"),
)

EAGLE_QA = _suite(
    SuiteInfo(
        name="eagle-qa",
        description="80 short factual questions (Natural Questions), EAGLE's evaluation set",
        licence="as the source: Natural Questions (CC-BY-SA-3.0)",
        citation=f"Kwiatkowski et al., Natural Questions, 2019; selection: {_EAGLE_CITATION}",
        files=("qa_eagle.jsonl", "qa/question.jsonl"),
        hub="RedHatAI/speculator_benchmarks",
        revision=_speculators_hub("").revision,
    ),
    80,
    _turns("eagle-qa", "qa", first_id=321),
    f"{_EAGLE}, eagle/data/qa/question.jsonl",
    _speculators_hub("qa.jsonl"),
)

# The hub copy known to us dropped MT-Bench's second turns, so this set is read from the published file only.
SPECBENCH480 = _suite(
    SuiteInfo(
        name="specbench480",
        description="Spec-Bench: 480 prompts, 6 tasks (chat, translation, summaries, qa, maths, rag)",
        licence="Apache-2.0",
        citation="Xia et al., Unlocking efficiency in LLM inference (Spec-Bench), ACL 2024",
        files=("spec_bench.jsonl", "spec_bench/question.jsonl"),
    ),
    480,
    _turns("specbench480", "mt_bench", group=lambda name: name if name in _SPEC_BENCH_TASKS else "mt_bench"),
    "github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
)
