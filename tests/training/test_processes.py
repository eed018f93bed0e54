"""Two processes train as one with twice the packs a step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbench.drafters.training.step import ChainSetting

from .test_trainer import SETTING, make_trainer, weights

SCRIPT = """
import importlib.util, sys
from pathlib import Path

root, out = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("tests", "tests.training", "tests.training.toy", "tests.training.test_trainer"):
    path = root / Path(*name.split("."))
    if path.is_dir():
        import types
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
        continue
    spec = importlib.util.spec_from_file_location(name, path.with_suffix(".py"))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

from dataclasses import replace
from specbench.drafters.training.processes import from_accelerate
from specbench.drafters.training.step import ChainSetting
from tests.training.test_trainer import SETTING, make_trainer

trainer = make_trainer(out, replace(SETTING, chain=ChainSetting(depth=3), checkpoint_minutes=9.0))
trainer.processes = from_accelerate()
assert trainer.processes.world == 2
trainer.run()
"""


def test_two_processes_equal_accumulation(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(root), str(tmp_path / "two")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=root,
        )
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    state = torch.load(tmp_path / "two" / "state.pt", weights_only=True)
    one = make_trainer(tmp_path / "one", replace(SETTING, chain=ChainSetting(depth=3), accumulation=2))
    one.run()
    two = torch.cat([state["model"][name].flatten() for name, _ in one.model.named_parameters()])
    torch.testing.assert_close(two, weights(one), rtol=1e-3, atol=1e-4)
    assert state["step"] == SETTING.steps
