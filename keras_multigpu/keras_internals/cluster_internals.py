"""Private parts of TensorFlow for several workers, checked on TensorFlow 2.21.

`MultiWorkerMirroredStrategy` starts a coordination service with a fixed heartbeat, and gives a
worker without GPUs a single device.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended as Extended,
)
from tensorflow.python.eager import context
from tensorflow.python.framework import errors

from keras_multigpu.keras_internals.replacing import replaced


def watch_heartbeats(workers: int, seconds: int) -> None:
    """Count a worker as lost after this many seconds without a heartbeat."""
    # Call it before the strategy is made, which then uses this service.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * seconds,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )


def has_started() -> bool:
    """Whether TensorFlow has started, which makes it too late to join a cluster."""
    return context.context()._context_handle is not None


def cpu_devices(count: int) -> contextlib.AbstractContextManager[None]:
    """Give the strategy that is made in this context several CPU devices if there is no GPU."""
    original = Extended._initialize_local_devices

    def with_more(self: Any, cluster_resolver: Any, worker_device: str) -> Any:
        devices, kind = original(self, cluster_resolver, worker_device)
        if kind == "CPU":
            devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(count))
        return devices, kind

    return replaced(Extended, "_initialize_local_devices", with_more)


def begun_by_each() -> contextlib.AbstractContextManager[None]:
    """Let each worker initialize variables in this context by itself.

    TensorFlow would broadcast the chief's values, one variable after another.
    """
    # The method for a single process.
    alone = Extended.__base__._get_variable_creator_initial_value
    return replaced(Extended, "_get_variable_creator_initial_value", alone)


def threads_run_while_joining(begin: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Let other Python threads run while a strategy made in this context waits for its workers.

    TensorFlow would hold Python's lock meanwhile; a call by `ctypes` releases it. `begin` is called
    just before. If TensorFlow's library has another name nothing changes.
    """
    try:
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))
        enable = enabling(library)
    except (OSError, AttributeError):
        return contextlib.nullcontext()

    def without_lock(handle: Any, server: bytes) -> None:
        begin()
        enable(handle, server)

    return replaced(context.pywrap_tfe, "TFE_EnableCollectiveOps", without_lock)


def enabling(library: Any) -> Callable[[Any, bytes], None]:
    """TensorFlow's C function that joins the workers; an `AttributeError` if there is none."""
    pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    enable = library.TFE_EnableCollectiveOps
    enable.restype, enable.argtypes = None, [pointer, text, ctypes.c_size_t, pointer]
    library.TF_NewStatus.restype = pointer
    for name, kind in (("GetCode", ctypes.c_int), ("Message", text), ("DeleteStatus", None)):
        function = getattr(library, f"TF_{name}")
        function.restype, function.argtypes = kind, [pointer]

    def enabled(handle: Any, server: bytes) -> None:
        status = library.TF_NewStatus()
        try:
            enable(pointer_in(handle, None), server, len(server), status)
            if code := library.TF_GetCode(status):
                message = library.TF_Message(status).decode(errors="replace")
                kind = tf.compat.v1.errors.exception_type_from_error_code(code)
                raise kind(None, None, message)
        finally:
            library.TF_DeleteStatus(status)

    return enabled


def let_sigterm_end() -> None:
    """Let SIGTERM end this process, from any thread, unless Python has a handler for it."""
    # `heed_sigterm` works only after TensorFlow has returned to the main thread.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        set_handler = ctypes.CDLL(None).signal
        set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
        set_handler(signal.SIGTERM, None)


def heed_sigterm() -> None:
    """Restore what SIGTERM did before workers joined: by default it ends the process."""
    # TensorFlow catches the first SIGTERM, and only publishes a preemption that nobody handles.
    # Only Python's main thread may set a handler; in others nothing changes.
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def report_error(message: str) -> None:
    """Let all other workers fail with this message, in their current or next exchange."""
    context.context().report_error_to_cluster(errors.INTERNAL, message)


def publish(key: str, value: str) -> None:
    """Publish a value, once, to all workers that have joined."""
    context.context().set_config_key_value(key, value)


def take_back(key: str) -> None:
    """Publish a value no longer, so that another can be."""
    context.context().delete_config_key_value(key)


def published(key: str, seconds: int) -> str:
    """The value another worker publishes, waiting up to this many seconds."""
    value: str = context.context().get_config_key_value(key, 1000 * seconds)
    return value


def workers_of_servers(strategy: Any) -> int:
    """How many workers a `ParameterServerStrategy` has; it does not expose its resolver."""
    workers: int = strategy._num_workers
    return workers
