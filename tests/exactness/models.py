"""Small models, data, losses and metrics: what the table of `cases.py` is made of.

A model has a few dozen weights, the data 15 examples unless a case says otherwise (29 with
`KMG_ALL_REPLICAS=1`). With a global batch of 8 the last one has 7 (5), too few for 8 replicas.
"""

import keras
import numpy as np
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from keras import layers

EXAMPLES = 29 if ALL_REPLICAS else 15

# Data: each function returns `(x, y, sample_weight)`.


def regression(examples=EXAMPLES):
    """Five numbers in, one out."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(examples, 5)).astype("float32")
    noise = draw.normal(size=(examples, 1))
    return x, (x[:, :1] * x[:, 1:2] + 0.5 * noise).astype("float32"), None


def weighted(examples=EXAMPLES):
    """The same with a weight for each example, some of them zero."""
    x, y, _ = regression(examples)
    weights = np.random.default_rng(1).uniform(0.0, 2.0, examples).astype("float32")
    weights[::5] = 0.0
    return x, y, weights


def classes(examples=EXAMPLES):
    """Five numbers in, one of three classes out."""
    x, y, _ = regression(examples)
    return x, np.digitize(y[:, 0], [-0.4, 0.4]).astype("int32"), None


def yes_or_no(examples=EXAMPLES):
    """Five numbers in, 0 or 1 out."""
    x, y, _ = regression(examples)
    return x, (y > 0).astype("float32"), None


def two_targets(examples=EXAMPLES):
    x, y, _ = regression(examples)
    return x, {"value": y, "kind": classes(examples)[1]}, None


def two_weighted_targets(examples=EXAMPLES):
    """The same with weights for each target."""
    x, y, _ = two_targets(examples)
    weights = weighted(examples)[2]
    return x, y, {"value": weights, "kind": weights[::-1].copy()}


def target_list(examples=EXAMPLES):
    x, y, _ = two_targets(examples)
    return x, [y["value"], y["kind"]], None


def words(examples=EXAMPLES):
    """Sentences of 1 to 6 words, filled up with 0; one number out."""
    draw = np.random.default_rng(2)
    x = draw.integers(1, 12, size=(examples, 6))
    x[np.arange(6) >= draw.integers(1, 7, size=(examples, 1))] = 0
    return x.astype("int32"), draw.normal(size=(examples, 1)).astype("float32"), None


def tagged_words(examples=EXAMPLES):
    """The same sentences with one of three classes for each word."""
    x, _, _ = words(examples)
    return x, np.random.default_rng(3).integers(0, 3, size=x.shape).astype("int32"), None


def weighted_tags(examples=EXAMPLES):
    """The same with a weight for each word."""
    x, y, _ = tagged_words(examples)
    return x, y, np.random.default_rng(4).uniform(0.0, 2.0, x.shape).astype("float32")


def series(examples=EXAMPLES):
    """Five numbers at six times, one of three classes at each; a weight for each time."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(examples, 6, 5)).astype("float32")
    y = draw.integers(0, 3, size=(examples, 6)).astype("int32")
    return x, y, draw.uniform(0.0, 2.0, (examples, 6)).astype("float32")


def images(examples=EXAMPLES):
    """Images of 6 x 6 pixels with two channels, one of three classes."""
    draw = np.random.default_rng(6)
    x = draw.normal(size=(examples, 6, 6, 2)).astype("float32")
    return x, draw.integers(0, 3, size=examples).astype("int32"), None


def one_overflow(examples=EXAMPLES):
    """Regression in which one single example is too large for float16's gradients."""
    x, y, _ = regression(examples)
    y[10] = 3000.0
    return x, y, None


# Models, built but not compiled.


def mlp(outputs=1, activation=None, **last):
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, activation="tanh"),
            layers.Dense(outputs, activation=activation, **last),
        ]
    )


def wide_mlp():
    """One of its weights has more than 65,536 numbers."""
    parts = [layers.Dense(300, "tanh"), layers.Dense(300, "tanh"), layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *parts])


def classifier():
    return mlp(3, "softmax")


def yes_or_no_model():
    return mlp(1, "sigmoid")


def two_heads(output="dict"):
    x = keras.Input((5,))
    body = layers.Dense(6, activation="tanh")(x)
    value = layers.Dense(1, name="value")(body)
    kind = layers.Dense(3, activation="softmax", name="kind")(body)
    return keras.Model(x, {"value": value, "kind": kind} if output == "dict" else [value, kind])


def reader(recurrent=None):
    """Masked words, one number for each sentence."""
    recurrent = layers.LSTM(4) if recurrent is None else recurrent
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(12, 3, mask_zero=True),
            recurrent,
            layers.Dense(1),
        ]
    )


def tagger(*between):
    """Masked words, three probabilities for each word; the mask reaches the loss."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(12, 3, mask_zero=True),
            *between,
            layers.Dense(3, activation="softmax"),
        ]
    )


def embedding_mlp():
    """Words without a mask; the embedding's gradient is sparse."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(12, 3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def series_tagger():
    return keras.Sequential(
        [
            keras.Input((6, 5)),
            layers.SimpleRNN(4, return_sequences=True),
            layers.Dense(3, activation="softmax"),
        ]
    )


def convnet(*between):
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="tanh"),
            *between,
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def bn_mlp(synchronized=False):
    """A BatchNorm between two dense layers. No bias before it: its gradient is only noise."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, use_bias=False),
            layers.BatchNormalization(synchronized=synchronized),
            layers.Activation("tanh"),
            layers.Dense(1),
        ]
    )


def bn_convnet():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def convolutions():
    """Two of each kind, with what TensorFlow fuses: padding before one, all else after it."""
    x, heads = keras.Input((6, 6, 2)), []
    for kind, shape in (
        (layers.Conv1D, (6, 12)),
        (layers.Conv2D, (6, 6, 2)),
        (layers.Conv2DTranspose, (6, 6, 2)),
        (layers.Conv3D, (6, 3, 4, 1)),
        (layers.DepthwiseConv2D, (6, 6, 2)),
    ):
        size = () if kind is layers.DepthwiseConv2D else (2,)
        first = layers.ReLU()(kind(*size, 2)(layers.Reshape(shape)(x)))
        second = layers.BatchNormalization()(kind(*size, 2, use_bias=False)(first))
        heads.append(layers.Flatten()(second))
    return keras.Model(x, layers.Dense(3, activation="softmax")(layers.Concatenate()(heads)))


def bn_reader():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(12, 3, mask_zero=True),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )


def frozen(model, index):
    model.layers[index].trainable = False
    return model


def nested():
    """A functional model around a functional and a Sequential one, used twice."""
    inner_input = keras.Input((5,))
    inner = keras.Model(inner_input, layers.Dense(4, activation="tanh")(inner_input))
    tail = keras.Sequential([layers.Dense(3, activation="tanh"), layers.Dense(2)])
    x = keras.Input((5,))
    both = layers.Concatenate()([tail(inner(x)), tail(inner(2.0 * x))])
    return keras.Model(x, layers.Dense(1)(both))


@keras.saving.register_keras_serializable("exactness")
class Subclassed(keras.Model):
    """A model that is built when it meets data."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body = keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(4)])
        self.head = layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.body(x))


def in_precision(policy, make):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return make()
    finally:
        keras.config.set_dtype_policy(before)


# Layers.


class OutputPenalty(layers.Layer):
    """Adds the mean of squares over examples to the loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class MeasuredLayer(layers.Layer):
    """Owns an additive metric, which it updates in every call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(keras.ops.mean(keras.ops.square(x), axis=-1))
        return x


def mlp_with(layer, **last):
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, activation="tanh"), layer, layers.Dense(1, **last)]
    )


# Losses.


def absolute_cubes(y_true, y_pred):
    """A function with one value for each example."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


def spread_of_errors(y_true, y_pred):
    """A function with one value for the batch, and no sum over its examples."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


class LogCosine(keras.losses.Loss):
    """A subclass that gives one value for each example."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.log(1.0 + keras.ops.square(y_true - y_pred)), axis=-1)


class OwnReduction(keras.losses.Loss):
    """A subclass that also reduces: the largest error counts extra."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.square(y_true - y_pred)
        return keras.ops.mean(errors) + 0.1 * keras.ops.max(errors)


LOSSES = [
    lambda: keras.losses.MeanSquaredError(reduction="mean"),
    lambda: keras.losses.MeanSquaredError(reduction="sum"),
    lambda: absolute_cubes,
    lambda: spread_of_errors,
    LogCosine,
    OwnReduction,
]


def heads(count):
    x = keras.Input((5,))
    body = layers.Dense(6, activation="tanh")(x)
    return keras.Model(x, [layers.Dense(1)(body) for _ in range(count)])


def repeated_targets(count):
    x, y, weights = weighted()
    return x, [y] * count, [weights] * count


# Metrics.


class LargestError(keras.metrics.Metric):
    def __init__(self, name="largest_error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.largest.assign(keras.ops.maximum(self.largest, error))

    def result(self):
        return self.largest


class LargeErrors(keras.metrics.Metric):
    """Counts errors, which adds up over the examples."""

    additive = True

    def __init__(self, name="large_errors", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        large = keras.ops.abs(y_true - y_pred) > 0.5
        self.count.assign_add(keras.ops.sum(keras.ops.cast(large, "int32")))

    def result(self):
        return self.count


class Batches(keras.metrics.Metric):
    def __init__(self, name="batches", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)

    def result(self):
        return self.count


# Callbacks.


class CrashOnce(keras.callbacks.Callback):
    """Stops training with an error in the second epoch, unless its file says it did so before."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and not self.file.exists():
            self.file.touch()
            raise InterruptedError


# Models with methods of their own.


class OwnLoss(Subclassed):
    """Overrides `compute_loss` with one that looks at the batch as a whole."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.square(keras.ops.mean(y_pred) - keras.ops.mean(y))


class OwnMetrics(Subclassed):
    """Overrides `compute_metrics` to add one that is no mean over examples."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        results["range"] = keras.ops.max(y_pred) - keras.ops.min(y_pred)
        return results


class MetricOwner(Subclassed):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y, y_pred, sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def measured(model, loss, y, y_pred, sample_weight=None):
    for metric in model.metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, y_pred, sample_weight=sample_weight)
    return {metric.name: metric.result() for metric in model.metrics}


class OwnTrainStep(Subclassed):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return measured(self, loss, y, y_pred, sample_weight)


def stepping(model):
    class Stepping(keras.Model):
        train_step = OwnTrainStep.train_step

    return Stepping(model.inputs, model.outputs[0])


class OwnTestStep(Subclassed):
    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return measured(self, self.compute_loss(y=y, y_pred=y_pred), y, y_pred)


class OwnPredictStep(Subclassed):
    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        return {"value": y_pred, "above": y_pred > 0.0}


class CountingTrainStep(Subclassed):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.assign_add(1)
        return logs
