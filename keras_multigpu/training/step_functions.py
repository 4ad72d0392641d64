"""Compiles steps for the batches that come, and keeps them.

A step is made once for each form of batch (structure, dtypes, shapes) and used by every
later `fit`, `evaluate` and `predict`, so that repeated calls neither trace nor grow.
"""

from collections.abc import Callable
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.training.dataset_feeding import normalized
from keras_multigpu.training.feeding import Batch
from keras_multigpu.training.feeding import Group
from keras_multigpu.training.placement import MadeOutside
from keras_multigpu.training.shares import batch_size_of
from keras_multigpu.training.shares import is_one_row
from keras_multigpu.training.tracing import held_until
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import tensors_of

MakeStep = Callable[[Batch, Batch | None], Callable[[Batch], Any]]
"""Makes a step for batches of these specs; with the first of them, if it is at hand."""


class StepFunctions:
    """The compiled form of one kind of step: training, evaluation or prediction.

    Args:
        make_step: Makes the step.
        eager: Whether steps run without a graph.
        data_wait: Where the seconds add up that a graph of several steps waits for data.
    """

    def __init__(
        self, make_step: MakeStep, eager: bool, data_wait: tf.Variable | None = None
    ) -> None:
        self._make_step = make_step
        self._eager = eager
        self._data_wait = data_wait
        self._single: dict[Hashable, Callable[[Batch], Any]] = {}
        self._looped: dict[Hashable, Any] = {}
        self._forms: dict[Hashable, Batch] = {}

    @property
    def steps(self) -> list[Any]:
        """The steps compiled so far."""
        return list(self._single.values())

    def run(self, group: Group, spec: Batch | None) -> Any:
        """Run a group of batches; what the last step returned."""
        if group.iterator is not None and spec is not None:
            return self._loop(group.iterator, spec)(group.iterator, tf.constant(group.size))
        for batch in group.batches:
            result = self.run_one(batch, spec)
        return result

    def run_one(self, batch: Batch, spec: Batch | None = None) -> Any:
        """Run one batch.

        Args:
            batch: The global batch.
            spec: The specs that all batches of its source share, if they are known.
        """
        spec = self._common_spec(open_spec(batch)) if spec is None else spec
        return self._with_all(spec, lambda: self._step(spec, batch)(batch))

    def make(self, spec: Batch) -> None:
        """Compile the step for batches of these specs before there are any."""
        self._with_all(spec, lambda: self._step(spec))

    def _with_all(self, spec: Batch, call: Callable[[], Any]) -> Any:
        """What `call` returns, after the step for `spec` has got all that it asks for."""
        while True:
            try:
                return call()
            except MadeOutside as needed:
                needed.build()
                # A step without a graph asks when it runs.
                self._single.pop(key_of(spec), None)

    def _common_spec(self, spec: Batch) -> Batch:
        """The specs of all batches of this form so far, open where they differ.

        Sentences of many lengths so need two steps and not one for each length.
        """
        form = keras.tree.map_structure(form_of, spec)
        known = self._forms.setdefault(key_of(form), spec)
        common = keras.tree.map_structure(common_spec, known, spec)
        self._forms[key_of(form)] = common
        return common

    def _step(self, spec: Batch, batch: Batch | None = None) -> Any:
        key = key_of(spec)
        if key not in self._single:
            step = self._make_step(spec, batch)
            self._single[key] = step if self._eager else compiled(step, spec)
        return self._single[key]

    def _loop(self, iterator: tf.data.Iterator, spec: Batch) -> Any:
        key = (key_of(spec), str(iterator.element_spec))
        if key not in self._looped:
            self._looped[key] = looped(
                self._with_all(spec, lambda: self._step(spec)), iterator, self._data_wait
            )
        return self._looped[key]


class CompiledStep:
    """A step as one graph, called with the leaves of a batch.

    Args:
        step: The step.
        spec: The specs of its batch.
    """

    def __init__(self, step: Callable[[Batch], Any], spec: Batch) -> None:
        present = [leaf for leaf in keras.tree.flatten(spec) if leaf is not None]

        def on_leaves(*leaves: Any) -> Any:
            remaining = iter(leaves)
            return step(
                keras.tree.map_structure(
                    lambda leaf: None if leaf is None else next(remaining), spec
                )
            )

        self._graph = tf.function(on_leaves, autograph=False).get_concrete_function(*present)
        self.structured_outputs = self._graph.structured_outputs

    def __call__(self, batch: Batch) -> Any:
        """Run the step on a global batch."""
        return self._graph(*(leaf for leaf in keras.tree.flatten(batch) if leaf is not None))


def compiled(step: Callable[[Batch], Any], spec: Batch) -> CompiledStep:
    """The step as one graph."""
    return CompiledStep(step, spec)


def looped(
    step: CompiledStep, iterator: tf.data.Iterator, data_wait: tf.Variable | None = None
) -> Any:
    """A function of an iterator and a number that runs that many steps in one graph."""

    def run(iterator: tf.data.Iterator, count: tf.Tensor) -> Any:
        nothing = keras.tree.map_structure(
            lambda value: tf.zeros(value.shape, value.dtype), step.structured_outputs
        )

        def body(index: tf.Tensor, _: Any) -> Any:
            return index + 1, step(normalized(next_of(iterator, data_wait)))

        _, logs = tf.while_loop(
            lambda index, _: index < count, body, (0, nothing), parallel_iterations=1
        )
        return logs

    return tf.function(run, autograph=False).get_concrete_function(
        iterator, tf.TensorSpec((), tf.int32)
    )


def next_of(iterator: tf.data.Iterator, data_wait: tf.Variable | None) -> Any:
    """The next batch, inside a graph; how long it took is added to `data_wait`."""
    if data_wait is None:
        return iterator.get_next()
    with tf.device(data_wait.device):
        asked = tf.timestamp()
        with tf.control_dependencies([asked]):
            batch = iterator.get_next()
        with tf.control_dependencies(tensors_of(batch)):
            waited = tf.timestamp() - asked
        data_wait.assign_add(waited)
        # The step must not begin before the time was taken.
        return held_until(waited, batch)


def key_of(spec: Batch) -> Hashable:
    """A structure of specs as a key."""
    leaves = tuple(leaf for leaf in keras.tree.flatten(spec))
    return str(keras.tree.map_structure(lambda _: 0, spec)), leaves


def form_of(spec: tf.TypeSpec | None) -> Hashable:
    """What two leaves of batches must have in common to be taken by one step."""
    if spec is None:
        return None
    rank, is_row = spec.shape.rank, spec.shape[:1] == [1]
    return type(spec).__name__, spec.dtype, rank, is_row, getattr(spec, "ragged_rank", None)


def common_spec(known: tf.TypeSpec | None, other: tf.TypeSpec | None) -> tf.TypeSpec | None:
    """The spec of two leaves of the same form, open where they differ."""
    return None if known is None else known.most_specific_common_supertype([other])


def open_spec(batch: Batch) -> Batch:
    """The specs of a batch with its number of examples left open."""
    one_example = batch_size_of(batch) == 1

    def opened(leaf: Any) -> Any:
        spec = specs_of(leaf)
        if is_one_row(spec) and not one_example:
            return spec
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
        if isinstance(spec, tf.RaggedTensorSpec):
            shape = [None, *spec.shape[1:]]
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        return spec

    return keras.tree.map_structure(opened, batch)
