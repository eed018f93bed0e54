"""The command line's drafter words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbench.drafters import resolve
from specbench.drafters.checkpoints.save import save_drafter
from specbench.drafters.resolve import load_drafter, parse_drafters, required_taps
from specbench.errors import UserError
from specbench.types import Drafter, DrafterInfo

from .helpers import HALF, make_model, make_target


def test_lists_with_options(tmp_path: Path) -> None:
    specs = parse_drafters(
        f"ngram@min=2,max=4,draft-lm=org/m@odd,eagle3={tmp_path}@window=1024,sink=bos,{tmp_path}"
    )
    assert [(s.kind, s.argument, dict(s.options)) for s in specs] == [
        ("ngram", None, {"min": "2", "max": "4"}),
        ("draft-lm", "org/m@odd", {}),
        ("eagle3", str(tmp_path), {"window": "1024", "sink": "bos"}),
        ("auto", str(tmp_path), {}),
    ]
    assert specs[0].text == "ngram@min=2,max=4"
    assert specs[2].text == f"eagle3={tmp_path}@window=1024,sink=bos"


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "no drafter"),
        ("ngrm", "did you mean 'ngram'"),
        ("eagel3=x", "did you mean 'eagle3'"),
        ("eagle3=", "write eagle3=PATH"),
        ("ngram,ngram", "named twice"),
        ("ngram@min=1,min=2", "given twice"),
        ("./nowhere/at/all", "no checkpoint at './nowhere/at/all'"),
        ("zoo:nothing-like-it", "unknown drafter 'zoo:nothing-like-it'"),
        ("ngram,key=value", "unknown drafter 'key'"),
    ],
)
def test_bad_lists(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_drafters(text)


def test_load_names_the_drafter_as_written(tmp_path: Path) -> None:
    target = make_target()
    save_drafter(make_model(target, target_ids=HALF), tmp_path / "d")
    by_path = load_drafter(f"{tmp_path / 'd'}@window=5", target)
    assert by_path.info.kind == "eagle3"
    assert by_path.info.name == f"{tmp_path / 'd'}@window=5"
    ngram = load_drafter("ngram@max=3", target)
    assert ngram.info.settings == {"min": "2", "max": "3", "match": "longest,earliest"}
    assert required_taps([by_path, ngram]) == (2, 4, 5)
    with pytest.raises(UserError, match="unknown ngram option 'mx'; did you mean"):
        load_drafter("ngram@mx=3", target)
    with pytest.raises(UserError, match="1 <= min <= max"):
        load_drafter("ngram@min=4,max=3", target)


def test_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    for name in ("one", "two"):
        save_drafter(make_model(target, target_ids=HALF), tmp_path / "zoo" / name)
    monkeypatch.setattr(resolve.resources, "files", lambda package: tmp_path)
    specs = parse_drafters("zoo:*@window=4,sink=bos")
    assert [s.text for s in specs] == ["zoo:one@window=4,sink=bos", "zoo:two@window=4,sink=bos"]
    drafter = load_drafter(specs[1], target)
    assert drafter.info.name == specs[1].text and drafter.info.settings["window"] == "4"
    with pytest.raises(UserError, match="did you mean 'zoo:one'"):
        parse_drafters("zoo:on")


def test_drafters_from_outside_get_their_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outside:
        @property
        def info(self) -> DrafterInfo:
            return DrafterInfo(name="x", kind="x", fingerprint="f")

        def score(self, traces: Any, request: Any) -> list[Any]:
            return ["scored"]

        def session(self) -> Any:
            return "session"

    monkeypatch.setattr(resolve.registry, "names", lambda kind: ("x",))
    monkeypatch.setattr(
        resolve.registry, "load", lambda kind, name: lambda argument, options, target: Outside()
    )
    drafter = load_drafter("x=1", make_target())
    assert isinstance(drafter, Drafter)
    assert drafter.info.name == "x=1" and drafter.score([], None) == ["scored"]  # type: ignore[arg-type,comparison-overlap]
