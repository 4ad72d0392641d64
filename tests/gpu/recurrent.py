"""LSTM and GRU: whether Keras takes cuDNN's kernels, their numbers, and how replicas share them."""

from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from machine import CPU, Check, Row, devices, exact, strategy
from parity import difference

import keras_multigpu as kmg

KERNELS = 0 if CPU else 1
KINDS = {"LSTM": layers.LSTM, "GRU": layers.GRU}
LIMIT = 1e-4


def checks() -> dict[str, Check]:
    exact()
    names = devices()
    both = strategy(names)
    return {
        **{f"{name} takes cuDNN": partial(takes_cudnn, name) for name in KINDS},
        **{f"{name} against its loop": partial(against_its_loop, name, names[0]) for name in KINDS},
        **{f"{name} is shared": partial(is_shared, name, both) for name in KINDS},
    }


def takes_cudnn(name: str) -> list[Row]:
    """Without a mask it should on a GPU; with one, it is only noted."""
    spec = tf.TensorSpec([None, 10, 6])
    rows = []
    for masked, mask in (("", None), (", with a mask", tf.TensorSpec([None, 10], tf.bool))):
        layer = KINDS[name](8)
        traced = tf.function(lambda x, mask=None, own=layer: own(x, mask=mask))
        graph = traced.get_concrete_function(spec, mask).graph.as_graph_def()
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        found = sum(node.op == "CudnnRNNV3" for node in nodes)
        row = Row(f"{name}{masked}: cuDNN's kernels", KERNELS, found, found == KERNELS)
        rows.append(row._replace(expected="", ok=None) if masked else row)
    return rows


def against_its_loop(name: str, device: str) -> Row:
    """Results and gradients of a layer, against those of the loop that CPUs run."""
    x = np.random.default_rng(0).normal(size=(5, 10, 6)).astype("float32")
    found = []
    with tf.device(device):
        layer = KINDS[name](8, return_sequences=True)
        layer.build(x.shape)
        loop = KINDS[name](8, return_sequences=True, use_cudnn=False)
        loop.build(x.shape)
        loop.set_weights(layer.get_weights())
        for each in (loop, layer):

            @tf.function
            def results(x: tf.Tensor, own: Any = each) -> list[tf.Tensor]:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = own(x)
                    total = tf.reduce_sum(y**2)
                weights = [weight.value for weight in own.trainable_variables]
                return [y, *tape.gradient(total, [x, *weights])]

            found.append([each.numpy() for each in results(tf.constant(x))])
    worst = difference(*found)
    return Row(f"{name} against its loop", f"<= {LIMIT:g}", worst, worst <= LIMIT)


def is_shared(name: str, both: tf.distribute.Strategy) -> Row:
    """Whether each device computes its own examples; parity has the numbers."""
    stacked = [KINDS[name](8, return_sequences=True), layers.Bidirectional(KINDS[name](8))]
    model = keras.Sequential([keras.Input((10, 6)), *stacked, layers.Dense(3)])
    model = kmg.distribute(model, both)
    model.compile("sgd", "mse")
    found = kmg.explain(model)
    others = [f"{part.kind}: {part.operation}" for part in found.parts if part.kind != "summed"]
    return Row(f"{name} is shared", [], others, not others and found.reason is None)
