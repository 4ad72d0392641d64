"""Names of TensorFlow's collectives that this package relies on, and the groups of devices."""

import inspect
import itertools

import tensorflow as tf

from keras_multigpu.keras_internals import collective_internals
from keras_multigpu.keras_internals.collective_internals import (
    Collectives,
    OfWorkers,
    collectives_of,
    group_of,
)


def test_an_all_reduce_says_what_it_sums_over():
    made = inspect.getsource(collective_internals.CollectiveAllReduce.__init__)
    for line in (
        "self._group_size = group_size",
        "self._devices = tuple(",
        "self._options = options",
        "self._launchers.append(launcher)",
    ):
        assert line in made
    one, two = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], each)
        for each in (None, tf.distribute.ReductionToOneDevice())
    )
    assert isinstance(collectives_of(one), Collectives)
    for strategy in (two, tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.get_strategy()):
        assert collectives_of(strategy) is None


def test_a_call_can_give_a_graph_a_value():
    function = tf.function(lambda: tf.zeros(()), autograph=False).get_concrete_function()
    assert function.graph.building_function
    arguments = inspect.signature(function.graph.capture_call_time_value).parameters
    assert [*arguments][:2] == ["closure", "spec"]


def test_launchers_of_workers_exchange_a_tensor_by_itself():
    """`batch_all_reduce` concatenates its tensors, `all_gather` exchanges their shapes first."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    launchers = strategy.extended._cross_device_ops._launchers
    stock = type(launchers[0])
    assert [*inspect.signature(stock.all_reduce).parameters][1] == "input_tensor"
    assert [*inspect.signature(stock._all_gather).parameters][1:] == ["input_tensor", "options"]
    assert "array_ops.concat(flat_tensors, axis=0)" in inspect.getsource(stock.batch_all_reduce)
    assert "self._all_gather(padded_input_tensor, options)" in inspect.getsource(stock.all_gather)
    exchange, parts = OfWorkers(launchers), [tf.constant([1.0]), tf.constant([2.0])]
    found = tf.function(lambda: (exchange.all_reduce(parts), exchange.all_gather(parts)))()
    assert [[each.numpy().tolist() for each in of_each] for of_each in found] == [
        [[3.0], [3.0]],
        [[1.0, 2.0], [1.0, 2.0]],
    ]


def test_each_set_of_devices_has_a_group_of_its_own():
    """Far from TensorFlow's own, which count from 1; a worker's differ from another's."""
    names = [
        f"/job:worker/replica:0/task:{task}/device:GPU:{index}"
        for task, index in itertools.product(range(2), range(8))
    ]
    sets = [
        devices
        for worker in (names[:8], names[8:])
        for size in range(1, 9)
        for devices in itertools.combinations(worker, size)
    ]
    groups = {group_of(devices) for devices in sets}
    assert len(groups) == len(sets) == 510
    assert min(groups) >= 2**30 and max(groups) < 2**31
    assert group_of(("CPU:1", "CPU:0")) == group_of(("CPU:0", "CPU:1"))
