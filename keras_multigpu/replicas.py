"""Devices -> strategy: which devices share the batch, and how they sum.

    strategy()                      # all workers of the cluster, else all GPUs, else the CPU
    strategy(devices=2)             # two GPUs, or two logical CPU devices without GPUs
    strategy("mirrored", devices=["GPU:0", "GPU:2"])

Equal requests in a process return the same object, so that the models of a notebook, whose cells
may run twice, share their devices. Strategies of other devices sum beside it.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import problem, require_choice, runtime_error, value_error
from keras_multigpu.cluster import apart, environment, joining, managers
from keras_multigpu.devices import (
    device_count,
    device_names,
    require_gpus,
    require_logical_cpus,
    share_a_chip,
)
from keras_multigpu.keras_internals import cluster_internals

KINDS = "auto one_device mirrored multi_worker central_storage parameter_server tpu".split()
# Kinds that take their devices from the cluster.
_CLUSTER_KINDS = ("multi_worker", "parameter_server", "tpu")

_log = logging.getLogger("keras_multigpu")
_strategies: dict[tuple[str, tuple[str, ...]], tf.distribute.Strategy] = {}
_last_asked_for: tf.distribute.Strategy | None = None


def strategy(
    kind: str = "auto", *, devices: Sequence[str] | int | None = None
) -> tf.distribute.Strategy:
    """Return the `tf.distribute` strategy for these devices; equal requests share one object.

    Call it before the first TensorFlow operation. Only then can it split a CPU into logical
    devices, or let GPUs take memory as needed. `keras_multigpu.distribute` uses the last
    strategy returned, unless it is given one.

    Args:
        kind: `"auto"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"central_storage"`,
            `"parameter_server"` or `"tpu"`. `"auto"` reads the cluster environment (`TF_CONFIG`,
            SLURM), then looks for GPUs, and falls back to one CPU device. The logger
            `keras_multigpu` says in one line what it chose and why.
        devices: Names such as `["GPU:0", "GPU:1"]`, or how many: GPUs, or logical CPU devices on a
            machine without a GPU. `None` means all GPUs.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        ValueError: If an argument or a cluster variable of the environment makes no sense.
        RuntimeError: If TensorFlow started before a CPU could be split, another strategy's scope is
            open, or the workers of a cluster do not come together.

    Example:

    ```python
    kmg.strategy(devices=2)
    model = kmg.distribute(model)
    ```
    """
    global _last_asked_for
    _last_asked_for = get_strategy(kind, devices)
    apart.note_use()
    return _last_asked_for


def default_strategy(devices: Sequence[str] | int | None = None) -> tf.distribute.Strategy:
    """The strategy of a model that was given none.

    The first that exists: the one for `devices`, the one whose scope is open, the one for the
    devices of `keras.distribution.set_distribution`, the last one that `strategy` returned, and the
    one of `strategy()`.
    """
    if devices is None and tf.distribute.has_strategy():
        return tf.distribute.get_strategy()
    if devices is None and (distribution := keras.distribution.distribution()) is not None:
        return strategy_of(distribution)
    if devices is None and _last_asked_for is not None:
        return _last_asked_for
    return get_strategy("auto", devices)


def strategy_of(distribution: keras.distribution.DataParallel) -> tf.distribute.Strategy:
    """The strategy for the devices of one of Keras's own distributions."""
    if not isinstance(distribution, keras.distribution.DataParallel):
        raise value_error(
            f"`{type(distribution).__name__}` divides layers over devices.",
            "Expected `keras.distribution.DataParallel`, or a `tf.distribute.Strategy`.",
            'If the weights do not fit one device, pass `shard="weights"`. If a single layer does '
            "not, train with the JAX backend.",
            distribution=distribution,
        )
    devices = [str(name) for name in distribution.device_mesh.devices.flatten()]
    return get_strategy("auto", devices)


def join_cluster() -> None:
    """Join the other workers, if the environment names some and TensorFlow has not started."""
    # Importing the package calls this, because a script for one process makes layers and tensors
    # before it asks for a strategy, and then it is too late.
    if cluster_internals.has_started():
        return
    config = environment.tf_config()
    if config and config.addresses.get("ps") and config.role in ("ps", "worker"):
        joining.serve(config)
    if _choose(None)[0] in ("multi_worker", "parameter_server"):
        get_strategy("auto")


def get_strategy(kind: str, devices: Sequence[str] | int | None = None) -> tf.distribute.Strategy:
    """Like `strategy`, for use inside this package: the result does not become the default."""
    require_choice("kind", kind, KINDS)
    names = None if devices is None else device_names(devices)
    reason = "asked for"
    if kind == "auto":
        if names is not None and any(joined == "multi_worker" for joined, _ in _strategies):
            apart.warn_of_devices(names)
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
        # First of all, because with SLURM this selects the GPUs of this process.
        resolver = joining.cluster_resolver(kind)
        if not any(name.startswith("CPU") for name in names):
            _let_gpu_memory_grow()
        known = _strategies[kind, names] = _build(kind, names, resolver)
        where = ", ".join(names) or "the cluster"
        _log.info("Strategy: %s on %s (%s).", kind, where, reason)
    return known


def _choose(names: tuple[str, ...] | None) -> tuple[str, str]:
    """The kind that "auto" stands for, and why."""
    if names is not None:
        kind = "mirrored" if len(names) > 1 else "one_device"
        return kind, f"`devices` names {len(names)}"
    config = environment.tf_config()
    if config and config.addresses.get("ps"):
        return "parameter_server", "TF_CONFIG names parameter servers"
    found = managers.find_cluster()
    if found and len(found[1].workers) > 1:
        return "multi_worker", f"{found[0].title} {len(found[1].workers)} workers"
    if config is None and found is None:
        apart.warn_if_apart()
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
            return joining.join_workers(resolver)
        case "parameter_server":
            return joining.join_servers(resolver)
        case _:
            return tf.distribute.TPUStrategy(resolver)


def _cross_device_ops(names: tuple[str, ...]) -> tf.distribute.CrossDeviceOps | None:
    """How mirrored replicas sum; None for TensorFlow's own choice, NCCL."""
    # TensorFlow's own choice on CPUs are collectives, as on GPUs. They take a seventh more
    # processor time in the step of a small network, and one that fails ends all others of the
    # process. NCCL refuses two ranks on one GPU.
    if names[0].startswith("CPU") or share_a_chip(names):
        return tf.distribute.ReductionToOneDevice()
    return None


def _let_gpu_memory_grow() -> None:
    """Let GPUs take memory as needed, so that several processes can share one."""
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() == "true":
        return
    for gpu in tf.config.get_visible_devices("GPU"):
        if tf.config.get_logical_device_configuration(gpu):
            continue  # Split by the user into parts of fixed size.
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            # Only a warning, because training works anyway.
            message = problem(
                "TensorFlow started before the strategy, so its GPUs take all their memory.",
                "Expected to set memory growth before TensorFlow's first operation.",
                "If other processes need the GPUs too, restart Python and move "
                "`keras_multigpu.strategy(...)` before the first model, tensor or dataset, or set "
                "TF_FORCE_GPU_ALLOW_GROWTH=true in the environment.",
                gpu=gpu.name,
            )
            _log.warning("%s", message)
            return


def _check_devices(kind: str, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The devices of a strategy of this kind, which must exist; empty for a cluster."""
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
            devices=names,
        )
    if names[0].startswith("CPU"):
        require_logical_cpus(1 + max(int(name[4:]) for name in names))
    else:
        require_gpus(names)
    return names
