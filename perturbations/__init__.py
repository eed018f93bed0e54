"""Conditions: everything done to a prompt before it becomes token ids.

Example: ``resolve_conditions(["templates", "system/long_1k"])`` in ``specbench.perturbations.resolve``.
"""

BUILTIN = {
    "template": "specbench.perturbations.template:conditions",
    "system": "specbench.perturbations.system:conditions",
    "longctx": "specbench.perturbations.longctx:conditions",
    "text": "specbench.perturbations.text:conditions",
    "language": "specbench.perturbations.language:conditions",
    "noise": "specbench.perturbations.noise:conditions",
}
"""Family -> the function that returns its conditions."""
