"""Names before paths; a path must be there; plug-ins may register a suite or what makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbench import registry
from specbench.benchmarks import BUILTIN
from specbench.benchmarks.mini import MINI
from specbench.benchmarks.own_file import OwnFile
from specbench.benchmarks.resolve import load_suite
from specbench.errors import UserError
from specbench.types import Prompt, Suite, SuiteInfo, SuiteRequest


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_builtin_is_a_suite_of_its_name(name: str) -> None:
    suite = load_suite(name)
    assert isinstance(suite, Suite)
    assert suite.info.name == name
    assert suite.info.description and suite.info.licence and suite.info.citation


def test_path_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "other.txt").write_text('{"prompt": "y"}\n')
    (tmp_path / "mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_suite("mine.jsonl"), OwnFile)
    assert load_suite(str(tmp_path / "other.txt")).load(SuiteRequest())[0].id == "other/1"
    assert load_suite("mini") is MINI


def test_unknown_name_and_missing_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown suite 'mtbnch'; did you mean 'mtbench'"):
        load_suite("mtbnch")
    with pytest.raises(UserError, match="no prompt file .*gone.jsonl"):
        load_suite(str(tmp_path / "gone.jsonl"))


def test_own_file_may_not_pass_for_a_builtin(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="called 'gsm8k'.*rename"):
        load_suite(str(tmp_path / "gsm8k.jsonl"))


class Outside:
    info = SuiteInfo(name="outside", description="a suite of somebody else's")

    def load(self, request: SuiteRequest) -> list[Prompt]:
        return []


@pytest.mark.parametrize("registered", [Outside, Outside(), lambda: Outside()])
def test_plugin_objects(monkeypatch: pytest.MonkeyPatch, registered: Any) -> None:
    monkeypatch.setattr(registry, "names", lambda kind: ("outside",))
    monkeypatch.setattr(registry, "load", lambda kind, name: registered)
    assert load_suite("outside").info.name == "outside"


def test_plugin_object_that_is_no_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda kind: ("outside",))
    monkeypatch.setattr(registry, "load", lambda kind, name: 3)
    with pytest.raises(UserError, match="'outside' has no 'info' and 'load'"):
        load_suite("outside")
