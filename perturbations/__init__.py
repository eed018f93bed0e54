"""Conditions: everything done to a prompt before it becomes token ids.

Example: ``resolve_conditions(["templates", "system/long_1k"])`` in ``specbench.perturbations.resolve``.
"""

BUILTIN = {
    "template": "specbench.perturbations.template:conditions",
}
"""Family -> the function that returns its conditions."""
