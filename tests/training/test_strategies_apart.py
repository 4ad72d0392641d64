"""Strategies and threads of one process that sum as GPUs do, side by side.

Stock TensorFlow ends all sums of the process where two strategies meet, and adds up what belongs to
different threads. So each test runs in a process of its own.
"""

import sys
import threading

import pytest
import tensorflow as tf
from helpers.cpu_replicas import summed_as_on_gpus
from helpers.processes_left import PATIENCE, in_own_process
from verification import verified_models as models

import keras_multigpu as kmg
from keras_multigpu.devices import require_logical_cpus
from keras_multigpu.keras_internals import collective_internals
from keras_multigpu.training.replica_group import ReplicaGroup


def stock(*places):
    """A strategy that a user makes."""
    return tf.distribute.MirroredStrategy([f"CPU:{place}" for place in places])


def summing(group, length, sums=1):
    """A function of a number: on each replica, the sums of `length` times number + id."""

    def summands(number):
        return group.run(
            lambda replica: [tf.fill([length], number + replica.id) for _ in range(sums)]
        )

    return tf.function(
        lambda number: group.exchange.sum(summands(number)),
        input_signature=[tf.TensorSpec([], tf.float32)],
        autograph=False,
    )


def answers(function, number):
    """What all replicas have, as lists."""
    return [[value.numpy().tolist() for value in values] for values in function(float(number))]


def sums_in_turn():
    require_logical_cpus(4)
    before = stock(0, 1)
    context = tf.distribute.get_replica_context

    @tf.function
    def traced_before():
        return before.reduce("sum", before.run(lambda: context().all_reduce("sum", 5.0)), None)

    found = [float(traced_before())]
    rows = [((0, 1), 2), ((0, 1, 2), 2), ((2, 3), 2), ((1, 2), 2), ((1, 0), 2), ((0, 1), 5)]
    functions = [summing(ReplicaGroup(stock(*places)), length) for places, length in rows]
    functions.append(summing(ReplicaGroup(before), 7))
    with summed_as_on_gpus():
        functions += [summing(ReplicaGroup(kmg.strategy(devices=count)), 1) for count in (4, 2)]
    for number in (10, 20):
        found += [answers(function, number) for function in functions]
    found.append(float(traced_before()))
    eager = ReplicaGroup(stock(0, 3))
    parts = eager.run(lambda replica: [tf.ones(2) + replica.id])
    return [*found, [float(whole[1]) for (whole,) in eager.exchange.sum(parts)]]


@pytest.mark.slow
def test_strategies_sum_in_turn():
    """Of another size, other devices, some of the same, and the same with other shapes."""
    shapes = [(2, 2), (3, 2), (2, 2), (2, 2), (2, 2), (2, 5), (2, 7), (4, 1), (2, 1)]

    def expected(number):
        sums = {2: 2 * number + 1, 3: 3 * number + 3, 4: 4 * number + 6}
        return [[[[sums[count]] * length]] * count for count, length in shapes]

    found = in_own_process(sums_in_turn)
    assert found == [20, *expected(10), *expected(20), 20, [3, 3]]


def sums_of_threads():
    """How many of two threads' sums are wrong, if both run steps of a strategy at once."""
    require_logical_cpus(2)
    strategy = stock(0, 1)
    functions = [summing(ReplicaGroup(strategy), 3, sums=20) for _ in range(2)]
    for function in functions:
        function(0.0)
    wrong = []

    def run(place):
        for step in range(100):
            number = 1000 * place + step
            expected = [[[2 * number + 1] * 3] * 20] * 2
            wrong.extend([step] if answers(functions[place], number) != expected else [])

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in (0, 1)]
    # Python changes threads in the midst of whatever it does.
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE / 2)
    return len(wrong), [thread.is_alive() for thread in threads]


@pytest.mark.slow
def test_threads_do_not_mix_up_their_sums():
    """Two models may be trained, or tried, at the same time."""
    assert in_own_process(sums_of_threads) == (0, [False, False])


def numbers_of_calls():
    require_logical_cpus(2)
    group = ReplicaGroup(stock(0, 1))
    fixed = summing(group, 3, sums=2)
    of_any_shape = tf.function(
        lambda value: group.exchange.sum(group.run(lambda replica: [value + replica.id])),
        input_signature=[tf.TensorSpec([None])],
        autograph=False,
    )
    fixed(1.0)
    of_any_shape(tf.ones(3))
    drawn = []
    for call in (lambda: fixed(2.0), lambda: of_any_shape(tf.ones(4))):
        before = next(collective_internals._instances)
        for _ in range(5):
            call()
        drawn.append(next(collective_internals._instances) - before - 1)
    return drawn


@pytest.mark.slow
def test_each_step_takes_the_numbers_of_the_last_one():
    """TensorFlow keeps 1.6 KB for each number; only another shape needs another one."""
    assert in_own_process(numbers_of_calls) == [0, 5]


def verified():
    with summed_as_on_gpus():
        return repr(kmg.verify(models.right, models.data, steps=2))


@pytest.mark.slow
def test_verify_compares_its_default_numbers_of_replicas():
    assert in_own_process(verified) == "<Verification 2: agrees, 4: agrees>"
