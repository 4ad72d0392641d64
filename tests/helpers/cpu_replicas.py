"""Strategies over logical CPU devices."""

import contextlib

import pytest

import keras_multigpu as kmg
from keras_multigpu import replicas


def replicas_of(count):
    if count == 1:
        return kmg.strategy("one_device", devices=["CPU:0"])
    return kmg.strategy("mirrored", devices=[f"CPU:{index}" for index in range(count)])


@contextlib.contextmanager
def summed_as_on_gpus():
    """In this context new strategies sum as on GPUs: by TensorFlow's own all-reduce.

    What goes wrong in it may end all such sums of the process: see `in_own_process`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_strategies", {})
        patch.setattr(replicas, "_cross_device_ops", lambda names: None)
        yield


def as_on_gpus(devices):
    """A new strategy on CPU devices, given by numbers or how many, that sums as on GPUs."""
    if isinstance(devices, int):
        devices = range(devices)
    with summed_as_on_gpus():
        return replicas.get_strategy("mirrored", devices=[f"CPU:{index}" for index in devices])


def on_replicas(model, count):
    """The model on `count` CPU devices, without the self-check.

    The self-check has its own tests, and takes a tenth of the time of a small training.
    """
    return kmg.distribute(model, replicas_of(count), self_check=False)
