"""Gives all replicas the mean of the statistics that each of them keeps."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.tracing import traced
from keras_multigpu.training.variables.model_state import adds_up

Copies = tuple[tf.Variable, ...]


def copied_statistics(model: keras.Model) -> list[Copies]:
    """The copies of what forward passes change: floats that are not trained.

    The weights of frozen layers are none; they are equal everywhere, and may be large.
    """
    frozen = {
        id(variable)
        for layer in keras_internals.layers_of(model)
        if not layer.trainable
        for variable in layer.variables
    }
    found = []
    for variable in model.non_trainable_variables:
        storage = keras_internals.variable_storage(variable)
        if id(variable) in frozen or storage is None or adds_up(storage):
            continue
        parts = copies_of(variable)
        if len(parts) > 1 and storage.dtype.is_floating:
            found.append(parts)
    return found


class StatisticsMean:
    """Takes the mean of the copies of some variables; compiled once."""

    def __init__(self, variables: Sequence[Copies]) -> None:
        self._variables = list(variables)
        self._packing = Packing([parts[0] for parts in self._variables])
        self._run = traced(self._average, (), jit_compile=False)

    def fits(self, variables: Sequence[Copies]) -> bool:
        """Whether it was compiled for these."""
        return len(variables) == len(self._variables) and all(
            one[0] is other[0] for one, other in zip(variables, self._variables, strict=True)
        )

    def run(self) -> list[str]:
        """Average; the devices whose statistics are not finite, and so were left out."""
        finite: np.ndarray = self._run().numpy()
        devices = [part.device for part in self._variables[0]]
        return [device for device, good in zip(devices, finite, strict=True) if not good]

    def _average(self) -> tf.Tensor:
        packs = []
        for replica, part in enumerate(self._variables[0]):
            with tf.device(part.device):
                values = [parts[replica].read_value() for parts in self._variables]
                packs.append(self._packing.pack(values))
        common = [mean_of_finite(of_replicas) for of_replicas in zip(*packs, strict=True)]
        finite = tf.stack(
            [
                tf.reduce_all([tf.reduce_all(tf.math.is_finite(pack)) for pack in of_replica])
                for of_replica in packs
            ]
        )
        # No copy changes before all were read.
        with tf.control_dependencies([*common, finite]):
            for parts, value in zip(self._variables, self._packing.unpack(common), strict=True):
                for part in parts:
                    with tf.device(part.device):
                        part.assign(tf.identity(value), read_value=False)
        return finite


def mean_of_finite(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """The mean of the finite values, element by element; the first value where there is none.

    Differences are averaged, so that equal values keep every bit.
    """
    finite = [tf.math.is_finite(value) for value in values]
    start = values[0]
    for value, is_finite in zip(values[1:], finite[1:], strict=True):
        start = tf.where(~tf.math.is_finite(start) & is_finite, value, start)
    count = tf.add_n([tf.cast(one, start.dtype) for one in finite])
    more = [
        tf.where(is_finite, value - start, tf.zeros_like(start))
        for value, is_finite in zip(values, finite, strict=True)
    ]
    return start + tf.math.divide_no_nan(tf.add_n(more), count)
