"""Private names of TensorFlow that several workers need."""

import ctypes
import inspect
import os

import tensorflow as tf

from keras_multigpu.keras_internals import cluster_internals


def test_a_parameter_server_strategy_counts_its_workers():
    """`ParameterServerStrategy` has their number only under a private name."""
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    strategy._num_workers = 3
    assert cluster_internals.workers_of_servers(strategy) == 3
    made = inspect.getsource(inspect.getmodule(tf.distribute.ParameterServerStrategy))
    assert "self._num_workers =" in made


def test_one_worker_can_have_several_cpu_devices():
    """`MultiWorkerMirroredStrategy` gets its devices from this method; its context has these."""
    local_devices = cluster_internals.Extended._initialize_local_devices
    with cluster_internals.cpu_devices(2):
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        devices, kind = cluster_internals.Extended._initialize_local_devices(None, resolver, "")
    assert (kind, list(devices)) == ("CPU", ["/device:CPU:0", "/device:CPU:1"])
    assert cluster_internals.Extended._initialize_local_devices is local_devices
    tf.zeros(())
    assert cluster_internals.has_started()
    for name in (
        "configure_coordination_service",
        "report_error_to_cluster",
        "set_config_key_value",
        "get_config_key_value",
    ):
        assert hasattr(cluster_internals.context.context(), name)


def test_a_worker_can_initialize_variables_by_itself():
    """Its strategy's method broadcasts the chief's values; that of the base class does not."""
    of_chief = cluster_internals.Extended._get_variable_creator_initial_value
    assert "broadcast_recv" in inspect.getsource(of_chief)
    with cluster_internals.begun_by_each():
        own = cluster_internals.Extended._get_variable_creator_initial_value
        assert own(None, replica_id=0, device="", primary_var=None, initial_value=3) == 3
    assert cluster_internals.Extended._get_variable_creator_initial_value is of_chief


def test_the_joining_function_can_be_called_without_the_gil():
    """A context calls it by this name, and the library exports it; see cluster/test_join.py."""
    called = inspect.getsource(cluster_internals.context.Context.ensure_initialized)
    assert "pywrap_tfe.TFE_EnableCollectiveOps(context_handle, server_def_str)" in called
    path = os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2")
    assert callable(cluster_internals.enabling(ctypes.CDLL(path)))
