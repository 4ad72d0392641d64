"""Train Keras models on several GPUs and get the same numbers as on one."""

from keras_multigpu.replicas import strategy as strategy

__all__ = [
    "strategy",
]
