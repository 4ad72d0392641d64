"""A function is cut into stages where replicas sum: results by hand, on two replicas."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.training.exchange import stages, sums
from keras_multigpu.training.exchange.exchange import Exchange
from keras_multigpu.training.replica_group import ReplicaGroup

NUMBER = tf.TensorSpec(())


def on_two_replicas(function):
    """The results of a function of one number on replicas that hold 1 and 2, a row for each."""
    results = tf.function(on_replicas(function), autograph=False)()
    values = [map(float, tf.nest.flatten(result)) for result in results]
    return [list(of_all) for of_all in zip(*values, strict=True)]


def on_replicas(function):
    """Calls stages of one number on replicas that hold 1 and 2."""
    group = ReplicaGroup(kmg.strategy("mirrored", devices=["CPU:0", "CPU:1"]))

    def call():
        shares = [[(tf.constant(number),)] for number in (1.0, 2.0)]
        return [piece for (piece,) in function(shares, sums.Sums(group.exchange))]

    return call


def traced(function, specs=(NUMBER,), jit_compile=False, has_effects=True):
    """The stages of a function, whose last argument is what sums."""
    cuts = sums.Cuts(2)
    part = functools.partial(function, total=cuts.sum)
    return stages.trace_stages(part, specs, cuts, jit_compile, has_effects=has_effects)


def several_sums(number, total):
    """Two independent sums, and one of both."""
    first, second = total(number), total(number * 10.0)
    return first, total(second + number), number


@pytest.mark.parametrize("at_once", [0, 2**25])
def test_an_equal_result_is_taken_once(at_once, monkeypatch):
    """2 and 4 are doubled, summed for the first replica, and halved for each."""
    monkeypatch.setattr(stages, "AT_ONCE", at_once)

    def function(number, total):
        twice = number * 2.0
        whole = total(twice)
        return twice, whole, whole / twice, whole + 1.0, whole + 2.0, whole + 3.0

    call = traced(function)
    same, taken = [call.structured_outputs[place].name for place in (1, 3, 4, 5)], []
    alike = dict.fromkeys(same, lambda _, value: taken.append(float(value))) | {same[2]: None}
    found = call.run_in_turn([(tf.constant(1.0),), (tf.constant(2.0),)], alike)
    assert sorted(taken) == [6, 7, 9]
    assert [[float(each[place]) for place in (0, 2)] for each in found] == [[2, 3], [4, 1.5]]
    assert all(each[place] is None for each in found for place in (1, 3, 4, 5))
    # Nobody takes any of them.
    call.run_in_turn([(tf.constant(1.0),), (tf.constant(2.0),)], dict.fromkeys(same))
    # Rows of variables are taken from each replica.
    rows = dict.fromkeys(same[2:], lambda place, value: taken.append((place, float(value))))
    del taken[:]
    call.run_in_turn([(tf.constant(1.0),), (tf.constant(2.0),)], rows, dict.fromkeys(rows, 4))
    assert sorted(taken) == [(0, 8), (0, 9), (1, 8), (1, 9)]


def loop_and_gradient(number, total, noise=False):
    """A fourth power by a loop, and its gradient with the sum of all replicas."""
    with tf.GradientTape() as tape:
        tape.watch(number)
        _, power = tf.while_loop(
            lambda step, _: step < 2,
            lambda step, found: (step + 1, found * found),
            (0, number + tf.random.stateless_normal((), (1, 2)) if noise else number),
            maximum_iterations=2,
        )
    whole = total(power)
    return whole, tape.gradient(power, number, output_gradients=whole)


def test_a_list_passes_from_stage_to_stage_with_xla_too():
    """The sum is 1 + 16; the gradients are four times 1 and 8, times that."""
    function = traced(loop_and_gradient, jit_compile=True)
    assert on_two_replicas(function) == [[17, 17], [68, 544]]
    # These are others without XLA.
    noisy = functools.partial(loop_and_gradient, noise=True)
    with pytest.raises(CannotSplit, match="a loop and its gradient.*StatelessRandomNormal"):
        traced(noisy, jit_compile=True)


@pytest.mark.parametrize("has_effects", [False, True])
def test_sums_at_the_same_place_travel_together(has_effects, monkeypatch):
    sizes = []
    summed = Exchange.sum

    def noted(exchange, parts):
        sizes.append([pack.shape.num_elements() for pack in parts[0]])
        return summed(exchange, parts)

    monkeypatch.setattr(Exchange, "sum", noted)
    on_two_replicas(traced(several_sums, has_effects=has_effects))
    # The sum that no other needs waits for the last one.
    assert sizes == [[1], [2]]


def test_a_function_without_sums_is_one_stage_and_optimized_once(monkeypatch):
    """For any number of replicas. One of two equal products remains, and unused operations go."""
    left = []
    optimized = graph_internals.optimized_functions

    def noted(functions, graph):
        left.append([sorted(n.op for n in f.node_def) for f in optimized(functions, graph)])
        return optimized(functions, graph)

    monkeypatch.setattr(graph_internals, "optimized_functions", noted)
    call = traced(lambda x, total: (tf.exp(x) - 1.0) * (tf.exp(x) - 1.0))
    np.testing.assert_allclose(on_two_replicas(call), [[(np.e - 1) ** 2, (np.e**2 - 1) ** 2]])
    (((operations,)),) = left
    assert operations.count("Exp") == operations.count("Sub") == 1


def test_stages_wait_for_each_other_and_pass_on_any_kind_of_tensor():
    table = tf.constant([5.0, 7.0])

    def function(number, total):
        said = tf.strings.as_string(number)
        listed = tf.TensorArray(tf.float32, 1).write(0, number)
        summed = total(number)
        with tf.control_dependencies([said, tf.group(summed)]):
            later = summed + table[0] + listed.read(0)
        sparse = tf.IndexedSlices(later[tf.newaxis], tf.constant([0]), tf.constant([2]))
        while_loop = tf.while_loop(lambda n: n < later, lambda n: n * 2.0, [summed])[0]
        return later, tf.strings.to_number(said), sparse, while_loop, None

    call = traced(function)

    def without_sparse(*args):
        found = []
        for ((later, text, sparse, loop, none),) in call(*args):
            assert isinstance(sparse, tf.IndexedSlices) and none is None
            found.append([(later, text, loop)])
        return found

    np.testing.assert_allclose(on_two_replicas(without_sparse), [[9, 10], [1, 2], [12, 12]])
