"""The costs of a split step, against numbers computed by hand."""

import collections

import pytest
import tensorflow as tf
from random_programs import WIDTH, Program
from simulated_replicas import Simulation

from keras_multigpu.partition.planning.cost import Moved, StepCost

ROWS = tf.TensorSpec([None, 6])
IMAGES = tf.TensorSpec([None, 8, 8, 3])
KERNEL, DEPTHWISE = tf.ones((3, 3, 3, 5)), tf.ones((3, 3, 3, 2))
NUMBERS = collections.defaultdict(lambda: 1, batch=10)


def cost_of(function, *specs):
    return Simulation(function, specs, 2).step.cost


def gradient_of(function):
    """The gradient with respect to the inputs alone."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x))
        return tape.gradient(y, x)

    return gradient


def in_a_loop(x):
    return tf.while_loop(
        lambda n, rows: n < 5,
        lambda n, rows: (n + 1, rows @ tf.ones((6, 6))),
        (0, x),
        maximum_iterations=5,
    )[1]


@pytest.mark.parametrize(
    ("function", "spec", "flops"),
    [
        (lambda x: x @ tf.ones((6, 4)), ROWS, 2 * 10 * 6 * 4),
        (lambda x: tf.matmul(x, x, transpose_a=True), ROWS, 2 * 10 * 6 * 6),
        (lambda x: tf.einsum("bc,dc->bd", x, tf.ones((4, 6))), ROWS, 2 * 10 * 6 * 4),
        (lambda x: tf.einsum("...c,cd->...d", x, tf.ones((3, 4))), IMAGES, 2 * 10 * 64 * 3 * 4),
        (lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"), IMAGES, 2 * 640 * 27 * 5),
        (lambda x: tf.nn.conv2d(x, KERNEL, 2, "SAME"), IMAGES, 2 * 160 * 27 * 5),
        (
            gradient_of(lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME") ** 2),
            IMAGES,
            2 * 2 * 640 * 27 * 5,
        ),
        (
            lambda x: tf.nn.depthwise_conv2d(x, DEPTHWISE, [1, 1, 1, 1], "SAME"),
            IMAGES,
            2 * 640 * 9 * 6,
        ),
        (in_a_loop, ROWS, 5 * 2 * 10 * 6 * 6),
    ],
)
def test_arithmetic_is_counted(function, spec, flops):
    """Two for each multiply-add, also in loops with a known number of iterations."""
    cost = cost_of(function, spec)
    assert cost.flops(NUMBERS) == flops
    assert cost.shared(NUMBERS) == 1.0


def test_bytes_depend_on_the_size_of_the_batch():
    """The cost is computed once, for batches of every size."""
    cost = cost_of(lambda x: tf.cumsum(tf.sort(x, axis=0), axis=0), ROWS)
    assert cost.bytes("gathered", {"batch": 10}) == 10 * 6 * 4
    assert cost.bytes("gathered", {"batch": 1000}) == 1000 * 6 * 4
    assert cost.bytes("summed", {"batch": 10}) == 0


def test_moments_travel_as_two_doubles_for_each_channel():
    cost = cost_of(lambda x: tf.nn.moments(x, [0], keepdims=True), ROWS)
    assert cost.bytes("summed", NUMBERS) == 2 * 8 * 6


def test_a_gather_counts_with_the_arithmetic_it_causes():
    """Only arithmetic that is whole because of a gather counts, and a small gather counts as 0."""
    wide = tf.TensorSpec([None, 1000])

    def step(x):
        return tf.sort(x, axis=0) @ tf.ones((1000, 1000)), tf.ones((500, 500)) @ tf.ones((500, 9))

    cost = cost_of(step, wide)
    after = [work.after_gather for work in cost.work]
    assert after == [True, False]
    assert cost.part_of_gathers({"batch": 1000}, 2) > 0.9
    assert cost.part_of_gathers({"batch": 10}, 2) == 0.0


@pytest.mark.parametrize("shards", [False, True])
def test_plans_cost_what_replicas_then_exchange(shards):
    """Plans are made before anything is emitted, and each exchange of theirs marks the graph."""
    for seed in range(6):
        program = Program(seed)
        spec = tf.TensorSpec([None, WIDTH], tf.float64)
        simulation = Simulation(program.step, [spec], 3, program.variables, shards=shards)
        assert len(simulation.step.cost.moved) == len(simulation.cuts.made), program


def test_an_open_sum_in_another_shape_is_scattered():
    """As the gradient of `EinsumDense`, which is reshaped before the update takes its rows."""
    kernel, mean, square = (tf.Variable(tf.ones((6, 12))) for _ in range(3))

    def step(x):
        gradient = tf.reshape(tf.matmul(x, tf.reshape(x @ kernel, (-1, 12)), True), (6, 12))
        mean.assign_add(0.1 * (gradient - mean))
        square.assign_add(0.1 * (tf.square(gradient) - square))
        kernel.assign_sub(mean / tf.sqrt(square))

    simulation = Simulation(step, [ROWS], 2, [kernel, mean, square], shards=True)
    assert len(simulation.cuts.scatters) == 1
    assert len(simulation.cuts.made) == 2


def test_what_sharding_moves_is_compared_with_sums_of_all():
    cost = StepCost()
    sizes = {"summed": 100, "scattered": 50, "gathered": 20, "weights": 150}
    cost.moved = [Moved(kind, size, None) for kind, size in sizes.items()]
    # A sum counts twice.
    assert cost.times_unsharded({}) == (200 + 50 + 20 + 150) / (200 + 100 + 20)
