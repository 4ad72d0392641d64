"""Logs as Keras's callbacks and history have them."""

from typing import Any

import numpy as np


def pythonic(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs as Python numbers, or as arrays where there are several; sorted."""
    return {
        name: float(value) if np.ndim(value) == 0 else np.asarray(value)
        for name, value in flattened(logs).items()
    }


def flattened(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs whose nested dicts have moved up, sorted by name as in Keras's history."""
    flat: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        flat.update(flattened(value) if isinstance(value, dict) else {name: value})
    return flat
