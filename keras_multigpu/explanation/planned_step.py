"""`PlannedStep`: a step that is split, but never runs."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.training.exchange.stages import summing
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.split_step import SplitStep


class PlannedStep(SplitStep):
    """A step that is split over any number of replicas and never runs, to see what it would cost.

    Args:
        request: The step.
        replicas: How many replicas to plan for.
    """

    def __init__(self, request: StepRequest, replicas: int) -> None:
        self._planned = replicas
        super().__init__(request)

    def _replicas(self) -> int:
        return self._planned

    def _traced(
        self, local: Callable[..., Any], args: Sequence[Any], places: list[int], rounded: Any
    ) -> Any:
        with summing(list), graph_internals.single_device():
            return tf.function(local, autograph=False).get_concrete_function(*args)

    def _say_alone(self, reason: CannotSplit) -> None:
        pass
