"""Each loss, metric and optimizer of Keras trains as on one device, all in one model.

They are looked up in Keras: one without a row here fails.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.keras_versions import rows_of_the_newest
from keras import layers, losses, metrics, ops, optimizers

from exactness.parts_of_keras import ROWS, Make, missing, of, parts_of, trained_once
from exactness.runs import difference, require_equal

pytestmark = [pytest.mark.usefixtures("graphs_that_run_twice"), rows_of_the_newest]

# By what they compare: targets of a model, and how its outputs are made.
LOSSES: dict[str, dict[str, Make]] = {
    "numbers": {
        "CosineSimilarity": of(),
        "Huber": of(),
        "LogCosh": of(),
        "MeanAbsoluteError": of(),
        "MeanAbsolutePercentageError": of(),
        "MeanSquaredError": of(),
    },
    "shares": {
        "CategoricalCrossentropy": of(label_smoothing=0.1),
        "CategoricalFocalCrossentropy": of(),
        "KLDivergence": of(),
        "MeanSquaredLogarithmicError": of(),
        "Poisson": of(),
    },
    "bits": {
        "BinaryCrossentropy": of(),
        "BinaryFocalCrossentropy": of(),
        "Dice": of(),
        "Tversky": of(),
    },
    "signs": {"CategoricalHinge": of(), "Hinge": of(), "SquaredHinge": of()},
    "kind": {
        "CategoricalGeneralizedCrossEntropy": of(),
        "Circle": of(gamma=2.0),
        "SparseCategoricalCrossentropy": of(),
    },
    "sentence": {"CTC": of()},
}
METRICS: dict[str, dict[str, Make]] = {
    "numbers": {
        "Accuracy": of(),
        "ConcordanceCorrelation": of(),
        "LogCoshError": of(),
        "MeanMetricWrapper": of(lambda y, y_pred: ops.max(ops.abs(y - y_pred), axis=-1)),
        "PearsonCorrelation": of(),
        "R2Score": of(),
        "RootMeanSquaredError": of(),
    },
    "shares": {
        "CategoricalAccuracy": of(),
        "F1Score": of(),
        "FBetaScore": of(),
        "OneHotIoU": of(3, [0, 2]),
        "OneHotMeanIoU": of(3),
        "TopKCategoricalAccuracy": of(2),
    },
    "bits": {
        "AUC": of(num_thresholds=20),
        "BinaryAccuracy": of(),
        "BinaryIoU": of(),
        "FalseNegatives": of(),
        "FalsePositives": of(),
        "Precision": of(),
        "PrecisionAtRecall": of(0.5, num_thresholds=20),
        "Recall": of(),
        "RecallAtPrecision": of(0.5, num_thresholds=20),
        "SensitivityAtSpecificity": of(0.5, num_thresholds=20),
        "SpecificityAtSensitivity": of(0.5, num_thresholds=20),
        "TrueNegatives": of(),
        "TruePositives": of(),
    },
    "kind": {
        "IoU": of(3, [0, 2], sparse_y_pred=False),
        "MeanIoU": of(3, sparse_y_pred=False),
        "SparseCategoricalAccuracy": of(),
        "SparseTopKCategoricalAccuracy": of(2),
    },
}
OTHER_METRICS = {
    "Metric": "the base of all",
    # Neither compares anything: a layer of the model owns them.
    "Mean": "in `Measured`",
    "Sum": "in `Measured`",
}


# Each inherits its update from the class of another metric here, so `make test-all` tries them.
ALIKE = {
    *("FalseNegatives", "FalsePositives", "TrueNegatives"),
    *("PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity"),
    *("OneHotIoU", "OneHotMeanIoU", "IoU", "FBetaScore"),
}


def measured_metrics() -> list[tuple[str, str]]:
    """The metrics that are tried, with what they compare."""
    return [
        (on, name) for on, name in parts_of(METRICS, metrics) if ALL_REPLICAS or name not in ALIKE
    ]


def is_mean_of_a_loss(name: str) -> bool:
    """Whether a metric is a `MeanMetricWrapper`, which has a row, of what has one as a loss."""
    kind = getattr(metrics, name)
    is_mean = isinstance(kind, type) and issubclass(kind, metrics.MeanMetricWrapper)
    return is_mean and hasattr(losses, name)


class Measured(layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean, self.sum = metrics.Mean(name="mean"), metrics.Sum(name="sum")

    def call(self, x):
        self.mean.update_state(x)
        self.sum.update_state(ops.square(x))
        return x


def compared() -> keras.Model:
    x = keras.Input((6,))
    body = Measured()(layers.Dense(4, activation="tanh")(x))
    made = {
        "numbers": layers.Dense(3)(body),
        "shares": layers.Dense(3, "softmax")(body),
        "bits": layers.Dense(3, "sigmoid")(body),
        "signs": layers.Dense(3, "tanh")(body),
        "kind": layers.Dense(3, "softmax")(body),
        "sentence": layers.Reshape((5, 4))(layers.Dense(20)(body)),
    }
    return keras.Model(
        x, {name: layers.Identity(name=name)(made[on]) for on, name in parts_of(LOSSES, losses)}
    )


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")


def targets(on: str) -> np.ndarray:
    draw = np.random.default_rng(1)
    if on == "sentence":
        return draw.integers(1, 4, (ROWS, 2)).astype("int32")
    kinds = draw.integers(0, 3, ROWS).astype("int32")
    made = {
        "numbers": draw.normal(size=(ROWS, 3)),
        "shares": np.eye(3)[kinds],
        "bits": draw.integers(0, 2, (ROWS, 3)),
        "signs": draw.choice([-1, 1], (ROWS, 3)),
    }
    return made[on].astype("float32") if on in made else kinds


def compile_comparisons() -> dict[str, Any]:
    """All losses, and all metrics of each kind at the first output of that kind."""
    chosen = parts_of(LOSSES, losses)
    first = {on: name for on, name in reversed(chosen)}
    measured: dict[str, list[Any]] = {}
    for on, name in measured_metrics():
        measured.setdefault(first[on], []).append(METRICS[on][name](getattr(metrics, name)))
    return {
        "optimizer": optimizers.SGD(0.05),
        "loss": {name: LOSSES[on][name](getattr(losses, name)) for on, name in chosen},
        "metrics": measured,
        "weighted_metrics": {first["numbers"]: [metrics.MeanAbsoluteError(name="weighted")]},
    }


def test_every_loss_and_metric_has_a_row():
    """Or a reason to have none."""
    assert missing(losses, [*(name for _, name in parts_of(LOSSES, losses)), "Loss"]) == []
    known = [*(name for _, name in parts_of(METRICS, metrics)), *OTHER_METRICS]
    assert missing(metrics, [*known, *filter(is_mean_of_a_loss, vars(metrics))]) == []


@pytest.mark.slow
@pytest.mark.parametrize("weighted", (False, True) if ALL_REPLICAS else (True,))
@pytest.mark.parametrize("replicas", (2, 3) if ALL_REPLICAS else (2,))
def test_losses_and_metrics(replicas, weighted):
    """All in one model, whose logs tell them apart."""
    chosen = parts_of(LOSSES, losses)
    weights = {name: np.linspace(0, 2, ROWS, dtype="float32") for _, name in chosen}
    case = trained_once(
        compared,
        compile_comparisons,
        lambda: (
            inputs(),
            {name: targets(on) for on, name in chosen},
            weights if weighted else None,
        ),
        after=("evaluate",) if ALL_REPLICAS else (),
        # `Circle` compares each example with all others.
        gathers="Equal MatMul",
    )
    require_equal(case, replicas)


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": of(0.5),
    "Adafactor": of(0.05),
    "Adagrad": of(0.05),
    "Adam": of(0.05, amsgrad=True),
    "AdamW": of(0.05, weight_decay=0.1),
    "Adamax": of(0.05),
    "Ftrl": of(0.05),
    "Lamb": of(0.05),
    "Lion": of(0.05),
    "LossScaleOptimizer": lambda kind: kind(optimizers.SGD(0.05), initial_scale=8.0),
    "MultiOptimizer": lambda kind: kind(
        optimizers.OptimizerMap(optimizers.SGD(0.05), {".*kernel": optimizers.Adam(0.05)})
    ),
    "Muon": of(0.05),
    "Nadam": of(0.05),
    "RMSprop": of(0.05, momentum=0.9, centered=True),
    "SGD": of(0.05, momentum=0.9, nesterov=True),
    "SGD, clipvalue": of(0.05, clipvalue=0.05),
    "SGD, global_clipnorm": of(0.05, global_clipnorm=0.1),
    "ScheduleFreeAdamW": of(0.05),
}
# `test_replicas_agree.py` tries it.
IN_CASES = {"LossScaleOptimizer"}
OTHER_OPTIMIZERS = {"Optimizer": "the base of all", "OptimizerMap": "an argument of another"}


class Optimized(keras.Model):
    """A dense layer for each optimizer."""

    def __init__(self):
        super().__init__()
        kinds = {name: getattr(optimizers, name.split(",")[0], None) for name in OPTIMIZERS}
        known = [
            name for name, kind in kinds.items() if kind and (ALL_REPLICAS or name not in IN_CASES)
        ]
        self.by_name = {name: OPTIMIZERS[name](kinds[name]) for name in known}
        self.parts = {name: layers.Dense(3) for name in known}

    def call(self, x):
        return ops.concatenate([part(x) for part in self.parts.values()], axis=-1)

    def train_step(self, data):
        x, y = data
        logs = {}
        for name, part in self.parts.items():
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(part(x) - y))
                scaled = self.by_name[name].scale_loss(loss)
            weights = part.trainable_weights
            self.by_name[name].apply(tape.gradient(scaled, weights), weights)
            logs[name] = loss
        return logs


def test_every_optimizer_has_a_row():
    """Or a reason to have none."""
    assert missing(optimizers, [*OPTIMIZERS, *OTHER_OPTIMIZERS]) == []


@pytest.mark.slow
@pytest.mark.parametrize("replicas", (2, 3) if ALL_REPLICAS else (2,))
def test_optimizers(replicas):
    case = trained_once(
        Optimized,
        lambda: {"optimizer": "sgd"},
        lambda: (inputs(), targets("numbers"), None),
        epochs=2,
    )
    expected, found = require_equal(case, replicas)
    for name, optimizer in expected.by_name.items():
        states = zip(optimizer.variables, found.by_name[name].variables, strict=True)
        apart = [difference(one.numpy(), other.numpy()) for one, other in states]
        assert max(apart) < case.tolerance, name
