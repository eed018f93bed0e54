"""Who may import whom: the folders know only the shared records, and nothing heavy loads before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = {"specbench", "specbench.types", "specbench.errors", "specbench.registry"}
MIDDLE = ("benchmarks", "perturbations", "drafters", "results")
# folder -> modules of specbench it may import, each with everything below it
ALLOWED: dict[str, set[str]] = {
    **{folder: {f"specbench.{folder}"} for folder in MIDDLE},
    "runners": {"specbench.config", "specbench.runners", *(f"specbench.{folder}" for folder in MIDDLE)},
}
# what specbench/*.py itself may import: the records know nothing, the registry finds names at call time
CORE: dict[str, set[str]] = {
    "__init__.py": set(),
    "types.py": set(),
    "errors.py": set(),
    "registry.py": {"specbench.errors"},
    "config.py": {"specbench.errors"},
    "__main__.py": {"specbench.cli"},
}
HEAVY = {"torch", "transformers", "matplotlib", "duckdb", "triton", "datasets", "pyarrow", "vllm"}


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports, anywhere in it; ``from specbench import registry`` is specbench.registry."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            if node.module == "specbench":
                yield from (
                    "specbench" if alias.name.startswith("__") else f"specbench.{alias.name}"
                    for alias in node.names
                )
            else:
                yield str(node.module)


def ours(path: Path) -> set[str]:
    return {name for name in imported(path) if name.split(".")[0] == "specbench"}


def loaded_at_import(path: Path) -> set[str]:
    """First parts of the modules that importing this file alone loads: bodies of functions do not run."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} has moved"
    return files


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_the_rule_lets_it(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in sorted(ours(path) - SHARED)
        if not any(name == home or name.startswith(f"{home}.") for home in ALLOWED[folder])
    ]
    assert wrong == []


@pytest.mark.parametrize("name", CORE)
def test_the_shared_records_import_nothing_above_them(name: str) -> None:
    assert ours(ROOT / "specbench" / name) <= CORE[name]


def test_every_file_of_the_core_has_a_rule() -> None:
    assert {path.name for path in (ROOT / "specbench").glob("*.py")} == set(CORE)


@pytest.mark.parametrize("folder", ["specbench", *ALLOWED])
def test_folders_are_imported_by_their_package_name(folder: str) -> None:
    # from the root, the bare names would import a second copy of every module
    for path in sources(folder):
        assert not {name.split(".")[0] for name in imported(path)} & set(ALLOWED), path


@pytest.mark.parametrize("folder", ["specbench", *ALLOWED])
def test_no_package_loads_anything_heavy(folder: str) -> None:
    packages = [path for path in sources(folder) if path.name == "__init__.py"]
    assert packages
    for path in packages:
        assert not loaded_at_import(path) & HEAVY, path


def test_commands_load_nothing_heavy_before_they_run() -> None:
    for path in (ROOT / "specbench" / "cli").glob("*.py"):
        assert not loaded_at_import(path) & HEAVY, path


@pytest.mark.parametrize(
    "statement",
    [
        "import specbench, specbench.cli",
        "from specbench.cli import main; import specbench.cli.run, specbench.cli.listing, specbench.cli.trace",
        "from specbench import registry; [registry.names(k) for k in ('suites','perturbations','drafters','runners')]",
        "import specbench.benchmarks, specbench.perturbations, specbench.drafters, specbench.runners, "
        "specbench.results, specbench.drafters.checkpoints, specbench.drafters.kernels.chain",
    ],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint(*sorted(set(sys.modules) & set({sorted(HEAVY)!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
