"""What is installed: every module and every data file, under one top-level name.

A subpackage that pyproject.toml forgets imports fine from an editable checkout and is missing from the wheel, so the
tables there are held against the folders, and a wheel is built and looked into.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "perturbations", "drafters", "runners", "results")


def settings() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return found


def installed_name(path: Path) -> PurePosixPath:
    """Where a file of the checkout lies in site-packages."""
    inside = path.relative_to(ROOT)
    return PurePosixPath(*inside.parts if inside.parts[0] == "specbench" else ("specbench", *inside.parts))


def files_on_disk() -> list[Path]:
    """Every file of the package, each once: the links in specbench/ are not followed."""
    found = []
    for folder in (*FOLDERS, "specbench"):
        for top, directories, names in os.walk(ROOT / folder):
            directories[:] = [d for d in directories if d != "__pycache__" and not d.startswith(".")]
            found += [Path(top, n) for n in names if not n.startswith(".") and not n.endswith(".pyc")]
    return sorted(found)


def package_of(path: Path) -> str:
    """The dotted package that holds a file: the nearest folder above it with an ``__init__.py``."""
    folder = path.parent
    while not (folder / "__init__.py").is_file():
        folder = folder.parent
        assert folder != ROOT, f"{path} lies in no package"
    return ".".join(installed_name(folder).parts)


def directory_of(package: str) -> Path:
    """Where setuptools looks for a package: the longest prefix in package-dir decides."""
    table = settings()["package-dir"]
    parts = package.split(".")
    for cut in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:cut])) in table:
            return ROOT.joinpath(table[prefix], *parts[cut:])
    raise AssertionError(f"package-dir does not map {package}")


def named_data() -> set[Path]:
    """The files that package-data takes along."""
    patterns: dict[str, list[str]] = settings()["package-data"]
    return {
        path
        for package, globs in patterns.items()
        for pattern in globs
        for path in directory_of(package).glob(pattern)
        if path.is_file()
    }


def test_every_subpackage_is_named() -> None:
    modules = [path for path in files_on_disk() if path.suffix == ".py"]
    assert len(modules) > 50
    assert {package_of(path) for path in modules} == set(settings()["packages"])


def test_every_folder_with_modules_is_a_package() -> None:
    # a script among data files is data
    modules = [path for path in files_on_disk() if path.suffix == ".py" and path not in named_data()]
    for folder in {path.parent for path in modules}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} lacks an __init__.py"


def test_packages_are_where_setuptools_looks() -> None:
    for package in settings()["packages"]:
        assert (directory_of(package) / "__init__.py").is_file(), package


def test_nothing_generic_at_top_level() -> None:
    assert {name.split(".")[0] for name in settings()["packages"]} == {"specbench"}


def test_every_data_file_is_named() -> None:
    data = [path for path in files_on_disk() if path.suffix != ".py"]
    assert ROOT / "benchmarks" / "data" / "mini.jsonl" in data
    assert set(data) - named_data() == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_let_type_checkers_see_one_package(folder: str) -> None:
    link = ROOT / "specbench" / folder
    assert link.is_symlink(), f"specbench/{folder} is lost: ln -s ../{folder} specbench/{folder}"
    assert link.readlink() == Path("..", folder)


def test_the_version_is_said_once() -> None:
    import specbench

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert specbench.__version__ == project["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built beside it so that no older build/ folder slips in."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: pip install 'setuptools>=77' builds the wheel")
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip(
            f"setuptools {metadata.version('setuptools')} is too old to build the wheel; 77 is needed"
        )
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed in this environment, so no wheel can be built")
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for folder in (*FOLDERS, "specbench"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    command = (
        "wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --wheel-dir"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command.split(), str(work), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (built,) = work.glob("*.whl")
    return built


def test_wheel_holds_every_file_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {str(installed_name(path)) for path in files_on_disk()}
    assert all(re.match(r"specbench-[^/]+\.dist-info/", name) for name in names - inside)


def test_wheel_runs_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        entry = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "specbench = specbench.cli:main" in archive.read(entry).decode()
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)\n"
        "from specbench.benchmarks.mini import MINI\n"
        "from specbench.types import SuiteRequest\n"
        "assert len(MINI.load(SuiteRequest())) >= 40\n"
        "from specbench.perturbations.resolve import resolve_conditions\n"
        "resolve_conditions(['all'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *settings()["packages"]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(tmp_path / "site")) for line in done.stdout.split())
