"""State noise: Gaussian noise inside the drafter, declared here and applied by the runner that scores it.

The token ids are the clean ones. The noise of one prompt is seeded by ``torch.Generator`` from the run's
seed, the prompt's id and the condition's id; its standard deviation is ``noise_alpha`` times the root mean
square of the vector it is added to.

Example: ``noise/hidden_0.1`` adds noise of a tenth of the tap's RMS to every state the drafter receives.
"""

from __future__ import annotations

from specbench.perturbations.stages import Staged
from specbench.types import ConditionInfo

FAMILY = "noise"
ALPHAS = {"0.05": 1, "0.1": 1, "0.25": 2, "0.5": 3, "1.0": 3}
"""Noise level -> severity."""
PATHS = {"hidden": "the target's hidden states", "embed": "the token embeddings"}


def conditions() -> tuple[Staged, ...]:
    """Return the family's conditions."""
    return tuple(
        Staged(
            info=ConditionInfo(
                id=f"{FAMILY}/{path}_{alpha}",
                family=FAMILY,
                severity=severity,
                description=f"Gaussian noise of {alpha} x RMS on {what}, inside the drafter only.",
                reason="Quantised or differently rounded targets; shows how much exact states matter.",
                parameters={"noise_path": path, "noise_alpha": alpha},
            ),
            claims=frozenset({"noise"}),
            same_ids=True,
        )
        for path, what in PATHS.items()
        for alpha, severity in ALPHAS.items()
    )
