"""The arithmetic of a step, counted by hand, and the peaks of GPUs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas

from keras_multigpu.callbacks import ThroughputReport
from keras_multigpu.callbacks.throughput_report.flops import peak_of

X = np.zeros((20, 6, 4), "float32")


class Loop(keras.layers.Layer):
    """A product in a loop that ends by itself."""

    def call(self, x):
        def body(x):
            return (tf.linalg.matmul(x, tf.eye(4)),)

        return tf.while_loop(lambda x: tf.reduce_sum(x) > 1.0, body, (x,))[0]


def reported(layers, replicas=2, **compiled):
    """The last report of a training in batches of 8 and 4, without a compiled step."""
    model = on_replicas(keras.Sequential([keras.Input((6, 4)), *layers]), replicas)
    model.compile("sgd", "mse", **compiled)
    report = ThroughputReport(verbose=0)
    targets = np.zeros((20, *model.output_shape[1:]))
    model.fit(X, targets, batch_size=8, epochs=2, verbose=0, callbacks=[report])
    return report.report


@pytest.mark.parametrize(("replicas", "compiled"), [(1, {}), (2, {}), (2, {"micro_batches": 2})])
def test_the_operations_of_a_step_by_hand(replicas, compiled):
    """Two for each term of a sum; the first layer has no gradient of its inputs."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(5), keras.layers.Dense(3)]
    found = reported(layers, replicas, **compiled)
    each = 2 * (2 * 24 * 5 + 3 * 5 * 3)
    assert found.step_flops == round(each * 20 / 3)
    np.testing.assert_allclose(found.flops_per_second, each * found.examples_per_second, rtol=1e-3)


@pytest.mark.slow
def test_a_recurrent_layer_counts_each_of_its_steps():
    found = reported([keras.layers.GRU(3)])
    assert found.step_flops == round((2 * 6 * 4 * 9 * 2 + 3 * 6 * 3 * 9 * 2) * 20 / 3)


def test_a_loop_of_unknown_length_has_no_figure():
    found = reported([Loop(), keras.layers.Dense(3)])
    assert found.step_flops is found.flops_per_second is found.utilisation is None


@pytest.mark.parametrize(
    ("name", "dtype", "uses_tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", True, 989e12),
        ("NVIDIA H100 PCIe", "float32", True, 378e12),
        ("NVIDIA A100-SXM4-40GB", "float32", False, 19.5e12),
        ("Tesla V100-SXM2-16GB", "float32", True, 15.7e12),
        ("Tesla T4", "float16", True, 65e12),
        ("Tesla T4", "bfloat16", True, None),
        ("NVIDIA L4", "float64", True, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float32", True, None),
        ("NVIDIA A10G", "float32", True, None),
        ("", "float32", True, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_name(name, dtype, uses_tf32, expected):
    assert peak_of(name, dtype, uses_tf32) == expected
