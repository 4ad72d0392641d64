"""Devices -> strategy: which devices share the batch, and how their values are summed.

    strategy()                      # what the cluster and the machine offer
    strategy(devices=2)             # two GPUs; on a machine without any, two logical CPU devices
    strategy("mirrored", devices=["GPU:0", "GPU:2"])

The same request in one process returns the same object, because two `MirroredStrategy` objects
over the same devices fail in TensorFlow ("Shape mismatch in the collective instance"). So a
notebook cell may run twice, and two models may train one after the other.
"""

import logging
import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import (
    problem,
    require_choice,
    require_positive_integer,
    runtime_error,
    value_error,
)
from keras_multigpu.cluster import apart, environment, lifelines, meeting, slurm
from keras_multigpu.cluster.environment import Cluster, settings
from keras_multigpu.cluster.loopback import keep_to_loopback
from keras_multigpu.keras_internals import cluster_internals

KINDS = "auto one_device mirrored multi_worker central_storage parameter_server tpu".split()
# These take their devices from the cluster, not from `devices`.
_CLUSTER_KINDS = ("multi_worker", "parameter_server", "tpu")

# A step of two workers at 200 Mbit/s takes 607 ms with one thread, 389 with two, and 385 with four.
THREADS = 2
"""On which a worker starts operations, at least."""

_log = logging.getLogger("keras_multigpu")
_strategies: dict[tuple[str, tuple[str, ...]], tf.distribute.Strategy] = {}
_last_asked_for: tf.distribute.Strategy | None = None


def strategy(
    kind: str = "auto", *, devices: Sequence[str] | int | None = None
) -> tf.distribute.Strategy:
    """The `tf.distribute` strategy for these devices: one object for each request.

    Call it before the first TensorFlow operation. Only then can it let the GPUs take memory as
    they need it, or split a CPU into logical devices. The strategy that was asked for last is the
    one that `keras_multigpu.distribute` takes if it is given none.

    Args:
        kind: `"auto"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"central_storage"`,
            `"parameter_server"` or `"tpu"`. `"auto"` reads the cluster environment (`TF_CONFIG`,
            SLURM), then looks for GPUs, and falls back to one CPU device. What it chose, and why,
            is logged in one line by the logger `keras_multigpu`.
        devices: Names such as `["GPU:0", "GPU:1"]`, or how many. A number counts GPUs, and logical
            CPU devices on a machine without a GPU. `None` means all GPUs.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        ValueError: If an argument or a cluster variable of the environment makes no sense.
        RuntimeError: If TensorFlow started too early, another strategy's scope is open, or the
            workers of a cluster do not come together.

    Example:

    ```python
    kmg.strategy(devices=2)
    model = kmg.distribute(model)
    ```
    """
    global _last_asked_for
    _last_asked_for = obtained(kind, devices)
    return _last_asked_for


def default_strategy(devices: Sequence[str] | int | None = None) -> tf.distribute.Strategy:
    """The strategy of a model that was given none.

    It is that for `devices`, if these are given; otherwise that whose scope is open; or which
    `strategy` was asked for last; or what `strategy()` returns.
    """
    if devices is None and tf.distribute.has_strategy():
        return tf.distribute.get_strategy()
    if devices is None and _last_asked_for is not None:
        return _last_asked_for
    # A model that was built first has started TensorFlow: GPUs that already hold all their memory
    # are then worth a warning, not an error, for training works just as well.
    return obtained("auto", devices, late_growth_is_an_error=False)


def join_cluster() -> None:
    """Join the other workers, if the environment names some and TensorFlow has not started."""
    # Called when the package is imported: after the first layer or tensor it would be too late, and
    # a script that was written for one process makes these before it asks for a strategy.
    if cluster_internals.has_started():
        return
    config = environment.tf_config()
    if config and config.addresses.get("ps") and config.role in ("ps", "worker"):
        serve(config)
    if _choose(None)[0] in ("multi_worker", "parameter_server"):
        obtained("auto")


def serve(config: environment.TFConfig) -> None:
    """Do what the coordinator says, until the process is ended: its script is not run."""
    cluster = tf.train.ClusterSpec(config.addresses)
    server = tf.distribute.Server(cluster, config.role, config.index)
    keep_to_loopback(Cluster(config.addresses[config.role], config.index))
    _log.info("Serving as %s %d.", config.role, config.index)
    server.join()


def device_count(device_type: str) -> int:
    """How many logical devices, `"GPU"` or `"CPU"`, TensorFlow has or will have once it starts."""
    return sum(
        # `tf.config.list_logical_devices` would start TensorFlow.
        len(tf.config.get_logical_device_configuration(device) or [device])
        for device in tf.config.get_visible_devices(device_type)
    )


def require_logical_cpus(count: int) -> None:
    """Have at least `count` logical CPU devices; a `RuntimeError` where it is too late to."""
    present = device_count("CPU")
    if present >= count:
        return
    try:
        tf.config.set_logical_device_configuration(
            tf.config.get_visible_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * count,
        )
    except RuntimeError as error:
        raise runtime_error(
            f"{count} logical CPU devices are needed, but TensorFlow started with {present}.",
            "Expected to make them before TensorFlow's first operation.",
            f"Restart Python and move `keras_multigpu.strategy(devices={count})` before the "
            "first model, tensor or dataset; ask for the largest number first.",
            devices=count,
        ) from error


def obtained(
    kind: str, devices: Sequence[str] | int | None = None, *, late_growth_is_an_error: bool = True
) -> tf.distribute.Strategy:
    """As `strategy`, for parts of this package: it does not become the default."""
    require_choice("kind", kind, KINDS)
    names = None if devices is None else device_names(devices)
    reason = "asked for"
    if kind == "auto":
        kind, reason = _choose(names)
    names = _check_devices(kind, names)

    known = _strategies.get((kind, names))
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not known:
        raise runtime_error(
            "A strategy was requested inside another strategy's scope.",
            "Expected no open scope, or the scope of the same strategy.",
            "Call `keras_multigpu.strategy` before the `with ...scope():` block, or use "
            "`tf.distribute.get_strategy()` inside it.",
            kind=kind,
            devices=devices,
        )
    if known is None:
        # With SLURM this chooses the process's GPUs, so it comes before any look at them.
        resolver = _cluster_resolver(kind)
        if not any(name.startswith("CPU") for name in names):
            _let_gpu_memory_grow(late_growth_is_an_error)
        known = _strategies[kind, names] = _build(kind, names, resolver)
        where = ", ".join(names) or "the cluster"
        _log.info("Strategy: %s on %s (%s).", kind, where, reason)
    return known


def _choose(names: tuple[str, ...] | None) -> tuple[str, str]:
    """The kind that "auto" chooses, and why."""
    if names is not None:
        kind = "mirrored" if len(names) > 1 else "one_device"
        return kind, f"`devices` names {len(names)}"
    config = environment.tf_config()
    if config and config.addresses.get("ps"):
        return "parameter_server", "TF_CONFIG names parameter servers"
    cluster = _cluster()
    if cluster and len(cluster.workers) > 1:
        source = "TF_CONFIG names" if config else "SLURM started"
        return "multi_worker", f"{source} {len(cluster.workers)} workers"
    if config is None and cluster is None:
        apart.warn()
    gpus = device_count("GPU")
    if gpus:
        return ("mirrored" if gpus > 1 else "one_device"), f"GPUs found: {gpus}"
    return "one_device", "no GPU found"


def _build(kind: str, names: tuple[str, ...], resolver: Any) -> tf.distribute.Strategy:
    match kind:
        case "one_device":
            return tf.distribute.OneDeviceStrategy(names[0])
        case "mirrored":
            return tf.distribute.MirroredStrategy(names, _cross_device_ops(names))
        case "central_storage":
            return tf.distribute.experimental.CentralStorageStrategy(compute_devices=names)
        case "multi_worker":
            cluster = _cluster()
            assert cluster is not None
            if cluster_internals.has_started():
                error = _joined_too_late(cluster.workers)
                # The others wait for this one.
                meeting.meet(cluster.workers, cluster.index, {}, failure=str(error))
                raise error
            lines = meeting.meet(cluster.workers, cluster.index, alike_on_all())
            with lifelines.joining(cluster.workers, cluster.index, lines):
                workers = _multi_worker(resolver)
            cluster_internals.heed_sigterm()
            keep_to_loopback(cluster)  # Now that it listens.
            return workers
        case "parameter_server":
            if cluster_internals.has_started():
                raise _joined_too_late(resolver.cluster_spec().as_dict())
            config = environment.tf_config()
            assert config is not None
            meeting.wait_for_servers(config)
            return tf.distribute.ParameterServerStrategy(resolver)
        case _:
            return tf.distribute.TPUStrategy(resolver)


def alike_on_all() -> dict[str, str]:
    """What has to be the same on all workers before they join, by what it is called."""
    import keras  # Only here: a strategy alone needs no Keras.

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


def _multi_worker(resolver: Any) -> tf.distribute.Strategy:
    """The strategy of several workers, once all of them are there."""
    wanted, workers = settings(), resolver.cluster_spec().as_dict().get("worker", [])
    if not device_count("GPU"):
        require_logical_cpus(wanted.cpu_devices)
    if not cluster_internals.has_started():
        _let_sums_overlap()
    cluster_internals.watch_heartbeats(len(workers), wanted.heartbeat_timeout)
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=wanted.exchange_timeout
    )
    try:
        with cluster_internals.cpu_devices(wanted.cpu_devices):
            return tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=options
            )
    except RuntimeError as error:
        raise _joined_too_late(workers) from error


def _let_sums_overlap() -> None:
    """Let a worker start operations on two threads, also where it has one core."""
    # A single thread takes what became ready last. A backward pass would so reach the input first,
    # leave all gradients of weights until then, and after them the sums.
    threading = tf.config.threading
    chosen = threading.get_inter_op_parallelism_threads() or "TF_NUM_INTEROP_THREADS" in os.environ
    if sys.platform == "linux" and not chosen and len(os.sched_getaffinity(0)) < THREADS:
        threading.set_inter_op_parallelism_threads(THREADS)


def _joined_too_late(workers: Any) -> RuntimeError:
    return RuntimeError(
        problem(
            "TensorFlow started before this process could join the other workers.",
            "Expected to join them before TensorFlow's first operation.",
            "Move `import keras_multigpu` to the top of the script, before the first model, "
            "tensor or dataset, and set TF_CONFIG before Python starts.",
            workers=workers,
        )
    )


def _cross_device_ops(names: tuple[str, ...]) -> tf.distribute.CrossDeviceOps | None:
    """How mirrored replicas sum; `None` is TensorFlow's own choice, NCCL."""
    if names[0].startswith("CPU"):
        # TensorFlow's own choice on CPUs, collectives, crashes inside XLA and while loops, and is
        # slower.
        return tf.distribute.ReductionToOneDevice()
    if share_a_chip(names):
        # NCCL refuses two ranks on one GPU.
        return tf.distribute.ReductionToOneDevice()
    if sys.platform == "win32":
        # NCCL is not built for Windows.
        return tf.distribute.HierarchicalCopyAllReduce()
    return None


def share_a_chip(names: Sequence[str]) -> bool:
    """Whether two of these GPUs are parts of one physical GPU."""
    chips = [
        chip.name
        for chip in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(chip) or [chip]
    ]
    used = [chips[int(name[4:])] for name in names]
    return len(set(used)) < len(used)


def _let_gpu_memory_grow(late_is_an_error: bool) -> None:
    """Let each GPU take memory as it needs it, so that several processes can share one."""
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() == "true":
        return
    for gpu in tf.config.get_visible_devices("GPU"):
        if tf.config.get_logical_device_configuration(gpu):
            continue  # Split by the user into parts of fixed size.
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError as error:
            message = problem(
                "TensorFlow started before the strategy, so its GPUs take all their memory.",
                "Expected to set memory growth before TensorFlow's first operation.",
                "Restart Python and move `keras_multigpu.strategy(...)` before the first model, "
                "tensor or dataset, or set TF_FORCE_GPU_ALLOW_GROWTH=true in the environment.",
                gpu=gpu.name,
            )
            if late_is_an_error:
                raise RuntimeError(message) from error
            _log.warning("%s", message)
            return


# Devices


def short_name(device: str) -> str:
    """`GPU:0` of `/job:localhost/replica:0/task:0/device:GPU:0`."""
    return device.rpartition("device:")[2].lstrip("/")


def device_names(devices: object) -> tuple[str, ...]:
    """`devices` as distinct names of one type: `("GPU:0", "GPU:1")`."""
    if isinstance(devices, int):
        require_positive_integer("devices", devices)
        device_type = "GPU" if device_count("GPU") else "CPU"
        return tuple(f"{device_type}:{index}" for index in range(devices))
    if not isinstance(devices, list | tuple) or not devices:
        raise _devices_error("`devices` is neither a number nor a list with names in it.", devices)
    names = []
    for device in devices:
        # Also as TensorFlow writes them: "/device:GPU:0", "/job:localhost/.../device:GPU:0".
        match = re.fullmatch(r"(?:.*/)?(?:device:)?(GPU|CPU):(\d+)", str(device), re.IGNORECASE)
        if match is None:
            raise _devices_error(f"There is no device named {device!r}.", devices)
        names.append(f"{match[1].upper()}:{int(match[2])}")
    if len(set(names)) < len(names):
        raise _devices_error("`devices` names a device twice.", devices)
    if len({name[:3] for name in names}) > 1:
        raise _devices_error("`devices` mixes GPUs and CPUs.", devices)
    return tuple(names)


def _devices_error(what: str, devices: object) -> ValueError:
    return value_error(
        what,
        'Expected a number, or distinct names of one type, such as ["GPU:0", "GPU:1"].',
        "Leave `devices` out to use all GPUs.",
        devices=devices,
    )


def _check_devices(kind: str, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The devices of a strategy of this kind: empty for a cluster, otherwise present ones."""
    if kind in _CLUSTER_KINDS:
        if names is None:
            return ()
        raise value_error(
            f"`devices` was given for {kind!r}.",
            "Expected none: every process of a cluster uses all devices it can see.",
            "Leave `devices` out; to hide GPUs from a process set CUDA_VISIBLE_DEVICES.",
            kind=kind,
            devices=names,
        )
    if names is None:
        names = tuple(f"GPU:{index}" for index in range(device_count("GPU"))) or ("CPU:0",)
        return names[:1] if kind == "one_device" else names
    if kind == "one_device" and len(names) > 1:
        raise value_error(
            f"{len(names)} devices were given for one.",
            'Expected a single device for "one_device".',
            'Name one device, or use kind="mirrored".',
            devices=names,
        )
    if names[0].startswith("CPU"):
        require_logical_cpus(1 + max(int(name[4:]) for name in names))
    else:
        require_gpus(names)
    return names


def require_gpus(names: Sequence[str]) -> None:
    if max(int(name[4:]) for name in names) >= device_count("GPU"):
        raise value_error(
            "`devices` asks for more GPUs than there are.",
            f"Expected at most the {device_count('GPU')} GPUs that TensorFlow sees.",
            "Ask for fewer, or check `nvidia-smi` and CUDA_VISIBLE_DEVICES.",
            devices=names,
        )


# Cluster


def _cluster_resolver(kind: str) -> Any:
    """Who is in the cluster, for the kinds that have one; `None` for the others."""
    resolvers = tf.distribute.cluster_resolver
    if kind == "multi_worker":
        cluster = _cluster()
        if cluster:
            if not environment.tf_config():
                os.environ.update(slurm.own_gpus(cluster))
            # As TensorFlow's own for TF_CONFIG, but a chief is the first worker like any other.
            return resolvers.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(cluster.workers)}),
                task_type="worker",
                task_id=cluster.index,
                # Left out, it means none (TensorFlow 2.21).
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
        return _connected_tpu(os.environ.get("TPU_NAME", "local"))
    return None


def _connected_tpu(name: str) -> Any:
    """The resolver of a TPU; what follows has never run where there is one."""
    tpus = tf.distribute.cluster_resolver.TPUClusterResolver
    try:
        cluster = tpus(name).cluster_spec()
        for address in cluster.as_dict()["worker"] if cluster else ():
            # TensorFlow 2.21 waits forever for an address where nothing listens.
            place = environment.place_of(address)
            socket.create_connection(place, settings().heartbeat_timeout).close()
        return tpus.connect(name)
    # Away from Google's machines a name asks for their metadata, and for a client to install.
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        said = str(error).split(". ")[0]
        raise value_error(
            f"'tpu' needs a TPU, and none was found: {said}.",
            "Expected a TPU on this machine, or its name or `grpc://` address in TPU_NAME.",
            'Set it before Python starts, or use kind="auto" for the devices of this machine.',
            TPU_NAME=os.environ.get("TPU_NAME"),
        ) from error


def _cluster_error(kind: str, expected: str) -> ValueError:
    return value_error(
        f"{kind!r} needs a cluster, and none was found.",
        f"Expected {expected}.",
        'Set it before Python starts, or use kind="auto" for the devices of this machine.',
        kind=kind,
        TF_CONFIG=os.environ.get("TF_CONFIG"),
    )


def _cluster() -> Cluster | None:
    """The workers that TF_CONFIG names, or else SLURM."""
    config = environment.tf_config()
    return config.cluster if config else slurm.cluster()
