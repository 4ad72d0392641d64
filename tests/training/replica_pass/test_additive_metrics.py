"""Metrics on shares of a batch add up to the metric of the whole, class by class."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import metrics

import keras_multigpu as kmg
from keras_multigpu.training.replica_pass.additive_metrics import is_additive

ROWS = 7
SHARES = (slice(0, 3), slice(3, 4), slice(4, 7))


def numbers(kind):
    """Targets and predictions for seven examples."""
    random = np.random.default_rng(1)
    chances = random.dirichlet(np.ones(4), ROWS).astype("float32")
    labels = random.integers(0, 4, ROWS)
    return {
        "binary": (random.integers(0, 2, (ROWS, 1)), chances[:, :1]),
        "classes": (labels, chances),
        "one-hot": (np.eye(4, dtype="float32")[labels], chances),
        "regression": (chances[::-1].copy(), chances),
        "signs": (2.0 * np.eye(4, dtype="float32")[labels] - 1, chances),
        "pixels": (random.integers(0, 4, (ROWS, 5)), random.integers(0, 4, (ROWS, 5))),
        "one-hot pixels": (
            np.eye(4, dtype="float32")[random.integers(0, 4, (ROWS, 5))],
            random.random((ROWS, 5, 4), "float32"),
        ),
        "values": (chances,),
    }[kind]


def absolute(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


# Each class of `keras.metrics`: what it is made of, and data that suit it.
CLASSES = {
    "AUC": ([{"num_thresholds": 9}, {"multi_label": True, "num_labels": 4}], "one-hot"),
    "Accuracy": ([{}], "pixels"),
    "BinaryAccuracy": ([{}], "binary"),
    "BinaryCrossentropy": ([{}, {"from_logits": True}], "binary"),
    "BinaryIoU": ([{"threshold": 0.3}], "binary"),
    "CategoricalAccuracy": ([{}], "one-hot"),
    "CategoricalCrossentropy": ([{"label_smoothing": 0.1}], "one-hot"),
    "CategoricalHinge": ([{}], "one-hot"),
    "ConcordanceCorrelation": ([{}], "regression"),
    "CosineSimilarity": ([{}], "regression"),
    "F1Score": ([{"average": "macro"}, {"threshold": 0.3}], "one-hot"),
    "FBetaScore": ([{"average": "micro", "beta": 2.0}], "one-hot"),
    "FalseNegatives": ([{"thresholds": [0.2, 0.4]}], "one-hot"),
    "FalsePositives": ([{}], "one-hot"),
    "Hinge": ([{}], "signs"),
    "IoU": ([{"num_classes": 4, "target_class_ids": [1], "ignore_class": 2}], "pixels"),
    "KLDivergence": ([{}], "regression"),
    "LogCoshError": ([{}], "regression"),
    "Mean": ([{}], "values"),
    "MeanAbsoluteError": ([{}], "regression"),
    "MeanAbsolutePercentageError": ([{}], "regression"),
    "MeanIoU": ([{"num_classes": 4}, {"num_classes": 4, "dtype": "int32"}], "pixels"),
    "MeanMetricWrapper": ([{"fn": absolute}], "regression"),
    "MeanSquaredError": ([{}], "regression"),
    "MeanSquaredLogarithmicError": ([{}], "regression"),
    "OneHotIoU": ([{"num_classes": 4, "target_class_ids": [0, 2]}], "one-hot pixels"),
    "OneHotMeanIoU": ([{"num_classes": 4}], "one-hot pixels"),
    "PearsonCorrelation": ([{}], "regression"),
    "Poisson": ([{}], "regression"),
    "Precision": ([{"top_k": 2}, {"class_id": 1}, {"thresholds": 0.2}], "one-hot"),
    "PrecisionAtRecall": ([{"recall": 0.5}], "one-hot"),
    "R2Score": ([{}], "regression"),
    "Recall": ([{"thresholds": [0.2, 0.4]}], "one-hot"),
    "RecallAtPrecision": ([{"precision": 0.5}], "one-hot"),
    "RootMeanSquaredError": ([{}], "regression"),
    "SensitivityAtSpecificity": ([{"specificity": 0.5}], "one-hot"),
    "SparseCategoricalAccuracy": ([{}], "classes"),
    "SparseCategoricalCrossentropy": ([{}], "classes"),
    "SparseTopKCategoricalAccuracy": ([{"k": 2}], "classes"),
    "SpecificityAtSensitivity": ([{"sensitivity": 0.5}], "one-hot"),
    "SquaredHinge": ([{}], "signs"),
    "Sum": ([{}], "values"),
    "TopKCategoricalAccuracy": ([{"k": 2}], "one-hot"),
    "TrueNegatives": ([{}], "one-hot"),
    "TruePositives": ([{}], "one-hot"),
}

OF_KERAS = [
    name
    for name, cls in sorted(vars(metrics).items())
    if inspect.isclass(cls) and cls is not metrics.Metric
]


def state(metric, data, start=None):
    """A metric's variables after an update with some rows."""
    zeros = [np.zeros(v.shape, v.dtype) for v in metric.variables]
    tensors = [tf.convert_to_tensor(part) for part in data]
    after = metric.stateless_update_state(zeros if start is None else start, *tensors)
    return [np.asarray(value) for value in after]


def weights(kind, counts):
    """Sample weights, whole ones for metrics that count in integers."""
    weight = np.arange(1, ROWS + 1, dtype="int32" if counts else "float32")
    return np.repeat(weight[:, None], 5, axis=1) if "pixels" in kind else weight


@pytest.mark.parametrize("name", OF_KERAS)
def test_a_metric_of_keras_is_the_sum_over_shares(name):
    """With weights and without, also on top of what earlier batches have left behind."""
    assert name in CLASSES, (
        f"`keras.metrics.{name}` is new: say in CLASSES how it is made and fed. If its "
        "`update_state` is one of its own, add it to `additive_metrics.ADD_UP` where it adds up."
    )
    made_of, kind = CLASSES[name]
    for arguments in made_of:
        weight = weights(kind, counts=name.endswith("IoU"))
        for data in (numbers(kind), (*numbers(kind), weight)):
            metric = getattr(metrics, name)(**arguments)
            metric.update_state(*data)
            assert is_additive(metric, list(map(tf.convert_to_tensor, data)))
            whole = state(metric, data)
            shares = [state(metric, [part[share] for part in data]) for share in SHARES]
            for found, expected in zip(zip(*shares, strict=True), whole, strict=True):
                np.testing.assert_allclose(sum(found), expected, rtol=1e-5, atol=1e-6)
            again = state(metric, data, start=whole)
            for found, expected in zip(again, whole, strict=True):
                np.testing.assert_allclose(found, 2 * expected, rtol=1e-5, atol=1e-6)


def of_batch(y_true, y_pred):
    return keras.ops.max(keras.ops.abs(y_true - y_pred))


def of_columns(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=0)


def ranks(y_true, y_pred):
    return y_pred[:, 0] / keras.ops.max(y_pred[:, 0])


class Own(metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred, sample_weight)


class Declared(Own):
    additive = True


class OnlyNamed(metrics.Precision):
    pass


@pytest.mark.parametrize(
    ("metric", "kind", "expected"),
    [
        (metrics.MeanMetricWrapper(absolute), "regression", True),
        (metrics.MeanMetricWrapper(of_batch), "regression", False),
        (metrics.MeanMetricWrapper(of_columns), "regression", False),
        (metrics.MeanMetricWrapper(ranks), "regression", False),
        (metrics.CosineSimilarity(axis=0), "regression", False),
        (metrics.CosineSimilarity(axis=1), "regression", True),
        (OnlyNamed(), "one-hot", True),
        (Own(), "regression", False),
        (Declared(), "regression", True),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_whether_other_metrics_add_up(metric, kind, expected):
    """Functions are tried on a few rows; an `update_state` of the user's is taken at its word."""
    data = [tf.convert_to_tensor(part) for part in numbers(kind)]
    metric.update_state(*data)
    assert is_additive(metric, data) is expected


def test_one_number_for_an_example_that_is_no_row():
    """Keras takes the mean of a batch of single numbers at once, and counts it as one."""
    metric = metrics.MeanSquaredError()
    assert not is_additive(metric, [tf.zeros(4), tf.zeros(4)])


def test_an_update_that_was_put_on_the_object_is_not_known():
    metric = metrics.Mean()
    metric.update_state = lambda *data: None
    assert not is_additive(metric, [tf.zeros((4, 1)), tf.zeros((4, 1))])


@pytest.mark.parametrize(("known", "lengths"), [(1, {33}), (100, {33, 100})])
def test_long_axes_are_tried_short(known, lengths):
    """Unless the function knows their length by heart."""
    tried = set()

    def weighed(y_true, y_pred):
        tried.add(y_pred.shape[-1])
        return keras.ops.mean(y_pred * np.ones(known, "float32"), axis=-1)

    assert is_additive(metrics.MeanMetricWrapper(weighed), [tf.zeros((4, 100)), tf.zeros((4, 100))])
    assert tried == lengths


def trained(metric, weights=None, strategy="one_device", devices=None, **options):
    """What a linear model logs for a batch of seven examples, and on evaluating three of them."""
    x, y = np.arange(14, dtype="float32").reshape(7, 2) / 14, np.ones((7, 1), "float32")
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = kmg.distribute(
        keras.Sequential([keras.Input((2,)), layer]), kmg.strategy(strategy, devices=devices)
    )
    model.compile(keras.optimizers.SGD(0.0), "mse", weighted_metrics=[metric], **options)
    some = None if weights is None else weights[:3]
    return [*model.train_on_batch(x, y, weights), *model.test_on_batch(x[:3], y[:3], some)]


class Signed(metrics.Mean):
    """The mean error, declared."""

    additive = True

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred - y_true, sample_weight)


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
def test_replicas_without_examples_add_nothing(eagerly):
    """Of three examples on four replicas one is borrowed; its numbers are dropped."""
    found = trained(Signed(), strategy="mirrored", devices=4, run_eagerly=eagerly)
    np.testing.assert_allclose(found, trained(Signed()), rtol=1e-5)


class Elsewhere(metrics.Mean):
    """Counts in a variable that no metric owns."""

    additive = True
    updates = keras.Variable(0.0, trainable=False)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.updates.assign_add(1.0)
        super().update_state(y_pred)


def test_what_a_declared_metric_changes_is_its_own():
    with pytest.raises(ValueError, match="changes a variable that is not its own"):
        trained(Elsewhere(), strategy="mirrored", devices=2)
