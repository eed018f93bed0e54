"""Time to render many prompts under many conditions.

Run: ``python perf/rendering.py TARGET_DIR [--prompts 10000]``; prints seconds, renderings a second, and the share
of prompts each condition leaves unchanged.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from specbench.perturbations.condition import UNCHANGED, Condition
from specbench.perturbations.rendering import ChatTokenizer
from specbench.perturbations.resolve import resolve_conditions
from specbench.types import Prompt

CONDITIONS = (
    "template/regular,template/no_bos,template/no_template,template/no_bos_no_template,template/double_bos,"
    "template/no_generation,template/no_eot,template/extra_newline,template/roles_renamed,template/plain_markup,"
    "template/llama3,template/mistral,template/zephyr,system/none,system/one_line,system/persona,system/long_1k,"
    "text/typos_5,text/lowercase,language/answer_fr"
)
_WORDS = (
    "river stone window letter garden number simple question answer because however explain describe calculate "
    "function returns between morning seventeen copper harbour machine pattern quickly without several results"
)


def synthetic_prompts(count: int, seed: int) -> list[Prompt]:
    """Return ``count`` different prompts of 20 to 120 words; one in four has a second turn."""
    source = random.Random(seed)
    words = _WORDS.split()

    def text() -> str:
        chosen = (words[int(source.random() * len(words))] for _ in range(20 + int(source.random() * 100)))
        return " ".join(chosen).capitalize() + "?"

    return [
        Prompt(
            id=f"perf/{i}", suite="perf", category="c", turns=(text(), text()) if i % 4 == 0 else (text(),)
        )
        for i in range(count)
    ]


def time_rendering(prompts: Sequence[Prompt], conditions: Sequence[Condition], chat: ChatTokenizer) -> None:
    """Render every first turn under every condition and print what it took."""
    unchanged: Counter[str] = Counter()
    num_tokens = 0
    start, start_cpu = time.perf_counter(), time.process_time()
    for prompt in prompts:
        for condition in conditions:
            rendered = condition.render(prompt, 0, (), chat, 0)
            num_tokens += len(rendered.token_ids)
            unchanged[condition.info.id] += any(note.startswith(UNCHANGED) for note in rendered.notes)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    total = len(prompts) * len(conditions)
    print(f"{len(prompts)} prompts x {len(conditions)} conditions: {seconds:.1f} s, {cpu:.1f} s of CPU")
    print(f"{total / seconds:.0f} renderings/s, {total / cpu:.0f} per second of CPU")
    print(f"{num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s")
    for name, count in unchanged.most_common():
        if count:
            print(f"{name}: {count / len(prompts):.1%} of the prompts unchanged")


def main() -> None:
    """Read the arguments and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="a directory with a tokenizer")
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--perturb", default=CONDITIONS)
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    chat = ChatTokenizer(AutoTokenizer.from_pretrained(arguments.target))
    conditions = [c for c in resolve_conditions([arguments.perturb]) if c.available(chat) is None]
    time_rendering(synthetic_prompts(arguments.prompts, 0), conditions, chat)


if __name__ == "__main__":
    main()
