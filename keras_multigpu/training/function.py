"""`function`: runs a step of a custom training loop, written for one device, on all replicas."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import type_error, value_error
from keras_multigpu.replicas import default_strategy
from keras_multigpu.training.call_arguments import CallArguments
from keras_multigpu.training.replication import (
    Replication,
    known_replication,
    require_strategy_or_devices,
)
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.runners.whole_step import WholeStep
from keras_multigpu.training.shares import Batch, specs_of
from keras_multigpu.training.steps.one_device import trace_for_one_device, traces_one_device
from keras_multigpu.training.steps.passes import make_runner
from keras_multigpu.training.steps.request import Options
from keras_multigpu.training.steps.steps_of_model import StepFunctions, common_spec
from keras_multigpu.training.used_objects import used_by
from keras_multigpu.training.variables.placement import device_of_first_copies
from keras_multigpu.training.workers import together

# This many forms of a batch get graphs of their own, which know its size, as the user's code may;
# the next one gets a graph for all lengths.
EXACT_FORMS = 2


def function(
    step: Callable[..., Any] | None = None,
    *,
    strategy: tf.distribute.Strategy | None = None,
    devices: Sequence[str] | int | None = None,
    jit_compile: bool = False,
    self_check: bool = True,
) -> Any:
    """Run the step of a custom training loop on all replicas, as `tf.function` does on one.

    Write the step for one device and the whole batch: no `strategy.run`, no `strategy.reduce`, no
    distributed dataset, no division by a global batch size. It is traced once, and its graph is
    split over the replicas. What it computes, returns and assigns is what one device gives.

    The step may close over models, layers, optimizers and metrics. They are put on the devices,
    whether `keras_multigpu.distribute` has seen them or not.

    Args:
        step: A function of tensors, arrays, or lists, tuples and dictionaries of these. Arguments
            whose first axis has the most common length are split; others go to all replicas whole.
            As with `tf.function`, Python numbers and strings are constants, and each new one is
            traced separately.
        strategy: A strategy. By default that of the distributed models that the step uses, else the
            last one that `keras_multigpu.strategy` returned, else what that chooses by itself.
        devices: Instead of a strategy: device names, or how many, as for `keras_multigpu.strategy`.
        jit_compile: Whether XLA compiles the step: each stage between two sums, for each replica
            and each size of its share.
        self_check: Whether to try each graph of the step on a few examples of its first batch,
            split and unsplit. If the results differ, one replica computes the whole batch.

    Returns:
        A function with the same arguments and results.

    Example:

    ```python
    @kmg.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for images, labels in dataset:
        loss = train_step(images, labels)
    ```
    """
    require_strategy_or_devices(strategy, devices)
    if step is None:
        return functools.partial(
            function,
            strategy=strategy,
            devices=devices,
            jit_compile=jit_compile,
            self_check=self_check,
        )
    if not callable(step):
        raise type_error(
            "`step` is not a function.",
            "Expected the step of a training loop.",
            "Write `@kmg.function` above it, or `@kmg.function(devices=2)`.",
            step=step,
        )
    if devices is not None:
        # Now, while logical devices can still be made.
        strategy = default_strategy(devices)
    return SharedFunction(step, strategy, jit_compile, self_check)


class SharedFunction:
    """A function that runs on all replicas."""

    def __init__(
        self,
        step: Callable[..., Any],
        strategy: tf.distribute.Strategy | None,
        jit_compile: bool,
        self_check: bool,
    ) -> None:
        # A `tf.function` would keep using variables that have moved since.
        self._step: Callable[..., Any] = getattr(step, "python_function", step)
        functools.update_wrapper(self, self._step)
        self._given = strategy, jit_compile, self_check
        self._replication: Replication | None = None
        self._known: list[tuple[keras.Layer, Replication | None]] = []
        self._functions: dict[Any, StepFunctions] = {}
        self._specs: dict[Any, list[Batch]] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> "SharedFunction":
        if instance is None:
            return self
        name = f"_keras_multigpu_{self._step.__name__}"
        if name not in vars(instance):
            method = types.MethodType(self._step, instance)
            vars(instance)[name] = SharedFunction(method, *self._given)
        method_of_all: SharedFunction = vars(instance)[name]
        return method_of_all

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch; its results, as one device gives them."""
        if traces_one_device() or not tf.executing_eagerly():
            # Inside another distributed function.
            return self._step(*args, **kwargs)
        arguments = CallArguments(args, kwargs)
        batch: Batch = (arguments.leaves, None, None)
        eager = tf.config.functions_run_eagerly()
        replication = self._replicated()
        key = arguments.key, eager
        if key not in self._functions:
            make = functools.partial(self._make, replication, arguments, eager)
            self._functions[key] = StepFunctions(make, replication.cutter, eager)
        with together(replication.group):
            spec = self._spec_of(key, specs_of(batch))
            return self._functions[key](
                replication.cutter(batch)._replace(spec=spec, is_usual=True)
            )

    def _replicated(self) -> Replication:
        """The replicas: those of the distributed models that the step uses, by default."""
        has_moved = any(known_replication(layer) is not known for layer, known in self._known)
        if self._replication is None or has_moved:
            strategy, _, self_check = self._given
            self._functions, self._specs = {}, {}
            self._known = [(each, known_replication(each)) for each in used_by(self._step).layers]
            models = {id(known.strategy): (layer, known) for layer, known in self._known if known}
            if strategy is None and len(models) > 1:
                raise value_error(
                    "The step uses models that are distributed over different devices.",
                    "Expected one strategy for all of them.",
                    "Pass the same `kmg.strategy(...)` to `kmg.distribute` for each.",
                    models=[model.name for model, _ in models.values()],
                )
            of_models = [known for _, known in models.values()]
            strategy = strategy or (of_models[0].strategy if models else default_strategy())
            self._replication = Replication(strategy, Options(self_check=self_check))
            for each in (self._replication, *of_models):
                if each.elsewhere is not None:
                    raise value_error(
                        f"A custom training step cannot run on {each.elsewhere.name}.",
                        "Expected replicas that exchange sums.",
                        "Distribute its models over `devices=2`, or a `kmg.strategy` of GPUs.",
                        step=self._step.__name__,
                    )
        return self._replication

    def _spec_of(self, key: Any, spec: Batch) -> Batch:
        """The specs to make a step for: the batch's own, or open ones after several forms."""
        known = self._specs.setdefault(key, [])
        if spec not in known:
            if len(known) >= EXACT_FORMS:
                # One graph for all lengths of text, and not one for each.
                spec = keras.tree.map_structure(common_spec, known[-1], spec)
            known[EXACT_FORMS:] = [spec]
        return known[known.index(spec)]

    def _make(
        self, replication: Replication, arguments: CallArguments, eager: bool, spec: Batch
    ) -> Runner:
        def on_batch(data: Any) -> Any:
            args, kwargs = arguments.with_leaves(data[0] if isinstance(data, tuple) else data)
            if eager:
                return self._step(*args, **kwargs)
            # A new function for each trace, so that it has captured no variables before.
            return tf.function(self._step)(*args, **kwargs)

        on_batch.__name__ = getattr(self._step, "__name__", "the step")
        strategy, jit_compile = replication.strategy, self._given[1]
        used = used_by(self._step, jit_compile)
        if not used.are_built and not eager:
            # A `tf.function` in it is not traced again and keeps its variables, so these have to be
            # the copies of the first replica.
            used.place(strategy)
            with tf.device(device_of_first_copies(strategy)):
                trace_for_one_device(used, on_batch, spec)
            used = used_by(self._step, jit_compile)
        used.place(strategy)
        request = replication.request(used, on_batch, "function")
        return (WholeStep if eager else make_runner)(request._replace(spec=spec))
