"""`NaNGuard` with custom steps, other callbacks, `Batches` and resumed runs."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.own_step import UnseenStep
from nan_guard_models import data, fit, line

import keras_multigpu as kmg
from keras_multigpu.callbacks import NaNGuard


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.slow
def test_opaque_steps_are_checked_from_outside(distributed, caplog):
    """By logs and weights, in a `train_step` with its own loss and in stock `fit`."""

    def made():
        keras.utils.set_random_seed(1)
        model = UnseenStep() if distributed else keras.Sequential([keras.layers.Dense(1)])
        if distributed:
            model = on_replicas(model, 2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = data(13)
    guard = NaNGuard(every_steps=1)
    fit(made(), x, y, guard)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert finding.replicas == ((0, 1) if distributed else (0,))
    assert len(finding.variables) == 2
    assert "weights have already changed" in caplog.text


def test_a_single_bad_copy_of_a_weight_is_found():
    """If a step cannot be inspected, the copies of each replica are."""
    model = on_replicas(UnseenStep(), 2)
    model.compile(keras.optimizers.SGD(0.0), "mse")

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.parts.layers[0].bias.value.values[1].assign([np.nan])

    guard = NaNGuard(every_steps=1)
    x, y = data()
    model.fit(x, y, 8, verbose=0, callbacks=[Break(), guard])
    (finding,) = guard.findings
    assert (finding.step, finding.replicas, finding.devices) == (1, (1,), ("CPU:1",))
    assert finding.variables[0].endswith("bias")


@pytest.mark.slow
def test_the_example_of_batches_is_named():
    """`Batches` know the position of each example; here each example holds its own number."""
    x = np.arange(24, dtype="float32")[:, None]
    y = np.zeros((24, 1), "float32")
    y[17] = np.nan
    batches = kmg.data.from_arrays(x, y, global_batch_size=5, seed=3)
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match=r"example \d of the batch \(example 17 of .*\)"):
        line(2, rate=0.0).fit(batches, epochs=2, verbose=0, callbacks=[guard])
    assert len(guard.findings) == 2
    for finding in guard.findings:
        batch = list(batches.epoch(finding.epoch))[finding.step]
        assert batch[0].numpy()[finding.position] == 17
        assert finding.example.startswith("example 17 of ")
