"""State noise: Gaussian noise on what a drafter reads at every step, for conditions of the noise family.

``x + alpha * rms(x) * N(0, I)`` with the RMS of each position's own vector, on the hidden path (fused taps at step 1,
the fed-back state afterwards) or on the embedding path, before the layer's own input norms (arXiv 2605.09992,
section 4.4). The noise of a position and step does not depend on which chains are still alive.

Example: ``drafter.score([trace], request, perturb=noise_for(trace, seed=0))``
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from specbench.errors import UserError
from specbench.types import ConditionInfo, Drafter, Trace

ALPHA, PATH = "noise_alpha", "noise_path"


def is_noisy(condition: ConditionInfo) -> bool:
    """Whether the condition adds noise to the drafter's states."""
    return ALPHA in condition.parameters


def without_states(drafters: Mapping[str, Drafter]) -> tuple[str, ...]:
    """Names of the drafters that noise is not defined for: they read no states."""
    return tuple(name for name, drafter in drafters.items() if not drafter.info.reads_states)


class GaussianNoise:
    """Noise for the rows of one trace; called by the chain computation at every step."""

    def __init__(
        self,
        *,
        path: str,
        alpha: float,
        seed: int,
        num_rows: int,
        kept: dict[tuple[int, int], Tensor] | None = None,
    ) -> None:
        """Prepare.

        Args:
            path: ``hidden`` or ``embed``.
            alpha: size, in RMS of the state.
            seed: of the draw.
            num_rows: packed rows of the chains.
            kept: draws by step and width, to share among noises of the same seed and rows; filled as they are made.

        Raises:
            UserError: no such path.
        """
        if path not in ("hidden", "embed"):
            raise UserError(f"noise goes on the path 'hidden' or 'embed', not on {path!r}")
        self.path = path
        self.alpha = alpha
        self.seed = seed
        self.num_rows = num_rows
        self._kept = kept
        self._step = 0
        self._noise: Tensor | None = None

    def __call__(self, step: int, rows: Tensor, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, embeds) [n, H] with noise on one of them; ``rows`` [n] are the positions."""
        if self.path == "hidden":
            return self._disturb(step, rows, hidden), embeds
        return hidden, self._disturb(step, rows, embeds)

    def _disturb(self, step: int, rows: Tensor, x: Tensor) -> Tensor:
        if self._noise is None or step != self._step:
            self._noise, self._step = self._draw(step, x.shape[-1]), step
        rms = x.float().pow(2).mean(-1, keepdim=True).sqrt()
        return x + (self.alpha * rms * self._noise[rows.cpu()].to(x.device)).to(x.dtype)

    def _draw(self, step: int, width: int) -> Tensor:
        if self._kept is not None and (step, width) in self._kept:
            return self._kept[step, width]
        generator = torch.Generator().manual_seed(self.seed + step)
        # one row more than taps: chains end on the row before the last token
        noise = torch.randn(self.num_rows + 1, width, generator=generator)
        if self._kept is not None:
            self._kept[step, width] = noise
        return noise


def noise_for(trace: Trace, seed: int) -> GaussianNoise:
    """Return the noise that the trace's condition declares, seeded by run, prompt, turn and condition."""
    parameters = trace.prompt.condition.parameters
    digest = hashlib.sha256(repr((seed, *trace.prompt.key)).encode()).digest()
    return GaussianNoise(
        path=parameters[PATH],
        alpha=float(parameters[ALPHA]),
        # 2**62 leaves room to add the step
        seed=int.from_bytes(digest[:8], "little") % (1 << 62),
        num_rows=len(trace.ids) - 1,
    )


def check_noise(conditions: Iterable[ConditionInfo], runner: str) -> None:
    """Refuse noise where nothing would apply it.

    Raises:
        UserError: a noise condition under a runner other than replay.
    """
    noisy = next((c for c in conditions if is_noisy(c)), None)
    if noisy is not None and runner != "replay":
        raise UserError(
            f"{noisy.id} puts noise inside the drafter, which --runner {runner} cannot; use --runner replay"
        )
