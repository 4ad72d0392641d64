"""Each layer of Keras trains as on one device.

They are looked up in Keras: one that is in no table here fails. Many are tried in one model. With
the environment variable `KMG_ALL_REPLICAS=1` each is tried alone as well, on 2 and on 3 replicas.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS, first_rows
from helpers.keras_versions import ONE_HOT_BINS, rows_of_the_newest
from keras import layers

from exactness.cases import Case
from exactness.parts_of_keras import ROWS, Make, missing, of, parts_of, trained_once
from exactness.runs import alone, require_equal

pytestmark = [pytest.mark.usefixtures("graphs_that_run_twice"), rows_of_the_newest]


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
    "number": {"Discretization": of([-1.0, 0.0, 1.0], output_mode=ONE_HOT_BINS)},
    "text": {
        "StringLookup": of(vocabulary=["a b", "b c"], output_mode="one_hot"),
        "TextVectorization": of(vocabulary=["a", "b"], output_mode="count"),
    },
}

# What replicas gather for these layers.
GATHERS = {
    # Examples of other replicas are mixed with their own.
    "CutMix": "GatherV2",
    "MixUp": "GatherV2",
    # A place is that in the tables of all images.
    "ContrastLimitedAdaptiveHistogramEqualization": "GatherV2",
    # The gradient is put to its places one row after another.
    "Embedding": "ResourceScatterSub",
    "ReversibleEmbedding": "ResourceScatterSub",
    # What is crossed has as many numbers as it has.
    "HashedCrossing": "SparseCross Sub",
    # Strings are split into any number of words.
    "TextVectorization": "alone",
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


NAMES = parts_of(LAYERS, layers)
BY_NAME = {name: on for on, name in NAMES}
# TensorFlow computes these with the operations of their two-dimensional forms.
FLAT = {
    *("AdaptiveAveragePooling1D", "AdaptiveMaxPooling1D", "AveragePooling1D", "Conv1D"),
    *("Conv1DTranspose", "Cropping1D", "DepthwiseConv1D", "GlobalAveragePooling1D"),
    *("GlobalMaxPooling1D", "MaxPooling1D", "SeparableConv1D", "SpatialDropout1D"),
    *("UpSampling1D", "ZeroPadding1D"),
}
# Left out where many are tried together: loops over time and layers that draw one of many take a
# second or more each, and what stands behind the last two is computed whole.
ALONE = FLAT | {
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
    return trained_once(
        lambda: model_of(rows),
        lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"},
        lambda: ({n: values(n) for n in inputs}, np.ones((ROWS, len(rows)), "float32"), None),
        after=after,
        gathers=" ".join(GATHERS.get(name, "") for _, name in rows),
    )


def test_every_layer_has_a_row():
    """Or a reason to have none."""
    assert missing(layers, [*BY_NAME, *OTHER_LAYERS]) == []


# Augmentation has tests of its own.
@pytest.mark.slow
@pytest.mark.parametrize("kinds", first_rows(TOGETHER, 1))
def test_layers_together(kinds):
    # Without a graph `AugMix` and others draw anew for each batch.
    place = alone if kinds == "layers" else Case.compiled
    require_equal(trained_layers(TOGETHER[kinds]), place=place)


# The layers together show most.
@pytest.mark.slow
@pytest.mark.parametrize("replicas", (2, 3) if ALL_REPLICAS else (2,))
@pytest.mark.parametrize("name", first_rows(BY_NAME))
def test_a_layer_alone(name, replicas):
    require_equal(trained_layers([(BY_NAME[name], name)], ("predict",)), replicas)
