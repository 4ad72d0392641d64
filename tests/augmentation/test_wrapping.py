"""What becomes of layers and functions in a `Sequence`."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu.augmentation import RandomGeometry, Sequence
from keras_multigpu.augmentation.function import Function
from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer
from keras_multigpu.augmentation.keras_layer import KerasLayer
from keras_multigpu.augmentation.sequence import as_layer, as_layers


def test_each_kind_gets_its_wrapper():
    keras_cv = pytest.importorskip("keras_cv")
    inner = Sequence([tf.image.flip_up_down])
    assert as_layer(inner) is inner
    assert type(as_layer(keras.layers.RandomFlip())) is KerasLayer
    assert type(as_layer(keras_cv.layers.RandomFlip())) is KerasCVLayer
    assert type(as_layer(tf.image.flip_up_down)) is Function


def test_the_format_of_boxes_is_handed_on():
    assert as_layer(keras.layers.RandomFlip(), "xywh").bounding_box_format == "xywh"


def test_pipelines_are_taken_apart():
    row = keras.layers.Pipeline(
        [
            keras.layers.RandomFlip(),
            keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.RandomHue(0.1)]),
        ]
    )
    assert [layer.title for layer in as_layers(row)] == ["RandomFlip", "Rescaling", "RandomHue"]


def test_anything_else_is_refused():
    with pytest.raises(ValueError, match="neither a layer nor a function.*Received: layer='flip'"):
        as_layer("flip")


@pytest.mark.parametrize("wrapper", [as_layer, KerasLayer, KerasCVLayer, Function])
@pytest.mark.parametrize("layer", [keras.layers.RandomFlip, RandomGeometry])
def test_a_class_is_refused(layer, wrapper):
    """It could be called as a function is, and would make a layer of the images."""
    message = f"{layer.__name__} is a class, not a layer.*Pass `{layer.__name__}"
    with pytest.raises(ValueError, match=message):
        wrapper(layer)


@pytest.mark.parametrize("row", [keras.Sequential([]), keras.layers.Pipeline([])], ids=type)
def test_an_empty_row_is_refused(row):
    with pytest.raises(ValueError, match=f"This {type(row).__name__} has no layers"):
        Sequence([row])


@pytest.mark.parametrize("layer", [3, None, RandomGeometry(), lambda images: images], ids=str)
def test_what_needs_no_wrapper_is_refused(layer):
    for wrapper, origin in ((KerasLayer, "Keras"), (KerasCVLayer, "keras-cv")):
        with pytest.raises(
            ValueError, match=f"not a layer of {origin}.*Pass other.*Received: layer="
        ):
            wrapper(layer)


def test_each_wrapper_takes_its_own_package():
    keras_cv = pytest.importorskip("keras_cv")
    with pytest.raises(ValueError, match="not a layer of keras-cv"):
        KerasCVLayer(keras.layers.RandomFlip())
    with pytest.raises(ValueError, match="not a layer of Keras"):
        KerasLayer(keras_cv.layers.RandomFlip())


def test_flags_are_true_or_false():
    wrong = {"moves_pixels": "no"}
    for make in (
        lambda: KerasLayer(keras.layers.RandomFlip(), **wrong),
        lambda: Function(tf.image.flip_up_down, **wrong),
        lambda: Function(tf.image.flip_up_down, moves_pixels=None),
        lambda: Sequence([tf.image.flip_up_down], segmentation_masks="yes"),
    ):
        with pytest.raises(ValueError, match="is neither True nor False.*Received: "):
            make()
    keras_cv = pytest.importorskip("keras_cv")
    with pytest.raises(ValueError, match="`moves_pixels` is neither"):
        KerasCVLayer(keras_cv.layers.RandomFlip(), **wrong)
