"""Logs as Keras's callbacks and history have them.

Keras's own `pythonify_logs` gives the same for `fit` (tried on 3.15.1), but it is private, and
`evaluate` could not use it: it flattens the result of a metric that is a dictionary, which Keras
leaves nested there.
"""

from typing import Any

import numpy as np


def pythonic(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs as Python numbers, or as arrays where there are several; flat and sorted."""
    return flattened(numbers(logs))


def numbers(logs: Any) -> Any:
    """Logs as Python numbers, or as arrays where there are several; nested as they were."""
    if isinstance(logs, dict):
        return {name: numbers(value) for name, value in logs.items()}
    return float(logs) if np.ndim(logs) == 0 else np.asarray(logs)


def flattened(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs whose nested dicts have moved up, sorted by name on each level, as Keras does it."""
    flat: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        flat.update(flattened(value) if isinstance(value, dict) else {name: value})
    return flat
