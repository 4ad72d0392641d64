"""Train Keras models on several GPUs and get the same numbers as on one.

    import keras_multigpu as kmg

    model = kmg.distribute(model)  # all GPUs; batch_size stays the batch of one optimizer step
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=256)

distribute       a model that trains on all replicas as on one device
function         the same for the step of a custom training loop
strategy         which devices; also workers, parameter servers and TPUs
explain, verify  what replicas share in a step, and whether they end as one device does
data             batches from files, arrays, datasets and TFDS, in the same order on any machine
augmentation     layers that draw for each example
callbacks        batch size and learning rate for many replicas, metrics, resuming, speed
train_separately several models at once, each on its own devices
cluster          a function on several workers: of this machine, or Ray's
"""

import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.3.0"

__all__ = [
    "augmentation",
    "callbacks",
    "cluster",
    "data",
    "distribute",
    "DistributedModel",
    "explain",
    "function",
    "memory",
    "strategy",
    "train_separately",
    "verify",
]

if TYPE_CHECKING:
    from keras_multigpu import augmentation as augmentation
    from keras_multigpu import callbacks as callbacks
    from keras_multigpu import cluster as cluster
    from keras_multigpu import data as data
    from keras_multigpu.explanation.explain import explain as explain
    from keras_multigpu.explanation.memory import memory as memory
    from keras_multigpu.replicas import strategy as strategy
    from keras_multigpu.separately.train_separately import train_separately as train_separately
    from keras_multigpu.training.distribute import distribute as distribute
    from keras_multigpu.training.distributed_model import DistributedModel as DistributedModel
    from keras_multigpu.training.function import function as function
    from keras_multigpu.verification.verify import verify as verify
else:
    # The same names, imported when they are first used: `keras-multigpu --help` needs no Keras.
    _HOMES = {
        "distribute": "training.distribute",
        "DistributedModel": "training.distributed_model",
        "explain": "explanation.explain",
        "function": "training.function",
        "memory": "explanation.memory",
        "strategy": "replicas",
        "train_separately": "separately.train_separately",
        "verify": "verification.verify",
    }

    _PARTS = {"augmentation", "callbacks", "cluster", "data"}

    def __getattr__(name):
        from importlib import import_module

        if name not in {*_PARTS, *_HOMES}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # First of all: on another backend whatever is imported fails somewhere.
        import_module(f"{__name__}.keras_internals")
        if name in _PARTS:
            return import_module(f"{__name__}.{name}")
        globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return globals()[name]

    def __dir__():
        return [*__all__, "__version__"]


# The program, or the module of `python -m`: Python calls it "-m" while it imports its package.
_name = sys.orig_argv[-len(sys.argv)] if sys.argv[0] == "-m" else os.path.basename(sys.argv[0])
_is_command = _name.removeprefix("-m").split(".")[0] in (__name__, "keras-multigpu")

# Commands inspect things and join no cluster.
if not _is_command:
    if "KMG_REHEARSE" in os.environ:
        from keras_multigpu.rehearsal.rehearse import rehearse_instead

        rehearse_instead()

    from keras_multigpu.processes.new_process import OF_CLUSTERS as _OF_CLUSTERS

    if any(os.environ.keys() >= {*names} for names in _OF_CLUSTERS):
        from keras_multigpu.replicas import join_cluster

        join_cluster()
        del join_cluster
    del _OF_CLUSTERS

# Models are made before anything of this package is used, and in `keras.RematScope` that fails.
if "keras" in sys.modules and sys.modules["keras"].config.backend() == "tensorflow":
    from keras_multigpu.keras_internals import remat_internals

    del remat_internals

del TYPE_CHECKING, _is_command, _name, os, sys  # No names of this package.
