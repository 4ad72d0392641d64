"""What replicas exchange on GPUs, read from graphs and by numbers: TensorFlow's own all-reduce.

It takes the same way over logical CPU devices, with rings in place of NCCL.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import as_on_gpus
from keras import layers

import keras_multigpu as kmg
from keras_multigpu.partition.emission.exchange import SENT_AS, arrived, travelling
from keras_multigpu.training.exchange import packing
from keras_multigpu.training.exchange.sums import Sums
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replication import replication_of

# What TensorFlow gives NCCL on GPUs, by `kValidDataTypes` in its nccl_manager.cc; not int32, which
# TensorFlow keeps on the host.
CARRIED = {tf.float16, tf.float32, tf.float64, tf.int64}


class Collective(NamedTuple):
    """One collective of one replica."""

    operation: tf.Operation
    kind: str
    dtype: tf.DType
    shape: tuple[int | None, ...]

    @property
    def form(self) -> tuple[Any, ...]:
        """What has to be the same on all replicas."""
        return self.kind, self.dtype, self.shape


def graph_of_step(model: Any) -> Any:
    """The graph that all replicas run in a training step, of its first form of batch."""
    functions = replication_of(model).steps_of("train")[0]
    return next(iter(functions._made.values())).graph.graph


def collectives_in(graph: Any) -> dict[str, list[Collective]]:
    """The collectives of each device in the order in which they run."""
    found: dict[str, list[Collective]] = {}
    for operation in graph.get_operations():
        if operation.type.startswith("Collective"):
            tensor = operation.inputs[0]
            shape = tuple(tensor.shape.as_list()) if tensor.shape.rank is not None else (None,)
            one = Collective(operation, operation.type, tensor.dtype, shape)
            found.setdefault(operation.device, []).append(one)
    return found


def collectives_in_branches(graph: Any) -> dict[str, dict[str, list[Any]]]:
    """The type and dtype of each collective of each device, by the branch of a condition."""
    found: dict[str, dict[str, list[Any]]] = {}
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            if node.op.startswith("Collective"):
                on_devices = found.setdefault(function.signature.name, {})
                on_devices.setdefault(node.device, []).append((node.op, node.attr["T"].type))
    return found


@pytest.fixture(scope="module")
def group():
    return ReplicaGroup(as_on_gpus(2))


def on_replicas(group, exchanged, function):
    """What replicas have after exchanging what a function of their numbers returns, in a graph."""
    return tf.function(
        lambda: exchanged(group.run(lambda one: function(one.id))), autograph=False
    )()


VALUES = {
    tf.float16: [1.5, -2.0],
    tf.bfloat16: [1.5, -2.0],
    tf.float32: [1.5, -2.0],
    tf.float64: [1.5, 1e300],
    tf.bool: [True, False],
    tf.int8: [100, -3],
    tf.uint8: [100, 3],
    tf.int16: [30_000, -3],
    tf.uint16: [30_000, 3],
    tf.int32: [2**30, -3],
    tf.uint32: [2**30, 3],
    tf.int64: [2**62, -3],
    tf.uint64: [2**62, 3],
    tf.complex64: [1 + 2j, 3j],
    tf.complex128: [1 + 2j, 3j],
}


def test_every_dtype_is_summed_in_one_exchange(group):
    """One replica has the values, the other zeros: nothing may be lost on the way."""

    def summands(number):
        tensors = [tf.constant(values, dtype) for dtype, values in VALUES.items()]
        own = [tensor if number == 0 else tf.zeros_like(tensor) for tensor in tensors]
        return [travelling(tensor) for tensor in own]

    for sums in on_replicas(group, Sums(group.exchange), summands):
        for found, (dtype, values) in zip(sums, VALUES.items(), strict=True):
            found = arrived(found, dtype)
            np.testing.assert_array_equal(found, tf.constant(values, dtype), err_msg=dtype.name)


def test_whatever_travels_is_what_nccl_carries():
    numbers = {each for each in VALUES if each not in SENT_AS}
    assert numbers | set(SENT_AS.values()) == CARRIED
    assert CARRIED.isdisjoint(SENT_AS)


class Contrastive(keras.Model):
    """Compares each example with all others, by labels of int64."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        alike = tf.cast(tf.cast(y, tf.int64)[:, None] == tf.cast(y, tf.int64), tf.float32)
        return tf.reduce_mean((tf.matmul(y_pred, y_pred, transpose_b=True) - alike) ** 2)


def normalized_in(policy):
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3, dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.ReLU(dtype=policy),
            layers.Conv2D(4, 3, dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.GlobalAveragePooling2D(dtype=policy),
            layers.Dense(3, dtype="float32"),
        ]
    )


def reader():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            layers.Embedding(20, 4),
            layers.LSTM(4),
            layers.Dense(3),
        ]
    )


RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(7, 6, 6, 3)).astype("float32")
ROWS, TOKENS = RNG.normal(size=(7, 6)).astype("float32"), RNG.integers(0, 20, (7, 5))
LABELS = RNG.integers(0, 3, 7)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**9)


def accumulating():
    return keras.optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)


STEPS = {
    "float16, loss scale": (lambda: normalized_in("mixed_float16"), IMAGES, scaled, {}),
    "bfloat16": (lambda: normalized_in("mixed_bfloat16"), IMAGES, keras.optimizers.Adam, {}),
    "tokens of int64": (reader, TOKENS, lambda: keras.optimizers.SGD(0.1), {}),
    "rows of all replicas": (Contrastive, ROWS, keras.optimizers.Adam, {}),
    "accumulation": (lambda: normalized_in("float32"), IMAGES, accumulating, {}),
    "pieces": (reader, TOKENS, keras.optimizers.Adam, {"micro_batches": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_replicas_call_the_same_collectives_in_the_same_order(name):
    """Otherwise NCCL waits forever. Nor may one stand where not all replicas come by."""
    make, x, optimizer, options = STEPS[name]
    model = kmg.distribute(make(), as_on_gpus(2))
    model.compile(optimizer(), None if make is Contrastive else crossentropy(), **options)
    model.train_on_batch(x, LABELS)
    graph = graph_of_step(model)
    first, second = collectives_in(graph).values()
    assert [each.form for each in first] == [each.form for each in second]
    assert {each.dtype for each in first} <= CARRIED
    branches = collectives_in_branches(graph)
    # A sum that may wait is one branch for all replicas, so they come by together.
    assert bool(branches) == (name == "accumulation")
    for of_branch in branches.values():
        first, second = of_branch.values()
        assert first == second


def wide():
    """Kernels of 400 and 1,600 bytes: each fills a bucket of 256 bytes by itself."""
    ends = [layers.Dense(20) for _ in range(4)]
    return keras.Sequential([keras.Input((5,)), *ends, layers.Dense(3)])


def deep():
    """As above, with sums in the middle of the backward pass."""
    middle = [each for _ in range(3) for each in (layers.Dense(20), layers.BatchNormalization())]
    return keras.Sequential([keras.Input((5,)), *middle, layers.Dense(3)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # The last layer with the loss, a kernel of each layer, all biases, the first kernel.
        (wide, [64, 400, 400, 400, 80, 100]),
        # Moments of three layers, then what the gradient of each sums, which the backward pass
        # waits for; between them a bucket of the last layer with the loss, then those of kernels.
        (deep, [40, 40, 40, 40, 64, 40, 20, 400, 40, 20, 400, 20, 100]),
    ],
)
def test_each_bucket_is_a_collective_and_leaves_as_soon_as_it_is_full(make, expected, monkeypatch):
    for name in ("BUCKET", "LARGE", "SMALLEST"):
        monkeypatch.setattr(packing, name, 256)
    model = kmg.distribute(make(), as_on_gpus(2))
    model.compile("sgd", crossentropy(), jit_compile=False)
    model.train_on_batch(RNG.normal(size=(6, 5)).astype("float32"), LABELS[:6])
    for own in collectives_in(graph_of_step(model)).values():
        assert [math.prod(each.shape) for each in own] == expected
