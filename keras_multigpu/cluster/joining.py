"""Joins this process to its cluster, for strategies of several workers, servers and TPUs."""

import logging
import os
import platform
import socket
import sys
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import problem, value_error
from keras_multigpu.cluster import environment, failures, joint_start, managers, meeting
from keras_multigpu.cluster.environment import Cluster, settings
from keras_multigpu.cluster.this_machine import keep_to_loopback
from keras_multigpu.devices import device_count, require_logical_cpus
from keras_multigpu.keras_internals import cluster_internals

# A step of two workers at 200 Mbit/s takes 607 ms with one thread, 389 with two, and 385 with four.
THREADS = 2
"""How many threads of a worker start operations, at least."""

_log = logging.getLogger("keras_multigpu")


def cluster_resolver(kind: str) -> Any:
    """TensorFlow's resolver of the cluster; None for a kind of strategy without one."""
    resolvers = tf.distribute.cluster_resolver
    if kind == "multi_worker":
        if found := managers.find_cluster():
            manager, cluster = found
            os.environ.update(manager.own_gpus(cluster))
            # Like TensorFlow's own for TF_CONFIG, except that the chief is an ordinary worker.
            return resolvers.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(cluster.workers)}),
                task_type="worker",
                task_id=cluster.index,
                # The default is none (TensorFlow 2.21).
                num_accelerators={"GPU": device_count("GPU")},
                rpc_layer="grpc",
            )
        raise _cluster_error(kind, "TF_CONFIG or SLURM's variables, set by a launcher or `srun`")
    if kind == "parameter_server":
        config = environment.tf_config()
        if config and config.addresses.get("ps"):
            return resolvers.TFConfigClusterResolver()
        raise _cluster_error(kind, 'TF_CONFIG with a "ps" entry in its "cluster"')
    if kind == "tpu":
        return _connect_tpu(os.environ.get("TPU_NAME", "local"))
    return None


def _cluster_error(kind: str, expected: str) -> ValueError:
    return value_error(
        f"{kind!r} needs a cluster, and none was found.",
        f"Expected {expected}.",
        'Set it before Python starts, or use kind="auto" for the devices of this machine.',
        kind=kind,
        TF_CONFIG=os.environ.get("TF_CONFIG"),
    )


def _connect_tpu(name: str) -> Any:
    """The resolver of a TPU; has never run with a real one."""
    tpus = tf.distribute.cluster_resolver.TPUClusterResolver
    try:
        cluster = tpus(name).cluster_spec()
        for address in cluster.as_dict()["worker"] if cluster else ():
            # TensorFlow 2.21 waits forever for an address at which nothing listens.
            place = environment.place_of(address)
            socket.create_connection(place, settings().heartbeat_timeout).close()
        return tpus.connect(name)
    # Outside Google Cloud, TensorFlow fails in many ways to look up a name.
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        said = str(error).split(". ")[0]
        raise value_error(
            f"'tpu' needs a TPU, and none was found: {said}.",
            "Expected a TPU on this machine, or its name or `grpc://` address in TPU_NAME.",
            'Set it before Python starts, or use kind="auto" for the devices of this machine.',
            TPU_NAME=os.environ.get("TPU_NAME"),
        ) from error


def join_workers(resolver: Any) -> tf.distribute.Strategy:
    """The strategy of several workers, once all of them have met."""
    found = managers.find_cluster()
    assert found is not None
    _, cluster = found
    if cluster_internals.has_started():
        error = too_late_error(cluster.workers)
        # The others wait for this one.
        meeting.meet(cluster.workers, cluster.index, {}, failure=str(error))
        raise error
    connections = meeting.meet(cluster.workers, cluster.index, alike_on_all())
    if cluster.index:
        # Each `wandb.init()` begins a run, and the script calls it on all workers.
        os.environ["WANDB_MODE"] = "disabled"
    wanted = settings()
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=wanted.exchange_timeout
    )
    with joint_start.watching(cluster.workers, cluster.index, connections):
        if not device_count("GPU"):
            require_logical_cpus(wanted.cpu_devices)
        _let_sums_overlap()
        cluster_internals.watch_heartbeats(len(cluster.workers), wanted.heartbeat_timeout)
        with cluster_internals.cpu_devices(wanted.cpu_devices):
            try:
                strategy = tf.distribute.MultiWorkerMirroredStrategy(
                    cluster_resolver=resolver, communication_options=options
                )
            except tf.errors.UnknownError as error:
                what = meeting.name_taken_port(cluster.workers, cluster.index, error.message)
                raise RuntimeError(what) from error
    cluster_internals.heed_sigterm()
    failures.report_at_exit(cluster.workers, cluster.index)
    keep_to_loopback(cluster)  # It listens by now.
    return strategy


def join_servers(resolver: Any) -> tf.distribute.Strategy:
    """The coordinator's strategy, once all parameter servers and workers listen."""
    if cluster_internals.has_started():
        raise too_late_error(resolver.cluster_spec().as_dict())
    config = environment.tf_config()
    assert config is not None
    meeting.wait_for_servers(config)
    return tf.distribute.ParameterServerStrategy(resolver)


def alike_on_all() -> dict[str, str]:
    """Values that have to be equal on all workers before they join, by name."""
    import keras  # A strategy alone needs no Keras.

    gpus = device_count("GPU")
    versions = {
        "Python": platform.python_version().rpartition(".")[0],
        "Keras": keras.__version__,
        "TensorFlow": tf.__version__,
        "keras_multigpu": sys.modules["keras_multigpu"].__version__,
    }
    return {
        "the number of devices": f"{gpus} GPUs" if gpus else f"{settings().cpu_devices} CPUs",
        "the versions of packages": ", ".join(map(" ".join, versions.items())),
    }


def _let_sums_overlap() -> None:
    """Let a worker start operations on two threads, even on one core."""
    # A single thread runs what became ready last. So the backward pass would run down to the input
    # first, then compute all gradients of weights, and sum them last.
    threading = tf.config.threading
    chosen = threading.get_inter_op_parallelism_threads() or "TF_NUM_INTEROP_THREADS" in os.environ
    if not chosen and len(os.sched_getaffinity(0)) < THREADS:
        threading.set_inter_op_parallelism_threads(THREADS)


def too_late_error(workers: Any) -> RuntimeError:
    return RuntimeError(
        problem(
            "TensorFlow started before this process could join the other workers.",
            "Expected to join them before TensorFlow's first operation.",
            "Move `import keras_multigpu` to the top of the script, before the first model, "
            "tensor or dataset, and set TF_CONFIG before Python starts.",
            workers=workers,
        )
    )


def serve(config: environment.TFConfig) -> None:
    """Be a server or worker of a coordinator until the process is ended; its script never runs."""
    cluster = tf.train.ClusterSpec(config.addresses)
    server = tf.distribute.Server(cluster, config.role, config.index)
    keep_to_loopback(Cluster(config.addresses[config.role], config.index))
    _log.info("Serving as %s %d.", config.role, config.index)
    server.join()
