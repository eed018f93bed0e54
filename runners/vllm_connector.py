"""What vLLM loads to hand out hidden states: its example connector, made to write on a CPU too.

The example copies states on a CUDA stream; a CPU has none, and nothing to overlap. Imported by the engine alone, by
the path that ``vllm_states`` names, in every worker.

Example: ``kv_transfer_config={"kv_connector": "StatesConnector", "kv_connector_module_path": __name__, ...}``
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Done:
    """A copy that is over, where the example expects an event of a stream."""

    def query(self) -> bool:
        """Return whether it is over."""
        return True


class StatesConnector(example.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes one file per finished request: ``hidden_states`` [tokens, taps, H] and ``token_ids`` [tokens]."""

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {"hidden_states": states.contiguous().clone(), "token_ids": pending.token_ids.clone()},
            pending.filename,
        )
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()
