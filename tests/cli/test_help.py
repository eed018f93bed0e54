"""``--help``, ``--version``, ``list`` and shell completion: right, and without loading a model library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import specbench
from specbench import registry
from specbench.cli import COMMANDS, main
from specbench.config import RunConfig
from specbench.perturbations.resolve import all_conditions


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    return out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert specbench.__version__ in said(capsys, "--version")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_every_command(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, option)
    found = {line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.startswith("  ")}
    assert set(COMMANDS) <= found
    assert "specbench run" in text
    assert 'eval "$(_SPECBENCH_COMPLETE=bash_source specbench)"' in text


def test_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "Commands:" in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, command, "--help")
    assert f"Usage: specbench {command}" in text
    # every option is explained, or its name and default say all
    assert len(text.splitlines()) > 5


def test_help_of_run_shows_examples_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "run", "--help")
    assert "specbench run --config runs/first/run.json --out runs/again" in text
    for default in ("mini", "smollm2-135m", "runs/latest", "128", "replay"):
        assert f"[default: {default}]" in " ".join(text.split())


def test_defaults_of_the_command_are_those_of_the_configuration() -> None:
    from specbench.cli.run import run

    options = dict(run.make_context("run", []).params)
    assert (options.pop("config_file"), options.pop("dry_run")) == (None, False)
    assert RunConfig(**options) == RunConfig()


# ---- list


def rows(capsys: pytest.CaptureFixture[str], kind: str) -> dict[str, str]:
    lines = said(capsys, "list", kind).splitlines()
    found = dict(line.split(maxsplit=1) if kind != "targets" else line.split("  ", 1) for line in lines)
    assert len(found) == len(lines)
    assert all(len(text.strip()) > 10 for text in found.values()), found  # one line of description each
    return found


def test_list_suites(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "suites")
    wanted = ["mini", "mtbench", "gsm8k", "humaneval", "math500", "mbpp", "alpaca", "specbench480", "longctx"]
    assert set(wanted) <= set(found) and set(registry.names("suites")) | {
        "FILE.jsonl",
        "lm-eval:NAME",
    } == set(found)


def test_list_perturbations(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "perturbations")
    assert list(found) == [condition.info.id for condition in all_conditions()]
    for name in ("regular", "no_bos", "no_template", "no_bos_no_template"):
        assert f"template/{name}" in found
    assert found["template/regular"].startswith("[severity 0]")


def test_list_targets_drafters_runners(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(rows(capsys, "targets")) == {"smollm2-135m", "PATH or NAME"}
    drafters = rows(capsys, "drafters")
    assert {"ngram", "draft-lm", "eagle3", "PATH"} <= set(drafters)
    assert set(registry.names("drafters")) <= set(drafters)
    assert {"replay", "decode"} <= set(rows(capsys, "runners")) == set(registry.names("runners"))


def test_nothing_of_this_loads_a_model_library(tmp_path: Path) -> None:
    script = """
import json, sys
from specbench.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0, words
heavy = {"torch", "transformers", "datasets", "duckdb", "matplotlib", "vllm"}
print("loaded:", *sorted(heavy & set(sys.modules)))
"""
    kinds = ("suites", "perturbations", "targets", "drafters", "runners")
    words = [["--version"], ["--help"], *(["list", kind] for kind in kinds)]
    words += [[command, "--help"] for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(words)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


# ---- completion


def completed(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash would offer at the end of ``line``."""
    monkeypatch.setenv("_SPECBENCH_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit) as stop:
        main([])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    return [text.partition(",")[2] for text in out.splitlines()]


def test_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("specbench sho", capsys, monkeypatch) == ["show"]
    assert "suites" in completed("specbench list ", capsys, monkeypatch)
    assert completed("specbench run --max-n", capsys, monkeypatch) == ["--max-new-tokens"]
    assert completed("specbench run --answer-path f", capsys, monkeypatch) == ["free", "forced"]
    completed("specbench rnu --x", capsys, monkeypatch)  # a wrong word is no reason to complain


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_script(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPECBENCH_COMPLETE", f"{shell}_source")
    script = said(capsys)
    assert "specbench" in script and f"_SPECBENCH_COMPLETE={shell}_complete" in script
