"""Models made by the user's function, on one device or on N replicas, with equal weights.

Dropout, noise and augmentation give every replica its own draws (a guarantee of this package), so
a model with such layers cannot be compared as it is. In inference mode they let their inputs pass,
on one device and on N alike, and everything else stays comparable.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals, variable_internals
from keras_multigpu.replicas import obtained
from keras_multigpu.training.distribute import distribute, refuse_other_keras
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.shares import Batch, specs_of, symbolic
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.verification.batches import as_dataset


class Value(NamedTuple):
    """What one variable holds.

    Args:
        group: What it is measured with: the weights of one layer, or the optimizer's variables
            of one kind.
        place: Which variable it is, also in another participant: 0 for the model or the
            number of the optimizer, and the position there.
    """

    name: str
    group: str
    place: tuple[int, int]
    copies: list[np.ndarray]


class Participant:
    """A model that trains step by step, on a device or on replicas, which know theirs."""

    def __init__(
        self, model: keras.Model, device: str | None, replicas: tf.distribute.Strategy | None = None
    ) -> None:
        self.model = model
        self._device = device
        self._replicas = replicas

    def train(self, batch: Batch) -> float | None:
        """Train on one global batch; the logged loss, None where none is logged."""
        with on(self._device):
            # Not `train_on_batch`: it hands a `train_step` other data than `fit` does.
            history = self.model.fit(as_dataset(batch), shuffle=False, verbose=0).history
        return float(history["loss"][-1]) if np.ndim(history.get("loss")) == 1 else None

    def values(self) -> list[Value]:
        """The values of all weights and of the optimizers' variables, in the model's order."""
        prefix = f"{self.model.name}/"
        values = []
        for position, weight in enumerate(self.model.weights):
            name, place = weight.path.removeprefix(prefix), (0, position)
            values.append(Value(name, name.rpartition("/")[0], place, self._copies(weight)))
        for number, optimizer in enumerate(optimizers_of(self.model), start=1):
            for position, variable in enumerate(optimizer.variables):
                # Keras names it after its weight, and in the end what it is: `..._velocity`.
                name, place = f"optimizer {variable.path}", (number, position)
                values.append(Value(name, name.rpartition("_")[2], place, self._copies(variable)))
        return values

    def _copies(self, variable: keras.Variable) -> list[np.ndarray]:
        if self._replicas is None:
            return [value_of(variable)]
        return [part.numpy() for part in copies_of(variable)]


class Recipe:
    """Makes participants that start from the same weights; `batch` tells a model its shapes."""

    def __init__(self, build_model: Callable[[], keras.Model], batch: Batch, device: str) -> None:
        self._build_model = build_model
        self._batch = batch
        self.device = device
        self._initial_weights: list[np.ndarray] | None = None
        self._names: list[str] = []
        self.switched_off: list[str] = []
        self.precision = "float32"

    def model(self) -> keras.Model:
        with on(self.device):
            model = self._build_model()
            require_compiled_model(model, self._build_model)
            build(model, self._batch)
            random = switch_off(model)
            if self._initial_weights is None:
                self._initial_weights = weights_of(model)
                self._names = [operation.name for operation in operations_of(model)]
                self.switched_off = random
                self.precision = precision_of(model)
            model.set_weights(self._initial_weights)
        return model

    def name_of(self, model: keras.Model, operation: keras.Operation) -> str:
        """What an operation was called in the first model: Keras counts names up."""
        position = [id(other) for other in operations_of(model)].index(id(operation))
        return self._names[position]

    def on_one_device(self) -> Participant:
        """A model on one device: Keras's own, or where it cannot be, ours on one replica."""
        model = self.model()
        if isinstance(model, DistributedModel):
            model = distribute(model, obtained("one_device", devices=[self.device]))
        return Participant(model, self.device)

    def on_replicas(self, replicas: tf.distribute.Strategy) -> Participant:
        return Participant(distribute(self.model(), replicas), None, replicas)


def value_of(variable: keras.Variable) -> np.ndarray:
    # Keras's own ways make NumPy 2 warn about `__array__`.
    return tf.convert_to_tensor(variable).numpy()


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [value_of(weight) for weight in model.weights]


def operations_of(model: keras.Model) -> list[keras.Operation]:
    """A model's layers, however deep, and its operations that are not layers, each once."""
    layers = model_internals.layers_of(model)
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    # Functional models alone have operations.
    found = layers + [part for m in models for part in getattr(m, "operations", ())]
    return list({id(operation): operation for operation in found}.values())


def precision_of(model: keras.Model) -> str:
    """The coarsest type that a layer of the model computes in."""
    types = {layer.compute_dtype for layer in model_internals.layers_of(model)}
    return next((name for name in ("bfloat16", "float16") if name in types), "float32")


def on(device: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else tf.device(device)


def build(model: keras.Model, batch: Batch) -> None:
    """Build a model that was made without shapes; one without a `call` is built already."""
    if all(layer.built for layer in model_internals.layers_of(model)):
        return
    try:
        model_internals.symbolic_call(model, symbolic(specs_of(batch[0])))
    except NotImplementedError:
        # A GAN, for example: only its `train_step` knows how its parts belong together.
        return


def require_compiled_model(model: object, build_model: object) -> None:
    if isinstance(model, keras.Model) and model.compiled:
        return
    refuse_other_keras(model)
    came = "a model that is not compiled" if isinstance(model, keras.Model) else repr(type(model))
    raise value_error(
        f"`build_model` returned {came}.",
        "Expected a compiled `keras.Model`.",
        "Call `model.compile(...)` in the function and return the model.",
        build_model=build_model,
    )


def switch_off(model: keras.Model) -> list[str]:
    """Let the model's random layers run in inference mode; their names.

    A layer that draws and has no `training` argument, and a model with draws of its own,
    cannot be switched off; `causes` tells the user where that makes a difference.
    """
    names = []
    for layer in model_internals.layers_of(model):
        signature = inspect.signature(layer.call)
        if draws(layer) and "training" in signature.parameters:
            vars(layer)["call"] = in_inference_mode(layer.call, signature)
            names.append(layer.name)
    return names


def draws(layer: keras.Layer) -> bool:
    """Whether the layer itself, not one inside it, owns a seed generator."""
    if isinstance(layer, keras.Model):
        return False
    own, *inner = model_internals.layers_of(layer)
    states = {id(state) for state in variable_internals.seed_states(own)}
    for part in inner:
        states -= {id(state) for state in variable_internals.seed_states(part)}
    return bool(states)


def in_inference_mode(call: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """A `call` whose `training` argument is always False."""

    @functools.wraps(call)
    def without_draws(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return without_draws
