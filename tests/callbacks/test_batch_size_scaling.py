"""`BatchSizeScaling`: rates, sizes and steps, against numbers written by hand."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import covering
from slope_models import eager_slope, slope

import keras_multigpu as kmg
from keras_multigpu.callbacks import BatchSizeScaling
from keras_multigpu.training.replication import replication_of

ONES, ZEROS = np.ones((22, 1), "float32"), np.zeros((22, 1), "float32")


def batches():
    """Twenty-two examples, four at a time: six steps."""
    return kmg.data.from_arrays(ONES, ZEROS, global_batch_size=4, seed=1)


def trained(model, *callbacks, x=None, **arguments):
    """What `fit` returns after two epochs."""
    arguments = {"epochs": 2, "verbose": 0, **arguments}
    return model.fit(batches() if x is None else x, callbacks=list(callbacks), **arguments)


SIZES = {
    "batches": (batches, {}),
    "arrays": (lambda: ONES, {"y": ZEROS, "batch_size": 4}),
    "dataset": (lambda: tf.data.Dataset.from_tensor_slices((ONES, ZEROS)).batch(4), {}),
    "steps": (batches, {"steps_per_epoch": 6}),
}


@pytest.mark.parametrize(("source", "replicas"), covering(list(SIZES), [2, 1, 1, 1]))
def test_the_batch_grows_between_epochs(source, replicas):
    """Steps, progress bar, rate and logs follow."""
    make, arguments = SIZES[source]
    steps = []
    scaling = BatchSizeScaling(4, schedule={1: 8, 2: 16})
    show = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: steps.append(scaling.params["steps"])
    )
    model = eager_slope(replicas, keras.optimizers.SGD(0.5))
    history = trained(model, scaling, show, x=make(), epochs=3, **arguments).history
    lengths = [6, 6, 6] if source == "steps" else [6, 3, 2]
    assert steps == lengths
    assert history["global_batch_size"] == [4, 8, 16]
    assert history["learning_rate"] == [0.5, 1.0, 2.0]
    expected = np.repeat([0.5, 1.0, 2.0], lengths)
    assert model.get_weights()[0].item() == -expected.sum()
    assert scaling.factor == 1.0


@pytest.mark.parametrize("initial_epoch", [0, 3])
def test_training_may_begin_in_the_middle_of_the_schedule(initial_epoch):
    scaling = BatchSizeScaling(4, schedule={0: 2, 2: 8})
    model = eager_slope(1, keras.optimizers.SGD(0.5))
    epochs = initial_epoch + 1
    history = trained(model, scaling, epochs=epochs, initial_epoch=initial_epoch).history
    assert history["global_batch_size"] == [8 if initial_epoch else 2]
    assert history["learning_rate"] == [1.0 if initial_epoch else 0.25]


@pytest.mark.slow
def test_one_trace_for_each_number_of_micro_batches():
    """A new size alone needs no new graph. The weights are those of one device."""
    traces, pieces = [], []

    def loss(y, y_pred):
        traces.append(1)
        return y_pred - y

    scaling = BatchSizeScaling(4, schedule={1: 8, 2: 16, 4: 22}, max_replica_batch_size=4)
    seen = []
    show = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: (
            pieces.append(model.training_run.micro_batches),
            seen.append(len(traces)),
        )
    )
    model = slope(2, keras.optimizers.SGD(0.5), loss)
    trained(model, scaling, show, epochs=5)
    sizes = [4, 8, 16, 16, 22]
    assert pieces == [math.ceil(size / 2 / 4) for size in sizes]
    grown = np.diff([0, *seen]) > 0
    known = [number in pieces[:epoch] for epoch, number in enumerate(pieces)]
    assert grown.tolist() == [not one for one in known]
    expected = sum(-(-22 // size) * 0.5 * size / 4 for size in sizes)
    np.testing.assert_allclose(model.get_weights()[0].item(), -expected)
    assert replication_of(model).pieces == 1


def test_a_reduced_rate_stays_reduced():
    """`ReduceLROnPlateau` halves the scaled rate; later growth multiplies the halved one."""
    plateau = keras.callbacks.ReduceLROnPlateau("flat", factor=0.5, patience=1, mode="min")
    flat = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(flat=1.0))
    model = eager_slope(1, keras.optimizers.SGD(0.5))
    history = trained(model, flat, BatchSizeScaling(4, schedule={2: 8}), plateau, epochs=3).history
    assert history["learning_rate"] == [0.5, 0.5, 0.5]
    assert float(model.optimizer.learning_rate) == 0.125


def test_the_rate_is_unscaled_when_training_fails():
    """Or the next `fit` would scale it again."""

    def fail(epoch, logs):
        raise KeyboardInterrupt

    model = eager_slope(1, keras.optimizers.SGD(0.5))
    with pytest.raises(KeyboardInterrupt):
        trained(model, BatchSizeScaling(1), keras.callbacks.LambdaCallback(on_epoch_end=fail))
    assert float(model.optimizer.learning_rate) == 0.5
