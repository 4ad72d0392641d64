"""Each layer, loss, metric, optimizer and application of Keras trains as on one device.

They are looked up in Keras: a class that is in no table here fails. Many are tried in one model,
with a batch of five and one of a single example, so that a replica is empty. With the environment
variable `KMG_ALL_REPLICAS=1` each is tried alone as well, on 2 and on 3 replicas.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from keras import layers, losses, metrics, ops, optimizers

from exactness.cases import Case
from exactness.models import in_precision
from exactness.runs import alone, difference, require_equal

Make = Callable[[Any], Any]

ROWS, BATCH = 6, 5


def of(*args: Any, **options: Any) -> Make:
    """What makes an instance of a class with these arguments."""
    return lambda kind: kind(*args, **options)


def cell(kind: Any) -> Any:
    return layers.RNN(kind(3))


def twice(**options: Any) -> Make:
    """What makes a layer that is called with one value twice."""

    def make(kind: Any) -> Any:
        layer = kind(**options)
        return lambda value: layer(value, value)

    return make


def inside(kind: Any) -> Any:
    """What calls a layer that says of its input that it is its output."""
    layer = kind()
    return layers.Lambda(lambda x: layer(x), output_shape=lambda shape: shape)


# By what they are put on: a class, perhaps with a remark behind it, and how to make the layer.
LAYERS: dict[str, dict[str, Make]] = {
    "row": {
        "Activation": of("gelu"),
        "ActivityRegularization": of(0.1, 0.1),
        "AlphaDropout": of(0.3),
        "BatchNormalization": of(),
        "Dense": of(3),
        "Dropout": of(0.3),
        "ELU": of(),
        "GaussianDropout": of(0.3),
        "GaussianNoise": of(0.3),
        "Identity": of(),
        "Lambda": of(lambda x: 2.0 * x),
        "LayerNormalization": of(),
        "LeakyReLU": of(),
        "Normalization": of(mean=0.5, variance=2.0),
        "PReLU": of(),
        "RMSNormalization": of(),
        "ReLU": of(),
        "RepeatVector": of(2),
        "Reshape": of((2, 3)),
        "Softmax": of(),
        "SpectralNormalization": lambda kind: kind(layers.Dense(3)),
        "UnitNormalization": of(),
    },
    "two rows": {
        "Add": of(),
        "Average": of(),
        "Concatenate": of(),
        "Dot": of(1, normalize=True),
        "Maximum": of(),
        "Minimum": of(),
        "Multiply": of(),
        "Subtract": of(),
    },
    "series": {
        "AdaptiveAveragePooling1D": of(2),
        "AdaptiveMaxPooling1D": of(2),
        "AveragePooling1D": of(2),
        "Bidirectional": lambda kind: kind(layers.LSTM(2)),
        "Conv1D": of(2, 3),
        "Conv1DTranspose": of(2, 3),
        "Cropping1D": of(1),
        "DepthwiseConv1D": of(3),
        "EinsumDense": of("abc,cd->abd", (6, 2), bias_axes="d"),
        "GRU": of(2),
        "GRUCell": cell,
        "GlobalAveragePooling1D": of(),
        "GlobalMaxPooling1D": of(),
        "GroupQueryAttention": twice(
            head_dim=2, num_query_heads=2, num_key_value_heads=1, use_bias=False
        ),
        "LSTM": of(2, return_sequences=True),
        "LSTMCell": cell,
        "Masking": lambda kind: lambda x: layers.GlobalAveragePooling1D()(kind()(x)),
        "MaxPooling1D": of(2),
        "MultiHeadAttention": twice(num_heads=2, key_dim=2, dropout=0.2, use_bias=False),
        "Permute": of((2, 1)),
        "RNN": lambda kind: kind(layers.SimpleRNNCell(3, dropout=0.3)),
        "SeparableConv1D": of(2, 3),
        "SimpleRNN": of(2, unroll=True),
        "SimpleRNNCell": cell,
        "SpatialDropout1D": of(0.3),
        "StackedRNNCells": lambda kind: layers.RNN(kind([layers.LSTMCell(2), layers.GRUCell(3)])),
        "TimeDistributed": lambda kind: kind(layers.Dense(2)),
        "UpSampling1D": of(),
        "ZeroPadding1D": of(),
    },
    "two series": {
        "AdditiveAttention": of(dropout=0.2),
        "Attention": of(use_scale=True, dropout=0.2),
    },
    "image": {
        "AdaptiveAveragePooling2D": of(3),
        "AdaptiveMaxPooling2D": of(3),
        "AveragePooling2D": of(2),
        "CenterCrop": of(4, 4),
        "Conv2D": of(2, 3),
        "Conv2DTranspose": of(2, 3),
        "Cropping2D": of(1),
        "DepthwiseConv2D": of(3),
        "Flatten": of(),
        "GlobalAveragePooling2D": of(),
        "GlobalMaxPooling2D": of(),
        "GroupNormalization": of(3),
        "MaxPooling2D": of(),
        "Rescaling": of(0.5, 0.1),
        "Resizing": of(5, 5),
        "SeparableConv2D": of(2, 3),
        "SpatialDropout2D": of(0.3),
        "UpSampling2D": of(interpolation="bilinear"),
        "ZeroPadding2D": of(),
    },
    "volume": {
        "AdaptiveAveragePooling3D": of(3),
        "AdaptiveMaxPooling3D": of(3),
        "AveragePooling3D": of(2),
        "Conv3D": of(2, 3),
        "Conv3DTranspose": of(2, 3),
        "Cropping3D": of(1),
        "GlobalAveragePooling3D": of(),
        "GlobalMaxPooling3D": of(),
        "MaxPooling3D": of(),
        "SpatialDropout3D": of(0.3),
        "UpSampling3D": of(),
        "ZeroPadding3D": of(),
    },
    "film of lines": {"ConvLSTM1D": of(2, 3)},
    "film": {"ConvLSTM2D": of(2, 3)},
    "film of volumes": {"ConvLSTM3D": of(1, 2)},
    "photograph": {
        "AugMix": of(),
        "AutoContrast": of(),
        "ContrastLimitedAdaptiveHistogramEqualization": of(tile_grid_size=(2, 2)),
        "CutMix": of(),
        "Equalization": inside,
        "MaxNumBoundingBoxes": of(2),
        "MixUp": of(),
        "Pipeline": lambda kind: kind([layers.RandomFlip(), layers.RandomBrightness(0.3)]),
        "RandAugment": of(),
        "RandomBrightness": of(0.3),
        "RandomColorDegeneration": of(0.5),
        "RandomColorJitter": of(
            brightness_factor=0.3, contrast_factor=0.3, saturation_factor=0.3, hue_factor=0.3
        ),
        "RandomContrast": of(0.5),
        # Where it does not train it leaves images as they are.
        "RandomCrop": lambda kind: lambda x: layers.Resizing(5, 5)(kind(5, 5)(x)),
        "RandomElasticTransform": of(),
        "RandomErasing": of(),
        "RandomFlip": of(),
        "RandomGaussianBlur": of(),
        "RandomGrayscale": of(),
        "RandomHue": of(0.5),
        "RandomInvert": of(0.5),
        "RandomPerspective": of(),
        "RandomPosterization": of(4),
        "RandomRotation": of(0.3),
        "RandomSaturation": of(0.5),
        "RandomSharpness": of(0.5),
        "RandomShear": of(0.3, 0.3),
        "RandomTranslation": of(0.3, 0.3),
        "RandomZoom": of(0.3),
        "Solarization": of(0.1, 0.5),
    },
    "sound": {
        "MelSpectrogram": of(16, 8, sampling_rate=100, num_mel_bins=4, min_freq=1),
        "STFTSpectrogram": lambda kind: (
            lambda x: kind(frame_length=16, frame_step=8)(layers.Reshape((64, 1))(x))
        ),
    },
    "words": {
        "CategoryEncoding": of(12),
        "Embedding": of(12, 2),
        "Hashing": of(5, output_mode="multi_hot"),
        "IntegerLookup": of(vocabulary=[1, 2, 3, 4], output_mode="count"),
        "ReversibleEmbedding": of(12, 2),
    },
    "two columns": {"HashedCrossing": of(5)},
    "number": {"Discretization": of([-1.0, 0.0, 1.0], output_mode="one_hot")},
    "text": {
        "StringLookup": of(vocabulary=["a b", "b c"], output_mode="one_hot"),
        "TextVectorization": of(vocabulary=["a", "b"], output_mode="count"),
    },
}

# What replicas gather for these layers.
GATHERS = {
    # Examples of other replicas are mixed with their own.
    "CutMix": {"GatherV2"},
    "MixUp": {"GatherV2"},
    # A place is that in the tables of all images.
    "ContrastLimitedAdaptiveHistogramEqualization": {"GatherV2"},
    # The gradient is put to its places one row after another.
    "Embedding": {"ResourceScatterSub"},
    "ReversibleEmbedding": {"ResourceScatterSub"},
    # What is crossed has as many numbers as it has.
    "HashedCrossing": {"SparseCross", "Sub"},
    # Strings are split into any number of words.
    "TextVectorization": {"alone"},
}

# The shape of an example and its type. Layers on numbers that are drawn get them from a dense
# layer, so that gradients go through them.
INPUTS: dict[str, tuple[tuple[int, ...], str]] = {
    "row": ((6,), "float32"),
    "series": ((6, 4), "float32"),
    "image": ((8, 8, 3), "float32"),
    "volume": ((4, 4, 4, 2), "float32"),
    "film of lines": ((3, 6, 2), "float32"),
    "film": ((3, 5, 5, 2), "float32"),
    "film of volumes": ((2, 3, 3, 3, 2), "float32"),
    "photograph": ((8, 8, 3), "uint8"),
    "sound": ((64,), "float32"),
    "words": ((6,), "int32"),
    "two columns": ((1,), "int32"),
    "number": ((1,), "float32"),
    "text": ((1,), "string"),
}


NAMES = [(on, name) for on, own in LAYERS.items() for name in own if hasattr(layers, name)]
BY_NAME = {name: on for on, name in NAMES}
# Left out where many are tried together: loops over time and what draws one of many layers take a
# second or more each, and what is behind the last two is computed whole.
ALONE = {
    *("AugMix", "Bidirectional", "ContrastLimitedAdaptiveHistogramEqualization", "ConvLSTM1D"),
    *("ConvLSTM2D", "ConvLSTM3D", "GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "RandAugment"),
    *("RandomColorJitter", "RandomElasticTransform", "RandomErasing", "SimpleRNN"),
    *("SimpleRNNCell", "StackedRNNCells", "HashedCrossing", "TextVectorization"),
}
TOGETHER = {
    "layers": [r for r in NAMES if r[0] not in ("photograph", "volume") and r[1] not in ALONE],
    "augmentation": [r for r in NAMES if r[0] == "photograph" and r[1] not in ALONE],
}
OTHER_LAYERS = {
    "FlaxLayer": "a layer of another package, which TensorFlow cannot differentiate",
    "InputLayer": "of each model",
    "InputSpec": "not a layer",
    "JaxLayer": "a layer of another package, which TensorFlow cannot differentiate",
    "Layer": "the base of all",
    "TFSMLayer": "what was saved in a file",
    "TorchModuleWrapper": "a layer of another package, which TensorFlow cannot differentiate",
    "Wrapper": "the base of those around a layer",
}


def missing(module: Any, known: Collection[str]) -> list[str]:
    """The classes of a module of Keras that have none of their names here."""
    names: dict[Any, set[str]] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value):
            names.setdefault(value, set()).add(name)
    return [kind.__name__ for kind, own in names.items() if not own & {*known}]


def input_of(on: str) -> str:
    return {"two rows": "row", "two series": "series"}.get(on, on)


def start(on: str, x: Any) -> Any:
    """What layers of this kind are called with, given the input."""
    if on == "photograph":
        return layers.Rescaling(1.0, dtype="float32")(x)
    if x.dtype != "float32" or on in ("number", "sound"):
        return [x, x] if on == "two columns" else x
    two = [layers.Dense(x.shape[-1])(x) for _ in range(1 + on.startswith("two "))]
    return two if len(two) > 1 else two[0]


def values(name: str) -> Any:
    """Inputs."""
    (shape, dtype), draw = INPUTS[name], np.random.default_rng(0)
    if dtype == "string":
        return tf.constant(np.array(["a b", "b c", "c"])[draw.integers(0, 3, (ROWS, *shape))])
    if dtype == "float32":
        found = draw.normal(size=(ROWS, *shape)).astype(dtype)
        # What a mask leaves out.
        found[::2, -1:] *= name != "series"
        return found
    return draw.integers(0, 12 if dtype == "int32" else 256, (ROWS, *shape)).astype(dtype)


def model_of(rows: list[tuple[str, str]]) -> keras.Model:
    """A model with a dense layer behind each of these, whose results stand side by side."""
    names = dict.fromkeys(input_of(on) for on, _ in rows)
    inputs = {
        name: keras.Input(INPUTS[name][0], dtype=INPUTS[name][1], name=name) for name in names
    }
    starts = {on: start(on, inputs[input_of(on)]) for on in dict.fromkeys(on for on, _ in rows)}
    heads = []
    for on, name in rows:
        found = layers.Reshape((-1,))(LAYERS[on][name](getattr(layers, name))(starts[on]))
        found = layers.Rescaling(1 / 255 if on == "photograph" else 1.0)(found)
        heads.append(layers.Dense(1, name=f"after_{name}")(found))
    return keras.Model(inputs, layers.Concatenate()(heads) if len(heads) > 1 else heads[0])


def trained_layers(rows: list[tuple[str, str]], after: tuple[str, ...] = ()) -> Case:
    inputs = dict.fromkeys(input_of(on) for on, _ in rows)
    return Case(
        "",
        lambda: model_of(rows),
        lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"},
        lambda: ({n: values(n) for n in inputs}, np.ones((ROWS, len(rows)), "float32"), None),
        batch_size=BATCH,
        fit=lambda directory: {"epochs": 1},
        after=after,
    )


def gathers_of(rows: list[tuple[str, str]]) -> set[str]:
    return set().union(*(GATHERS.get(name, ()) for _, name in rows))


@pytest.fixture(autouse=True)
def graphs_that_run_twice():
    """To optimise them takes half the time."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


def test_every_layer_has_a_row():
    """Or a reason to have none."""
    assert missing(layers, [*BY_NAME, *OTHER_LAYERS]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kinds", TOGETHER)
def test_layers_together(kinds):
    """All that are quick, in one model."""
    # Without a graph `AugMix` and others draw anew for each batch.
    place = alone if kinds == "layers" else None
    require_equal(trained_layers(TOGETHER[kinds]), gathers_of(TOGETHER[kinds]), place=place)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", (2, 3) if ALL_REPLICAS else (2,))
@pytest.mark.parametrize("name", BY_NAME if ALL_REPLICAS else ["ConvLSTM2D", "TextVectorization"])
def test_a_layer_alone(name, replicas):
    """Trained, and asked for predictions."""
    row = BY_NAME[name], name
    require_equal(trained_layers([row], ("predict",)), gathers_of([row]), replicas)


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
        "CosineSimilarity": of(),
        "LogCoshError": of(),
        "MeanAbsoluteError": of(),
        "MeanAbsolutePercentageError": of(),
        "MeanMetricWrapper": of(lambda y, y_pred: ops.max(ops.abs(y - y_pred), axis=-1)),
        "MeanSquaredError": of(),
        "PearsonCorrelation": of(),
        "R2Score": of(),
        "RootMeanSquaredError": of(),
    },
    "shares": {
        "CategoricalAccuracy": of(),
        "CategoricalCrossentropy": of(),
        "F1Score": of(),
        "FBetaScore": of(),
        "KLDivergence": of(),
        "MeanSquaredLogarithmicError": of(),
        "OneHotIoU": of(3, [0, 2]),
        "OneHotMeanIoU": of(3),
        "Poisson": of(),
        "TopKCategoricalAccuracy": of(2),
    },
    "bits": {
        "AUC": of(num_thresholds=20),
        "BinaryAccuracy": of(),
        "BinaryCrossentropy": of(),
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
    "signs": {"CategoricalHinge": of(), "Hinge": of(), "SquaredHinge": of()},
    "kind": {
        "IoU": of(3, [0, 2], sparse_y_pred=False),
        "MeanIoU": of(3, sparse_y_pred=False),
        "SparseCategoricalAccuracy": of(),
        "SparseCategoricalCrossentropy": of(),
        "SparseTopKCategoricalAccuracy": of(2),
    },
}
OTHER_METRICS = {
    "Metric": "the base of all",
    # Neither compares anything: a layer of the model owns them.
    "Mean": "in `Measured`",
    "Sum": "in `Measured`",
}


class Measured(layers.Layer):
    """Owns metrics of what passes."""

    def __init__(self):
        super().__init__()
        self.mean, self.sum = metrics.Mean(name="mean"), metrics.Sum(name="sum")

    def call(self, x):
        self.mean.update_state(x)
        self.sum.update_state(ops.square(x))
        return x


def compared() -> keras.Model:
    """A model with an output for each loss."""
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


def parts_of(table: dict[str, dict[str, Make]], module: Any) -> list[tuple[str, str]]:
    """The rows that this version of Keras has."""
    return [(on, name) for on, own in table.items() for name in own if hasattr(module, name)]


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
    for on, name in parts_of(METRICS, metrics):
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
    assert missing(metrics, known) == []


@pytest.mark.slow
@pytest.mark.parametrize("weighted", (False, True) if ALL_REPLICAS else (True,))
@pytest.mark.parametrize("replicas", (2, 3) if ALL_REPLICAS else (2,))
def test_losses_and_metrics(replicas, weighted):
    """All in one model, whose logs tell them apart."""
    chosen = parts_of(LOSSES, losses)
    weights = {name: np.linspace(0, 2, ROWS, dtype="float32") for _, name in chosen}
    case = Case(
        "",
        compared,
        compile_comparisons,
        lambda: (
            values("row"),
            {name: targets(on) for on, name in chosen},
            weights if weighted else None,
        ),
        batch_size=BATCH,
        fit=lambda directory: {"epochs": 1},
        after=("evaluate",) if ALL_REPLICAS else (),
    )
    # `Circle` compares each example with all others.
    require_equal(case, {"Equal", "MatMul"}, replicas)


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
    "ScheduleFreeAdamW": of(0.05),
}
OTHER_OPTIMIZERS = {"Optimizer": "the base of all", "OptimizerMap": "an argument of another"}


class Optimized(keras.Model):
    """As many dense layers as there are optimizers, each of which updates one.

    Most are rows of `cases.py` as well, so all together are left to `KMG_ALL_REPLICAS=1`.
    """

    def __init__(self):
        super().__init__()
        known = OPTIMIZERS if ALL_REPLICAS else ("Adadelta", "Adagrad", "Adamax", "Ftrl", "SGD")
        names = [name for name in known if hasattr(optimizers, name)]
        self.by_name = {name: OPTIMIZERS[name](getattr(optimizers, name)) for name in names}
        self.parts = {name: layers.Dense(3, name=f"by_{name}") for name in names}

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
    """Each updates a part of one model, three times."""
    case = Case(
        "",
        Optimized,
        lambda: {"optimizer": "sgd"},
        lambda: (values("row"), targets("numbers"), None),
        batch_size=BATCH,
        fit=lambda directory: {"epochs": 2},
        after=(),
    )
    expected, found = require_equal(case, set(), replicas)
    for name, optimizer in expected.by_name.items():
        states = zip(optimizer.variables, found.by_name[name].variables, strict=True)
        apart = [difference(one.numpy(), other.numpy()) for one, other in states]
        assert max(apart) < case.tolerance, name


# One of each family of `keras.applications`: the side of its images, and what makes it small.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ConvNeXtTiny": (32, {}),
    "DenseNet121": (32, {}),
    "EfficientNetB0": (32, {}),
    "EfficientNetV2B0": (32, {}),
    "InceptionResNetV2": (75, {}),
    "InceptionV3": (75, {}),
    "MobileNet": (32, {"alpha": 0.25}),
    "MobileNetV2": (32, {"alpha": 0.35}),
    "MobileNetV3Small": (32, {}),
    "NASNetMobile": (32, {}),
    "ResNet50": (32, {}),
    "ResNet50V2": (32, {}),
    "VGG16": (32, {}),
    "VGG19": (32, {}),
    "Xception": (71, {}),
}


def test_every_family_has_a_row():
    """A family is what Keras has in one file."""
    found = vars(keras.applications)
    kinds = {value.__module__ for value in found.values() if inspect.isfunction(value)}
    assert kinds == {found[name].__module__ for name in FAMILIES}


# They take from five seconds to a minute.
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES if ALL_REPLICAS else ["VGG16"])
def test_a_family(name):
    """Deep networks multiply rounding, so they compute in double precision."""
    side, options = FAMILIES[name]

    def network() -> keras.Model:
        kind, shape = getattr(keras.applications, name), (side, side, 3)
        body = kind(weights=None, include_top=False, pooling="avg", input_shape=shape, **options)
        return keras.Sequential([keras.Input(shape), body, layers.Dense(3)])

    images = np.random.default_rng(0).uniform(0, 1, size=(3, side, side, 3))
    case = Case(
        "",
        lambda: in_precision("float64", network),
        lambda: {"optimizer": optimizers.SGD(0.01), "loss": "mse"},
        lambda: (images, np.ones((3, 3)), None),
        batch_size=3,
        fit=lambda directory: {"epochs": 1},
        after=(),
    )
    require_equal(case, set())
