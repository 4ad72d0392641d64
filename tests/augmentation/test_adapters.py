"""What becomes of layers and functions in a `Sequence`."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu.augmentation import Sequence
from keras_multigpu.augmentation.adapters import as_layer
from keras_multigpu.augmentation.adapters import as_layers
from keras_multigpu.augmentation.function import Function
from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer
from keras_multigpu.augmentation.keras_layer import KerasLayer


def test_each_kind_gets_its_wrapper():
    """Layers of this package stay as they are."""
    keras_cv = pytest.importorskip("keras_cv")
    inner = Sequence([tf.image.flip_up_down])
    assert as_layer(inner) is inner
    assert type(as_layer(keras.layers.RandomFlip())) is KerasLayer
    assert type(as_layer(keras_cv.layers.RandomFlip())) is KerasCVLayer
    assert type(as_layer(tf.image.flip_up_down)) is Function


def test_the_format_of_boxes_is_handed_on():
    assert as_layer(keras.layers.RandomFlip(), "xywh").bounding_box_format == "xywh"


def test_pipelines_are_taken_apart():
    """Also one in another, in order."""
    row = keras.layers.Pipeline(
        [
            keras.layers.RandomFlip(),
            keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.RandomHue(0.1)]),
        ]
    )
    assert [layer.title for layer in as_layers(row)] == ["RandomFlip", "Rescaling", "RandomHue"]


def test_anything_else_is_refused():
    with pytest.raises(ValueError, match="no layer and no function.*Received: layer='flip'"):
        as_layer("flip")
