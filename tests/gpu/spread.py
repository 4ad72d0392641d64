"""How far two equal trainings of one device are from each other: no comparison can be closer."""

from functools import partial

import tensorflow as tf
from machine import Check, Row, devices
from parity import difference, numbers_of, trainings


def checks() -> dict[str, Check]:
    (first, *_) = devices()
    return {name: partial(spread, name, first) for name in ("MLP", "convnet, BatchNormalization")}


def spread(name: str, device: str) -> list[Row]:
    """With TensorFloat-32 and without, and what TensorFloat-32 itself changes."""
    one, found = trainings()[name], {}
    for on in (False, True):
        tf.config.experimental.enable_tensor_float_32_execution(on)
        with tf.device(device):
            found[on] = [numbers_of(one, lambda model: model) for _ in range(2)]
    return [
        Row(f"{name}, again", "", difference(*found[False])),
        Row(f"{name}, again, TF32", "", difference(*found[True])),
        Row(f"{name}, TF32 against none", "", difference(found[False][0], found[True][0])),
    ]
