"""A package from outside adds a suite, a condition, a drafter and a runner; a bad one is named, not hidden."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbench import registry
from specbench.cli import main
from specbench.errors import UserError
from specbench.results.store import RunStore

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip installed the example package."""
    for needed in ("pip", "setuptools"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed in this environment; it installs the example package")
    work = tmp_path_factory.mktemp("plugin")
    source = Path(shutil.copytree(PLUGIN, work / "source"))  # building leaves files behind
    command = "install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --target"
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command.split(), str(work / "site"), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return work / "site"


def specbench(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specbench", *arguments],
        capture_output=True,
        text=True,
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
    )


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("suites", "haiku", "two requests for haiku, from the example plug-in"),
        ("perturbations", "shout/loud", "[severity 2] The user writes in capitals."),
        ("drafters", "parrot", "from the package 'specbench-example-plugin'"),
        ("runners", "careful-replay", "from the package 'specbench-example-plugin'"),
    ],
)
def test_list_shows_what_the_package_adds(site: Path, kind: str, name: str, text: str) -> None:
    done = specbench(site, "list", kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert [name, text] in [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    # and without the package, it is not there
    assert name not in registry.names(kind)  # type: ignore[arg-type]


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "specbench_example_plugin"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_all_four_work_in_one_run(tiny_target_path: Path, tmp_path: Path) -> None:
    tables = {}
    for runner in ("careful-replay", "decode"):
        out = tmp_path / runner
        options = f"--suite haiku --perturb shout --drafter parrot,parrot=7 --depth 3 --max-new-tokens 16 --runner {runner}"
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    "run",
                    *options.split(),
                    "--target",
                    str(tiny_target_path),
                    "--device",
                    "cpu",
                    "--out",
                    str(out),
                ]
            )
        assert stop.value.code == 0
        with RunStore(out, readonly=True) as store:
            rows = store.table("rounds").to_pylist()
        keys = ("prompt_id", "turn", "condition", "drafter", "round", "start", "num_accepted")
        tables[runner] = sorted(tuple(row[key] for key in keys) for row in rows)
        assert {row["runner"] for row in rows} == {runner}
    # a loop that feeds the drafter for real finds the counts that its scoring claims
    assert tables["careful-replay"] == tables["decode"]
    rows = tables["decode"]
    assert {row[:2] for row in rows} == {("haiku/frog", 0), ("haiku/moon", 0), ("haiku/moon", 1)}
    assert {row[2] for row in rows} == {"template/regular", "shout/loud"}
    assert {row[3] for row in rows} == {"parrot", "parrot=7"}


@pytest.mark.usefixtures("installed")
def test_its_own_complaints_are_shown_like_ours(
    tiny_target_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--target", str(tiny_target_path), "--device", "cpu", "--limit", "1"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--drafter", "parrot=999999", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "specbench: parrot=999999: give a token id below 259\n"


def pretend_installed(site: Path, package: str, entry_points: str, module: str = "") -> None:
    """Leave in ``site`` what pip leaves there of a package with these entry points."""
    name = package.replace("-", "_")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    if module:
        (site / f"{name}.py").write_text(module)


def test_a_name_that_is_taken_names_both_packages(tmp_path: Path) -> None:
    pretend_installed(
        tmp_path, "other-suites", "[specbench.suites]\nmini = other_suites:MINI\n", "MINI = 1\n"
    )
    done = specbench(tmp_path, "list", "suites")
    assert done.returncode == 2
    assert done.stderr == (
        "specbench: 'other-suites' and 'specbench' both add the suite 'mini'; uninstall one\n"
    )


@pytest.mark.usefixtures("installed")
def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(tmp_path, "second-parrot", "[specbench.drafters]\nparrot = second_parrot:create\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="both add the drafter 'parrot'") as caught:
        registry.names("drafters")
    assert "'second-parrot'" in str(caught.value) and "'specbench-example-plugin'" in str(caught.value)
    # other kinds are none of its business
    assert "careful-replay" in registry.names("runners")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import nowhere_to_be_found\n", "No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('no licence file')\n", "RuntimeError: no licence file"),
        ("def creat():\n    pass\n", "has no attribute 'create'"),
        ("def create(:\n", "SyntaxError"),
    ],
    ids=["a missing dependency", "it raises", "a missing attribute", "no Python"],
)
def test_a_broken_package_is_named(
    module: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_installed(
        tmp_path, "broken-runner", "[specbench.runners]\nbroken = broken_runner:create\n", module
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_runner", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["run", "--runner", "broken", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and "the runner 'broken' of package 'broken-runner' cannot be imported" in error
    )
    assert reason in error
    # its name is known, and whoever does not use it is not troubled by it
    assert "broken" in registry.names("runners")
    assert registry.load("runners", "replay").__name__ == "replay_runner"
