"""`TracedStep`: a step traced as one device runs it, and the variables that it uses."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.partition.layouts import Layout
from keras_multigpu.training.replica_group import Copies, copies_in, copies_of
from keras_multigpu.training.steps.one_device import known_variables, trace_for_one_device
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.same_on_workers import require_same_graph
from keras_multigpu.training.variables.placement import left_by
from keras_multigpu.training.variables.storage import for_one_device, layout_of
from keras_multigpu.training.watching.watched import Watched


class TracedStep:
    """A step traced for one device. Its variables are numbered in the order of its inputs.

    Args:
        request: The step.

    Attributes:
        watched: What probes see of it.
        whole: The step's graph, as a function.
        handles: The variables as `whole` takes them.
        variables: The variables that `whole` reads and assigns.
        copies: Their copies on the replicas; those in parts count as one. A variable that was moved
            after the step was traced is here as it is now, and in `variables` as it was.
        layouts: The layouts in which replicas have them.
    """

    def __init__(self, request: StepRequest) -> None:
        self.request, self.spec = request, request.spec
        self.watched = Watched(request.model, request.group, request.probes)
        placement = request.placement
        with self.watched.recording(), placement.creating_slots():
            self.whole = trace_for_one_device(request.model, request.function, request.spec)
        require_same_graph(request.group, self.whole.graph)
        others = {id(variable.handle): variable for variable in self.whole.graph.variables}
        known = known_variables(request.model)
        storages = variable_internals.storages_of(known)
        handles = [for_one_device(storage).handle for storage in storages]
        # A custom step may have built its optimizers while it was traced.
        placement.place(request.model)
        storages = variable_internals.storages_of(known)
        tracked = {id(h): copies_in(s) for h, s in zip(handles, storages, strict=True)}
        # A user's function that was traced before has captured the copies of that time.
        left = {number: left_by(copy) for number, copy in others.items()}
        tracked |= {number: copies_of(v) for number, v in left.items() if v is not None}
        captured = self.whole.captured_inputs
        self.handles = [h for h in captured if id(h) in tracked or id(h) in others]
        self.variables = [
            others[id(h)] if id(h) in others else for_one_device(tracked[id(h)][0])
            for h in self.handles
        ]
        placement.take([others[id(h)] for h in self.handles if id(h) not in tracked])
        self.copies: list[Copies] = [
            tracked[id(h)] if id(h) in tracked else (others[id(h)],) for h in self.handles
        ]
        self.layouts: list[Layout] = [layout_of(copies[0]) for copies in self.copies]
        self._numbers = {id(copies[0]): number for number, copies in enumerate(self.copies)}

    @property
    def statistics(self) -> list[int]:
        """The numbers of the variables that hold layers' state, such as moving averages."""
        state = [
            self.number_of(variable)
            for variable in self.request.model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        ]
        return [number for number in state if number is not None]

    def number_of(self, variable: keras.Variable | tf.Variable) -> int | None:
        """The number of a variable; None if the step does not use it."""
        return self._numbers.get(id(copies_of(variable)[0]))

    def with_structure(self, outputs: Sequence[Any]) -> Any:
        """Outputs in the structure that the step returns."""
        flat = iter(outputs)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            self.whole.structured_outputs,
            expand_composites=True,
        )
