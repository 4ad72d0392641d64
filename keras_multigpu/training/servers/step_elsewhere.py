"""Which step of training who computes elsewhere runs, and what they refuse."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.training.servers.asynchronous_step import AsynchronousTrainStep
from keras_multigpu.training.servers.parameter_servers import Servers
from keras_multigpu.training.servers.served_step import ServedTrainStep
from keras_multigpu.training.servers.tpus import TPUs, TPUTrainStep
from keras_multigpu.training.shares import Batch, present
from keras_multigpu.training.steps.setting import Setting
from keras_multigpu.training.steps.split_train_step import EagerTrainStep

logger = logging.getLogger("keras_multigpu")

PROBES = "a callback that looks into steps"


def step_elsewhere(
    elsewhere: Servers | TPUs,
    model: keras.Model,
    setting: Setting,
    spec: Batch,
    function: Callable[[Any], Any],
) -> Any:
    """A step of training; a `ValueError` where they cannot run it.

    Args:
        elsewhere: Who runs it.
        model: The model, whose variables are on the host.
        setting: Its only replica, which is there, too.
        spec: The specs of a global batch.
        function: The model's step.
    """
    if model.run_eagerly:
        # Only here is the Python that it asks for.
        logger.info("`run_eagerly=True`: this process trains alone, without %s.", elsewhere.name)
        elsewhere.settle()
        return EagerTrainStep(model, setting, spec, function)
    if isinstance(elsewhere, Servers):
        if not elsewhere.asynchronous:
            return ServedTrainStep(model, setting, spec, function, elsewhere)
        if setting.probes:
            raise elsewhere.refusal(PROBES, "Leave `asynchronous` out")
        return AsynchronousTrainStep(model, setting, spec, function, elsewhere)
    if setting.probes:
        raise elsewhere.refusal(PROBES, "Leave out the callback")
    if setting.pieces > 1:
        raise elsewhere.refusal("`micro_batches`", "Leave it out, and take smaller batches")
    leaves = present(spec)
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string for leaf in leaves):
        raise elsewhere.refusal(
            "inputs that are not dense numbers", "Make them dense numbers in the dataset"
        )
    return TPUTrainStep(model, setting, spec, function, elsewhere)
