"""Training on several GPUs: one process each, gradients summed after every step, through ``accelerate``.

Example: ``accelerate launch -m specbench train ...`` and ``processes = from_accelerate()``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Who trains together."""

    rank: int = 0
    local_rank: int = 0
    """Within this machine: which of its GPUs to take."""
    world: int = 1
    state: Any = None
    """``accelerate.PartialState`` where there are several."""

    def wait(self) -> None:
        """Wait for the others."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add up the gradients of all processes, in place; the loss is normalised over all of them already."""
        if self.world == 1:
            return
        import torch.distributed as dist

        for parameter in parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


ALONE = Processes()


def from_accelerate() -> Processes:
    """Return the processes that ``accelerate launch`` started, or this one alone."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    return Processes(
        rank=state.process_index,
        local_rank=state.local_process_index,
        world=state.num_processes,
        state=state,
    )
