"""What a step yields that is tried: run once on one device, without keeping anything."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

RESULT = "result"
"""What names of results begin with."""


class Tried(NamedTuple):
    """What a step yields.

    Attributes:
        names: What each value is called.
        values: Results as they are, and of variables by how much they change.
        rounded: By how much the last digits of each may differ.
    """

    names: list[str]
    values: list[np.ndarray]
    rounded: list[float]

    def add(self, name: str, value: np.ndarray, before: np.ndarray | None = None) -> None:
        """Add a result, or what a variable is after the step and was before."""
        self.names.append(name)
        if not tf.as_dtype(value.dtype).is_floating:
            self.values.append(value)
            self.rounded.append(0.0)
            return
        wide = value.astype(np.float64)
        largest = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
        digits = float(ml_dtypes.finfo(value.dtype).eps)
        self.values.append(wide if before is None else wide - before.astype(np.float64))
        self.rounded.append(8 * digits * largest)


def nudged(values: Sequence[np.ndarray], digits: float, seed: int) -> Iterator[np.ndarray]:
    """Values with other last digits."""
    draws = np.random.default_rng(seed)
    for value in values:
        if tf.as_dtype(value.dtype).is_floating:
            signs = draws.choice([-1.0, 1.0], size=value.shape)
            yield (value.astype(np.float64) * (1.0 + digits * signs)).astype(value.dtype)
        else:
            yield value


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Let TensorFlow run graphs as they are: to optimise one takes longer than to run it once."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        kept = {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        tf.config.optimizer.set_experimental_options(kept)
