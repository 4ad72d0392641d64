"""Traces a pure function once, so that every replica can call it on its device."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.keras_internals import step_hooks
from keras_multigpu.training.exchange.stages import Stages, present_sum, summing


def traced(function: Callable[..., Any], specs: Sequence[Any], jit_compile: bool) -> Any:
    """A graph of `function` for arguments of the given specs, cut where replicas sum.

    TensorFlow optimizes it once, and not for each replica, unless XLA compiles it.

    It is traced outside any strategy, as for one device; called inside a replica it runs
    on that replica's device. TensorFlow itself would trace it anew for each replica.
    """
    cuts: list[tf.Operation] = []

    def cut(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        cuts.extend(tensor.op for tensor in tensors)
        return tensors

    def trace(part: Callable[..., Any], part_specs: Sequence[Any]) -> Any:
        def reading(*args: Any) -> Any:
            with step_hooks.variables_read_outside():
                return part(*args)

        with keras_internals.single_device():
            return tf.function(
                reading if jit_compile else part, jit_compile=jit_compile, autograph=False
            ).get_concrete_function(*part_specs)

    with summing(cut):
        whole = trace(function, specs)
    if jit_compile:
        return Stages(whole, cuts, trace) if cuts else whole
    return Stages(whole, cuts, None)


class TracedPass:
    """A pass as one graph, and what is known of its outcomes since it was traced.

    Args:
        function: The pass: what it returns besides tensors comes as a second result.
        specs: The specs of its arguments.
        jit_compile: Whether XLA compiles it.
    """

    def __init__(
        self, function: Callable[..., Any], specs: Sequence[Any], jit_compile: bool
    ) -> None:
        layouts: list[Any] = []

        def outcome(*args: Any) -> Any:
            tensors, layout = function(*args)
            layouts.append(layout)
            return tensors

        self._function = traced(outcome, specs, jit_compile)
        self.graph = self._function.graph
        self.layout = layouts[-1]

    def __call__(self, *args: Any) -> tuple[Any, Any]:
        """The outcome for one replica's arguments, and the layout of all outcomes."""
        return self._function(*args), self.layout


def called_directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without a graph, for `run_eagerly`."""

    def call(*args: Any) -> Any:
        context, sum_all = tf.distribute.get_replica_context(), present_sum()

        def summed(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            # Inside of `single_device` no replica runs, and only replicas sum.
            with context:
                return sum_all(tensors) if sum_all else tensors

        with summing(summed), keras_internals.single_device():
            return function(*args)

    return call


def specs_of(tensors: Any) -> Any:
    """The specs of a structure of tensors or variables; None stays None."""
    return keras.tree.map_structure(spec_of, tensors)


def spec_of(value: Any) -> Any:
    if value is None or isinstance(value, tf.TypeSpec):
        return value
    if isinstance(value, keras.Variable):
        return tf.TensorSpec(value.shape, value.dtype)
    return tf.type_spec_from_value(value)


def with_length(spec: Any, length: int | None) -> Any:
    """The same spec with another length of its first axis."""
    shape = [length, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def without_batch_size(specs: Any) -> Any:
    """Specs whose first axis is open: those of a global batch, from those of a share."""
    return keras.tree.map_structure(
        lambda spec: with_length(spec, None) if spec is not None and spec.shape.rank else spec,
        specs,
    )


def symbolic(specs: Any) -> Any:
    """Specs as what `keras_internals.symbolic_call` takes."""

    def stand_in(spec: Any) -> Any:
        if spec is None or isinstance(spec, tf.RaggedTensorSpec):
            return spec
        sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=sparse)

    return keras.tree.map_structure(stand_in, specs)


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """The tensors in a nested structure, those inside of sparse and ragged ones too."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def held_until(time: tf.Tensor, structure: Any) -> Any:
    """The same structure, whose tensors are there only once a time was taken."""
    with tf.control_dependencies([time]):
        return tf.nest.map_structure(
            lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf,
            structure,
            expand_composites=True,
        )
