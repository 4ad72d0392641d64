"""A training with every kind of state, to be stopped anywhere and resumed."""

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

import keras_multigpu as kmg
from helpers.cpu_replicas import on_replicas
from helpers.reused_models import reused
from helpers.stopped_runs import StopAt, Stopped
from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.training.variables.model_state import ModelState

EXAMPLES = 22
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, 3)).astype("float32")
# The second column is the example's number, for the metric.
Y = np.stack([RANDOM.normal(size=EXAMPLES), np.arange(EXAMPLES)], axis=1).astype("float32")


class Uneven(keras.metrics.Metric):
    """How much the number of times an example was seen in this epoch differs from one."""

    def __init__(self, name="uneven", examples=EXAMPLES):
        super().__init__(name=name)
        self.seen = self.add_variable((examples,), "zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = ops.cast(y_true[:, 1], "int32")
        self.seen.assign(self.seen + ops.sum(ops.one_hot(numbers, self.seen.shape[0]), axis=0))

    def result(self):
        return ops.max(ops.abs(self.seen - 1.0))


def first_column_error(y_true, y_pred):
    """The squared error, without the examples' numbers."""
    return ops.square(y_true[:, 0] - y_pred[:, 0])


class Remembering(keras.callbacks.Callback):
    """A user's callback with a state: a list, an array, a number."""

    def __init__(self):
        super().__init__()
        self.losses, self.total = [], np.zeros(2, np.float32)

    @property
    def state(self):
        return {"losses": self.losses, "total": self.total, 3: ("a", None)}

    @state.setter
    def state(self, state):
        assert state[3] == ("a", None)
        self.losses, self.total = state["losses"], state["total"]

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.total += np.float32(logs["loss"])


OPTIMIZERS = {
    None: lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "rms": lambda: keras.optimizers.RMSprop(0.02, momentum=0.9),
    "clipped": lambda: keras.optimizers.SGD(0.005, momentum=0.9, clipnorm=1.0),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.02, 40), momentum=0.9
    ),
    "ema": lambda: keras.optimizers.SGD(0.02, use_ema=True, ema_overwrite_frequency=5),
    "accumulation": lambda: keras.optimizers.SGD(0.02, gradient_accumulation_steps=4),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.02), initial_scale=4.0, dynamic_growth_steps=5
    ),
}


@reused
def network(
    replicas=2, optimizer=None, dropout=0.3, units=4, normalized=False, row=None, **compiled
):
    """A small model with dropout, momentum and two metrics; batch statistics if `normalized`.

    Each `row` has an object of its own.
    """
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), keras.layers.Dense(units)]
    layers += [keras.layers.BatchNormalization()] if normalized else []
    layers += [keras.layers.Dropout(dropout, seed=1), keras.layers.Dense(1)]
    model = on_replicas(keras.Sequential(layers), replicas)
    compiled = {"loss": first_column_error, "metrics": [Uneven()], **compiled}
    model.compile(OPTIMIZERS[optimizer](), **compiled)
    return model


class Sequence(keras.utils.PyDataset):
    """The examples in batches of five, in another order after each epoch."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = np.roll(np.arange(EXAMPLES), self.epoch)[index * 5 : index * 5 + 5]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.epoch += 1


def generated():
    """Batches of five, without an end."""
    for start in itertools.cycle(range(0, EXAMPLES, 5)):
        yield X[start : start + 5], Y[start : start + 5]


def batches(**settings):
    """The examples in batches of four, shuffled; the last one has two."""
    return kmg.data.from_arrays(X, Y, **{"global_batch_size": 4, "seed": 7, **settings})


def keras_callbacks(folder, patience=3):
    """Keras's callbacks that carry something from epoch to epoch, set to act soon."""
    return [
        keras.callbacks.ReduceLROnPlateau(
            "loss", factor=0.5, patience=1, min_delta=0.1, min_lr=0.001
        ),
        keras.callbacks.EarlyStopping(
            "loss", min_delta=0.2, patience=patience, restore_best_weights=True
        ),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: max(rate * 0.9, 0.001)),
        keras.callbacks.CSVLogger(Path(folder) / "log.csv"),
        keras.callbacks.ModelCheckpoint(
            str(Path(folder) / "model.keras"), "loss", save_best_only=True, save_freq=4
        ),
    ]


def close_files(callbacks):
    """What the end of a process does."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.csv_file.close()


def values_of(model):
    return ModelState.of(model).values


def assert_same_values(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, name)


def fit(model, data, callbacks, checkpoint, last=False, **arguments):
    """Train with the checkpoint first or last in the list; the history."""
    callbacks = [*callbacks, checkpoint] if last else [checkpoint, *callbacks]
    return model.fit(data, callbacks=callbacks, **{"epochs": 3, "verbose": 0, **arguments})


def checkpoint_in(folder, **settings):
    return ResumableCheckpoint(folder, **{"every_steps": 1, **settings})


def run(folder, stops, *, replicas=(2,), data=batches, last=False, extra=None, **arguments):
    """Train with or without stops; returns the values, history, CSV file and a callback's state."""
    folder.mkdir()
    network_settings = arguments.pop("network", {})
    checkpoint_settings = arguments.pop("checkpoint", {})
    for number, stop in enumerate([*stops, None]):
        model = network(replicas[min(number, len(replicas) - 1)], **network_settings)
        memory = Remembering()
        callbacks = [memory, *keras_callbacks(folder), *(extra() if extra else [])]
        callbacks += [StopAt(*stop)] if stop else []
        checkpoint = checkpoint_in(folder / "run", **checkpoint_settings)
        if stop is None:
            history = fit(model, data(), callbacks, checkpoint, last, **arguments)
            text = (folder / "log.csv").read_text()
            return values_of(model), history, text, memory.state
        with pytest.raises(Stopped):
            fit(model, data(), callbacks, checkpoint, last, **arguments)
        close_files(callbacks)
    raise AssertionError


def assert_same_runs(one, other):
    """Values, history, CSV file and a callback's own state are equal, bit for bit."""
    assert_same_values(one[0], other[0])
    assert one[1].history == other[1].history
    assert one[1].epoch == other[1].epoch
    assert one[2] == other[2]
    assert one[3]["losses"] == other[3]["losses"]
    np.testing.assert_array_equal(one[3]["total"], other[3]["total"])
