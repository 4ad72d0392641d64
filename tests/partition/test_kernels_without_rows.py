"""With oneDNN, TensorFlow's default on CPUs, layers work on replicas that have no rows."""

import subprocess
import sys

from helpers.processes_left import as_users_start_it

SCRIPT = """
import keras, numpy as np
from keras import layers

import keras_multigpu as kmg

two = kmg.strategy(devices=2)
x, y = np.random.default_rng(0).random((3, 8, 8, 3), "float32"), np.ones((3, 1), "float32")
for kind, rank in ((layers.Conv2D, 2), (layers.DepthwiseConv2D, 2), (layers.Conv2DTranspose, 2),
                   (layers.Conv1D, 1), (layers.Conv3D, 3)):
    data = x if rank == 2 else x[:, 0] if rank == 1 else np.stack(5 * [x], 3)
    # What TensorFlow may fuse with a convolution: padding before it, all else after it.
    size = () if kind is layers.DepthwiseConv2D else (4,)
    model = keras.Sequential([
        keras.Input(data.shape[1:]), kind(*size, 3), layers.ReLU(),
        kind(*size, 3, use_bias=False), layers.BatchNormalization(), layers.Flatten(),
        layers.Dense(1),
    ])
    expected = model.predict(data, batch_size=2, verbose=0)
    model = kmg.distribute(model, two)
    model.compile("sgd", "mse")
    found = model.predict(data, batch_size=2, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert np.isfinite(model.evaluate(data, y, batch_size=2, verbose=0))
    assert np.isfinite(model.fit(data, y, batch_size=2, verbose=0).history["loss"][0])
"""


def test_convolutions_without_rows_have_their_shape():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=as_users_start_it(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
