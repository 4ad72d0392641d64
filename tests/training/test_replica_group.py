"""The replicas and what they exchange: answers by hand for one to three replicas."""

from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.replica_group import ReplicaGroup


def group_of(count):
    if count == 1:
        return ReplicaGroup(kmg.strategy("one_device", devices=["CPU:0"]))
    return ReplicaGroup(kmg.strategy("mirrored", devices=count))


@pytest.fixture(params=[1, 2, 3])
def group(request):
    return group_of(request.param)


def graph_or_not(in_graph):
    return tf.function(autograph=False) if in_graph else lambda function: function


def test_a_variable_may_have_one_copy_for_all(group):
    copies = group.copies([keras.Variable(5.0, trainable=False)])
    assert len(copies[0]) == 1

    def on_replica(replica):
        (value,) = group.read(copies, replica)
        return float(value)

    assert group.run(on_replica) == [5.0] * group.count
    for replica in group.replicas:
        group.assign(copies, [tf.constant(7.0 + replica.id)], replica)
    assert float(copies[0][0]) == 7.0


@pytest.mark.parametrize("in_graph", [False, True])
def test_replicas_sum_and_gather(group, in_graph):
    """Each gets 1 + 2 + 3, and the rows in the order of replicas, of which one has none."""

    @graph_or_not(in_graph)
    def step():
        def summands(replica):
            number, whole = replica.id + 1.0, replica.id + 1
            floats = [tf.constant(number), tf.constant([number, 0.0])]
            return [*floats, tf.constant([whole]), tf.constant(whole)]

        def rows(replica):
            return [tf.fill([replica.id, 2], replica.id), tf.constant([replica.id])]

        sums = group.exchange.sum(group.run(summands))
        return list(zip(sums, group.exchange.gather(group.run(rows)), strict=True))

    total = [1.0, 3.0, 6.0][group.count - 1]
    rows = [[1, 1], [2, 2], [2, 2]][: [0, 1, 3][group.count - 1]]
    for sums, gathered in step():
        assert float(sums[0]) == total
        assert sums[1].numpy().tolist() == [total, 0.0]
        # TensorFlow itself refuses to sum two tensors of int32 in one call.
        assert [each.numpy().tolist() for each in sums[2:]] == [[total], total]
        assert gathered[0].numpy().tolist() == rows
        assert gathered[1].numpy().tolist() == [0, 1, 2][: group.count]


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_interrupted_change_is_noticed(in_graph):
    """As when another worker dies. A failure before the change leaves values whole."""
    group, first, second = group_of(2), tf.Variable(0.0), tf.Variable(0.0)
    group.is_spread = True

    @graph_or_not(in_graph)
    def step(fails_before, fails):
        with tf.control_dependencies([tf.debugging.assert_less(fails_before, 1)]):
            with group.change():
                first.assign_add(1.0)
                with tf.control_dependencies([tf.debugging.assert_less(fails, 1)]):
                    second.assign_add(1.0)

    for arguments, expected in [((0, 0), (1, 1)), ((1, 0), (1, 1)), ((0, 1), (2, 1))]:
        failing = pytest.raises(tf.errors.InvalidArgumentError) if any(arguments) else nullcontext()
        with failing:
            step(*map(tf.constant, arguments))
        assert group.changes == expected
    assert float(second) == 1.0
