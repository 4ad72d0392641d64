"""What all policies promise, and how tests read their draws."""

import numpy as np
import tensorflow as tf

from helpers.layer_checks import drawn_for
from keras_multigpu.augmentation import TrivialAugment

OPERATIONS = TrivialAugment.OPERATIONS


def levels(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype("float32")


def drawn_operations(layer, count=3000, shape=(32, 40, 3)):
    """A layer's draws for many images: names and magnitudes, by image and step."""
    drawn = drawn_for(layer, (count, *shape))
    names = np.array(OPERATIONS)[drawn["operation"].numpy()]
    return names, drawn["magnitude"].numpy()


def one_step(names, magnitudes):
    """Draws of one operation for each image, by name."""
    return {
        "operation": tf.constant([[OPERATIONS.index(name)] for name in names], tf.int32),
        "magnitude": tf.constant([[size] for size in magnitudes], tf.float32),
    }


def check_evenly_drawn(names, expected):
    """All operations are drawn, and about equally often."""
    found, counts = np.unique(names, return_counts=True)
    assert sorted(found) == sorted(expected)
    share = 1 / len(expected)
    deviation = (share * (1 - share) / names.size) ** 0.5
    np.testing.assert_allclose(counts / names.size, share, atol=5 * deviation)
