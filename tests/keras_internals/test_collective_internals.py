"""Private names of TensorFlow's all-reduce, and how sums get their numbers."""

import inspect
import itertools

import tensorflow as tf

from keras_multigpu.keras_internals import collective_internals
from keras_multigpu.keras_internals.collective_internals import Launcher, Numbers, group_of


def test_the_names_that_launchers_replace_exist():
    """An all-reduce has a launcher for each device, and a lock for what all of them make."""
    all_reduce, launcher = collective_internals.CollectiveAllReduce, Launcher.__base__
    made = inspect.getsource(all_reduce.__init__)
    for line in (
        "self._group_size = group_size",
        "self._lock = threading.Lock()",
        "self._launchers.append(launcher)",
    ):
        assert line in made
    assert [*inspect.signature(launcher).parameters] == [
        "group_key",
        "group_size",
        "collective_keys",
        "device",
        "options",
    ]
    for method in (launcher.all_reduce, launcher._all_gather):
        assert "instance_key = self._next_instance_key()" in inspect.getsource(method)
    found = inspect.getsource(launcher._next_instance_key)
    for name in ("is_control_flow_graph", "building_function", "capture_call_time_value"):
        assert name in found
    function = tf.function(lambda: tf.zeros(()), autograph=False).get_concrete_function()
    assert "key" in inspect.signature(function.graph.capture_call_time_value).parameters


def test_a_stock_strategy_gets_its_launchers_once():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    collective_internals.keep_apart(strategy)
    launchers = strategy.extended._collective_ops._launchers
    assert [type(launcher) for launcher in launchers] == [Launcher] * 2
    collective_internals.keep_apart(strategy)
    assert strategy.extended._collective_ops._launchers is launchers
    for has_none in (tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.get_strategy()):
        collective_internals.keep_apart(has_none)


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


def test_replicas_draw_the_same_numbers_in_each_graph():
    """Whatever is drawn in between, and in graphs that are never finished."""
    numbers, (one, other) = Numbers(2), (tf.Graph(), tf.Graph())
    first = [numbers.draw(0, one), numbers.draw(0, one)]
    assert len({*first, numbers.draw(0, other), numbers.draw(0)}) == 4
    assert [numbers.draw(1, one), numbers.draw(1, one)] == first
    assert numbers.draw(1, one) == numbers.draw(0, one) not in first
    assert Numbers(2).draw(0, one) not in first


def test_a_tensor_can_be_summed_and_gathered_by_itself():
    """`batch_all_reduce` concatenates its tensors, `all_gather` exchanges their shapes first."""
    exchanges = collective_internals.CollectiveAllReduce
    assert "self._launchers.append(launcher)" in inspect.getsource(exchanges.__init__)
    stock = collective_internals.CollectiveReplicaLauncher
    assert [*inspect.signature(stock.all_reduce).parameters][1] == "input_tensor"
    assert [*inspect.signature(stock._all_gather).parameters][1:] == ["input_tensor", "options"]
    assert "array_ops.concat(flat_tensors, axis=0)" in inspect.getsource(stock.batch_all_reduce)
    assert "self._all_gather(padded_input_tensor, options)" in inspect.getsource(stock.all_gather)
    one, two = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], each)
        for each in (None, tf.distribute.ReductionToOneDevice())
    )
    assert len(collective_internals.launchers_of(one)) == 2
    assert collective_internals.launchers_of(two) is None
