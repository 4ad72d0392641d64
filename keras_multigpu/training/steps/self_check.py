"""Whether a split step gives the numbers of one device, tried on a few examples of its first batch.

The unsplit step and the parts of all replicas run on one device, one after another, from the same
state. They may differ by rounding, and how much depends on the model. So a large difference is
compared with what the unsplit step makes of weights with other last digits.
"""

from functools import partial
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.training.shares import Batch, batch_size_of, cut
from keras_multigpu.training.steps.trial import RESULT, Key, Trial, Tried, largest_of


class Precision(NamedTuple):
    """What counts as rounding.

    Attributes:
        apart: How far two correct steps may differ, relative to what a step changes.
        digits: How far to nudge the last digits of weights.
        factor: How many times as far as the nudged step a split one may be off.
    """

    apart: float
    digits: float
    factor: float


# A float32 has 24 bits, and sums of a deep network in another order have 14 in common. A wrong rule
# is wrong by a tenth.
FULL = Precision(1e-3, 2.0**-20, 30)
# With 11 bits, of float16 and TF32, and with 8 of bfloat16.
COARSE, COARSEST = Precision(5e-2, 2.0**-9, 30), Precision(5e-2, 2.0**-6, 5)
NUDGES = 3
# How many numbers are compared at a time, so that what is computed of them takes little memory.
AT_ONCE = 2**18


def difference(trial: Trial, batch: Batch) -> str | None:
    """What differs beyond rounding if a step is split; None if nothing does, or no trial ran."""
    rows = batch_size_of(batch)
    few = trial.step.parts + 1 if trial.step.inputs.takes_any_size else rows
    counts = [few, rows] if few < rows else [rows]  # type: ignore[operator]
    for count in counts:
        given = batch
        if count != rows:
            given = keras.tree.map_structure(partial(cut, start=0, stop=count), batch)
        expected: dict[Key, Tried] = {}
        runs_whole = False
        try:
            trial.on_one_device(given, expected.__setitem__)
            runs_whole = True
            return first_difference(trial, given, expected)
        except tf.errors.ResourceExhaustedError:
            trial.warn("memory ran out. Training goes on, which needs less")
            return None
        except tf.errors.OpError as error:
            failure = error.message.splitlines()[0]
            if runs_whole:
                return f"it fails where one device does not: {failure}"
            # It may need an even number of rows. If it fails with all of them, it fails in `fit`.
    trial.warn(f"one device cannot run it: {failure}")
    return None


def first_difference(trial: Trial, batch: Batch, expected: dict[Key, Tried]) -> str | None:
    """What differs beyond rounding, given what one device yields. Takes what agrees from there."""
    precision, count = precision_of(trial), len(expected)
    apart: dict[Key, float] = {}

    def compare(key: Key, found: Tried) -> None:
        one = expected[key]
        apart[key] = distance(one.value, found.value, one.rounded, one.largest)
        # A NaN is neither small nor large.
        if apart[key] <= precision.apart:
            del expected[key]

    def explain(key: Key, other: Tried) -> None:
        one = expected.get(key)
        if one is not None:
            by_rounding = distance(one.value, other.value, one.rounded, one.largest)
            if apart[key] <= precision.factor * by_rounding:
                del expected[key]

    trial.in_parts(batch, compare)
    for seed in range(NUDGES):
        if not expected:
            return None
        trial.on_one_device(batch, explain, (precision.digits, seed))
    is_result = any(key[0] == RESULT for key in expected)
    # A long sum in 16 bits loses small summands, and the shorter sums of replicas lose less: some
    # gradients then differ, and those of replicas are the better ones.
    if not expected or (precision is not FULL and not is_result and len(expected) <= count / 2):
        return None
    key = next(iter(expected))
    return f"{trial.name_of(key)} differs by {apart[key]:.1e} of its size"


def distance(
    expected: np.ndarray, found: np.ndarray, rounded: float, largest: float = 0.0
) -> float:
    """The largest difference, relative to the largest value.

    Args:
        rounded: The difference that rounding explains.
        largest: The largest value elsewhere.
    """
    if expected.shape != found.shape:
        return np.inf
    if expected.dtype.kind != "f":
        return float(not np.array_equal(expected, found))
    apart = 0.0
    ones, others = np.ravel(expected), np.ravel(found)
    for start in range(0, ones.size, AT_ONCE):
        one, other = (each[start : start + AT_ONCE] for each in (ones, others))
        with np.errstate(invalid="ignore"):
            equal = (one == other) | (np.isnan(one) & np.isnan(other))
            off = np.where(equal, 0.0, np.abs(one - other))
        if not np.isfinite(off).all():
            return np.inf
        apart = max(apart, float(off.max()))
        largest = max(largest, largest_of(one))
    beyond = max(0.0, apart - rounded)
    return beyond / largest if largest else (np.inf if beyond else 0.0)


def precision_of(trial: Trial) -> Precision:
    """The precision of the least exact operations of a step."""
    types = {t.dtype for op in trial.step.program.all_operations() for t in op.outputs}
    if tf.bfloat16 in types:
        return COARSEST
    on_gpu = tf.DeviceSpec.from_string(trial.device).device_type == "GPU"
    tf32 = on_gpu and tf.config.experimental.tensor_float_32_execution_enabled()
    return COARSE if tf32 or tf.float16 in types else FULL
