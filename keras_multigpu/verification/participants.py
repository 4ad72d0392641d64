"""Models made by the user's function, on one device or on N replicas, with equal weights and seeds.

Replicas draw what one device draws, so dropout stays on: all begin each step with the same seed.
"""

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.replicas import get_strategy
from keras_multigpu.training.distribute import distribute
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.replication import known_replication, wants_xla
from keras_multigpu.training.shares import Batch, specs_of, symbolic
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.verification.batches import as_dataset


class Value(NamedTuple):
    """What one variable holds.

    Args:
        group: The variables that share a scale: a layer's weights, or an optimizer's variables of
            one kind.
        place: The same for this variable in all participants: 0 for the model or the number of
            the optimizer, and the position there.
    """

    name: str
    group: str
    place: tuple[int, int]
    copies: list[np.ndarray]


class Participant:
    """A model that trains step by step, on a device or on replicas."""

    def __init__(
        self,
        model: keras.Model,
        seed: int,
        device: str | None,
        replicas: tf.distribute.Strategy | None = None,
    ) -> None:
        self.model = model
        self._seed = seed
        self._device = device
        self._replicas = replicas

    def train(self, batch: Batch) -> float | None:
        """Train on one global batch; return the logged loss, if any."""
        self._seed += 1
        keras.utils.set_random_seed(self._seed)
        with on(self._device):
            # Not `train_on_batch`, which passes other data to a `train_step` than `fit` does.
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
                # Keras appends the kind to the weight's name: `..._velocity`.
                name, place = f"optimizer {variable.path}", (number, position)
                values.append(Value(name, name.rpartition("_")[2], place, self._copies(variable)))
        return values

    def _copies(self, variable: keras.Variable) -> list[np.ndarray]:
        if self._replicas is None:
            return [value_of(variable)]
        return [part.numpy() for part in copies_of(variable)]


class Recipe:
    """Makes participants that start from the same weights; `batch` gives a model its shapes."""

    def __init__(self, build_model: Callable[[], keras.Model], batch: Batch, device: str) -> None:
        self._build_model = build_model
        self.batch = batch
        self._device = device
        self._initial_weights: list[np.ndarray] | None = None
        # The user's own seed determines it.
        self._seed = random.randrange(2**31)
        self.precision = "float32"

    def with_batch(self, batch: Batch) -> "Recipe":
        """Return a recipe for data of another type, with the same weights and seeds."""
        recipe = copy.copy(self)
        recipe.batch = batch
        return recipe

    def on_one_device(self) -> Participant:
        """A model on one device: Keras's own, or a `DistributedModel` on one replica."""
        model = self._model()
        if isinstance(model, DistributedModel):
            model = distribute(model, get_strategy("one_device", devices=[self._device]))
        known = known_replication(model)
        if (known.options.xla if known else wants_xla(model)) is None:
            # Replicas leave out what Keras chooses by itself, and XLA draws other normal numbers.
            model.jit_compile = False
        return Participant(model, self._seed, self._device)

    def on_replicas(self, replicas: tf.distribute.Strategy) -> Participant:
        return Participant(distribute(self._model(), replicas), self._seed, None, replicas)

    def _model(self) -> keras.Model:
        keras.utils.set_random_seed(self._seed)
        with on(self._device):
            model = self._build_model()
            require_compiled_model(model, self._build_model)
            build(model, self.batch)
            # The function may draw the weights from a generator of its own.
            if self._initial_weights is None:
                self._initial_weights = [value_of(weight) for weight in model.weights]
                self.precision = precision_of(model)
            model.set_weights(self._initial_weights)
            if not model_internals.overridden(model, "train_step"):
                # As `distribute` does. Keras builds it within the first step, which loses the
                # copies of weights that ScheduleFreeAdamW starts with (Keras 3.15).
                model.optimizer.build(model.trainable_variables)
        return model


def value_of(variable: keras.Variable) -> np.ndarray:
    # Keras's own conversions make NumPy 2 warn about `__array__`.
    return tf.convert_to_tensor(variable).numpy()


def precision_of(model: keras.Model) -> str:
    """The coarsest type in which a layer of the model computes."""
    types = {layer.compute_dtype for layer in model_internals.layers_of(model)}
    return next((name for name in ("bfloat16", "float16") if name in types), "float32")


def on(device: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else tf.device(device)


def build(model: keras.Model, batch: Batch) -> None:
    """Build a model that was made without shapes."""
    if all(layer.built for layer in model_internals.layers_of(model)):
        return
    try:
        model_internals.symbolic_call(model, symbolic(specs_of(batch[0])))
    except NotImplementedError:
        # A model without `call`, such as a GAN: only its `train_step` connects its parts.
        return


def require_compiled_model(model: object, build_model: object) -> None:
    if isinstance(model, keras.Model) and model.compiled:
        return
    came = "a model that is not compiled" if isinstance(model, keras.Model) else repr(type(model))
    raise value_error(
        f"`build_model` returned {came}.",
        "Expected a compiled `keras.Model` of Keras 3.",
        "Call `model.compile(...)` in the function and return the model.",
        build_model=build_model,
    )
