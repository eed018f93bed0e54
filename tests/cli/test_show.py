"""``specbench show`` on a tiny target: what is printed is what would be sent."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specbench.cli.show import (
    STYLES,
    difference,
    list_rows,
    one_condition,
    pick_prompt,
    print_rendering,
    show,
    span_lines,
)
from specbench.errors import UserError
from specbench.perturbations.rendering import ChatTokenizer
from specbench.types import CLEAN, Prompt

ITEM = Prompt(id="t/1", suite="t", category="c", turns=("Hi [bold]there[/bold]", "And?"))


@pytest.fixture(scope="module")
def chat(tiny_target_path: Path) -> ChatTokenizer:
    from transformers import AutoTokenizer

    return ChatTokenizer(AutoTokenizer.from_pretrained(tiny_target_path))


def rendered(name: str, chat: ChatTokenizer) -> Any:
    return one_condition(name).render(ITEM, 0, (), chat, 0)


def run(tiny_target_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(show, [*arguments, "--target", str(tiny_target_path)], catch_exceptions=False)


def test_the_command_prints_spans_counts_and_the_difference(tiny_target_path: Path) -> None:
    result = run(tiny_target_path, "template/double_bos", "--prompt", "math-2")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("template/double_bos  severity 2  prompt mini/math-2")
    assert any(line.split()[:3] == ["0", "2", "bos"] for line in lines)
    assert "BOS count 2, clean 1" in lines
    assert "+ '<|im_start|>'  (1)" in lines


def test_later_turns_stand_on_a_placeholder(tiny_target_path: Path) -> None:
    result = run(tiny_target_path, CLEAN, "--prompt", "mini/dialogue-2", "--turn", "2")
    assert 'assistant   "(the target\'s answer)"' in result.output
    assert "difference" not in result.output
    with pytest.raises(UserError, match="turns 1 to 2"):
        run(tiny_target_path, CLEAN, "--prompt", "mini/dialogue-2", "--turn", "3")


def test_bad_requests_are_named(tiny_target_path: Path) -> None:
    for arguments, reason in (
        (("template/lama3",), "did you mean 'template/llama3'"),
        (("templates",), "names [0-9]+ conditions"),
        (("template/tools",), "takes no tool list"),
        (("longctx/turns_1k",), "1,024 positions"),
        (("template/llama3", "--prompt", "mini/math-99"), "unknown prompt 'mini/math-99'"),
    ):
        with pytest.raises(UserError, match=reason):
            run(tiny_target_path, *arguments)


def test_on_a_terminal_the_text_itself_is_coloured(chat: ChatTokenizer) -> None:
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=200, highlight=False)
    print_rendering(console, rendered("template/trailing_space", chat), rendered(CLEAN, chat), chat)
    shown = screen.getvalue()
    assert "\x1b[1;36mHi [bold]there[/bold]\x1b[0m" in shown
    assert "\x1b[30;43m<|im_start|>\x1b[0m" in shown
    kinds = {span.kind for span in rendered("template/trailing_space", chat).spans}
    assert kinds <= set(STYLES)


def test_span_lines_hold_every_token(chat: ChatTokenizer) -> None:
    shown = rendered("template/llama3", chat)
    rows = [line.split(maxsplit=3) for line in span_lines(shown, chat).plain.splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [0, *(int(row[1]) for row in rows[:-1])]
    assert int(rows[-1][1]) == len(shown.token_ids)


def test_difference_restores_both_sides(chat: ChatTokenizer) -> None:
    clean, other = rendered(CLEAN, chat), rendered("template/roles_renamed", chat)
    lines = difference(clean, other, chat).plain.splitlines()
    taken = sum(int(line.rpartition("(")[2][:-1]) for line in lines if line.startswith("- "))
    put = sum(int(line.rpartition("(")[2][:-1]) for line in lines if line.startswith("+ "))
    assert put - taken == len(other.token_ids) - len(clean.token_ids) and taken > 0
    assert difference(clean, clean, chat).plain.endswith("none\n")


def test_prompts_are_found_with_and_without_their_suite() -> None:
    others = [ITEM, Prompt(id="t/2", suite="t", category="c", turns=("x",))]
    assert pick_prompt(others, None) is ITEM
    assert pick_prompt(others, "2") is pick_prompt(others, "t/2") is others[1]


def test_list_rows() -> None:
    rows = list_rows()
    assert rows[0][:3] == (CLEAN, "template", 0)
    assert len({row[0] for row in rows}) == len(rows) > 100
    assert all(row[3] and row[4] for row in rows)
