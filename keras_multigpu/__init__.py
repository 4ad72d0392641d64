"""Train Keras models on several GPUs and get the same numbers as on one."""

from keras_multigpu.replicas import strategy as strategy
from keras_multigpu.training.distribute import distribute as distribute
from keras_multigpu.training.distributed_model import DistributedModel as DistributedModel

__all__ = [
    "DistributedModel",
    "distribute",
    "strategy",
]
