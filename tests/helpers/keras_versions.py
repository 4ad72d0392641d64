"""Marks for tests of features that the oldest supported Keras lacks."""

import keras
import pytest

from keras_multigpu.keras_internals.versions import minor

ON_THE_OLDEST = minor(keras.version()) <= (3, 10)

ADDS_UP_BATCHES = minor(keras.version()) < (3, 15)
"""Keras adds a single batch to what its metrics hold already, and returns arrays."""

ONE_HOT_BINS = "one_hot" if minor(keras.version()) >= (3, 14) else "int"
"""Before, `Discretization(output_mode="one_hot")` tells another shape than that of its outputs."""

has_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.13 has no MultiOptimizer"
)
has_distributions = pytest.mark.skipif(
    minor(keras.version()) < (3, 15),
    reason="before Keras 3.15 only JAX's backend has distributions",
)
takes_none_as_input = pytest.mark.skipif(
    ON_THE_OLDEST, reason="Keras 3.10 asks for the length of an array that is None"
)
rows_of_the_newest = pytest.mark.skipif(
    ON_THE_OLDEST, reason="these rows train classes of Keras 3.15, some of which fail in Keras 3.10"
)
