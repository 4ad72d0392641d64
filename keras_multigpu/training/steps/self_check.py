"""Whether a split step gives the numbers of one device, tried on a few examples of its first batch.

The unsplit step and the parts of all replicas run on one device, one after another, from the same
state. They may differ by rounding, and how much depends on the model. So a large difference is
compared with what the unsplit step makes of weights with other last digits.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.shares import Batch, batch_size_of, cut
from keras_multigpu.training.steps.trial import RESULT, Trial, Tried


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
# The smallest difference of an operation that is reported as the first wrong one.
CLEAR = 1e-2


def difference(trial: Trial, batch: Batch) -> str | None:
    """What differs beyond rounding if a step is split; None if nothing does, or no trial ran."""
    rows = batch_size_of(batch)
    few = trial.parts + 1 if trial.takes_any_size else rows
    counts = [few, rows] if few < rows else [rows]  # type: ignore[operator]
    for count in counts:
        given = batch
        if count != rows:
            given = keras.tree.map_structure(partial(cut, start=0, stop=count), batch)
        try:
            expected = trial.on_one_device(given)
        except tf.errors.OpError:
            # It may need an even number of rows. If it fails with all of them, it fails in `fit`.
            continue
        try:
            found = trial.in_parts(given)
        except tf.errors.ResourceExhaustedError:
            return None
        except tf.errors.OpError as error:
            return f"it fails where one device does not: {error.message.splitlines()[0]}"
        return first_difference(trial, given, expected, found)
    return None


def first_difference(
    trial: Trial, batch: Batch, expected: Sequence[Tried], found: Sequence[Tried]
) -> str | None:
    precision = precision_of(trial)
    far = [
        (place, size)
        for place, size in enumerate(distances(expected, found))
        # A NaN is neither small nor large.
        if not size <= precision.apart
    ]
    if not far:
        return None
    nudged = [
        distances(expected, trial.on_one_device(batch, nudge=(precision.digits, seed)))
        for seed in range(NUDGES)
    ]
    real = [
        (expected[place].name, size)
        for place, size in far
        if not size <= precision.factor * max(each[place] for each in nudged)
    ]
    results = [name for name, _ in real if name.startswith(RESULT)]
    # A long sum in 16 bits loses small summands, and the shorter sums of replicas lose less: some
    # gradients then differ, and those of replicas are the better ones.
    if not real or (precision is not FULL and not results and len(real) <= len(nudged[0]) / 2):
        return None
    what = "{} differs by {:.1e} of its size".format(*real[0])
    line = first_line(trial, batch)
    return what if line is None else f"{what}, first in {line}"


def first_line(trial: Trial, batch: Batch) -> str | None:
    """The source line of the first operation whose parts do not make its whole; None if unknown."""
    try:
        whole, parts = (trial.everything(batch, count) for count in (1, trial.parts))
    except Exception:  # It only helps to understand what was found already.
        return None
    for name, (op, expected) in whole.items():
        if name in parts:
            found = parts[name][1]
            rounded = 1e-5 * float(np.abs(expected).max(initial=0.0))
            if not distance(expected.astype("float64"), found.astype("float64"), rounded) <= CLEAR:
                return f"{place_of(op)} ({op.type})"
    return None


def distances(expected: Sequence[Tried], found: Sequence[Tried]) -> list[float]:
    """How far each value is off, relative to its size."""
    pairs = zip(expected, found, strict=True)
    return [distance(one.value, other.value, one.rounded) for one, other in pairs]


def distance(expected: np.ndarray, found: np.ndarray, rounded: float) -> float:
    """The largest difference, relative to the largest value.

    Args:
        rounded: The difference that rounding explains.
    """
    if expected.shape != found.shape:
        return np.inf
    if expected.dtype.kind != "f":
        return float(not np.array_equal(expected, found))
    with np.errstate(invalid="ignore"):
        equal = (expected == found) | (np.isnan(expected) & np.isnan(found))
        apart = np.where(equal, 0.0, np.abs(expected - found))
    if not np.isfinite(apart).all():
        return np.inf
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    beyond = max(0.0, float(apart.max(initial=0.0)) - rounded)
    return beyond / largest if largest else (np.inf if beyond else 0.0)


def precision_of(trial: Trial) -> Precision:
    """The precision of the least exact operations of a step."""
    types = {tensor.dtype for op in trial.facts.all_operations() for tensor in op.outputs}
    if trial.rounds_sums or tf.bfloat16 in types:
        return COARSEST
    on_gpu = tf.DeviceSpec.from_string(trial.hub).device_type == "GPU"
    tf32 = on_gpu and tf.config.experimental.tensor_float_32_execution_enabled()
    return COARSE if tf32 or tf.float16 in types else FULL
