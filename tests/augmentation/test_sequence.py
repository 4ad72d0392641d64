"""`Sequence`: how it wraps layers, what they draw, which targets follow, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation import AugmentationLayer, RandomGeometry, Sequence
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.augmentation.sequence import as_layer, as_layers
from keras_multigpu.augmentation.wrapping.function import Function
from keras_multigpu.augmentation.wrapping.keras_cv_layer import KerasCVLayer
from keras_multigpu.augmentation.wrapping.keras_layer import KerasLayer
from keras_multigpu.seeded_layers import folded

IMAGES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
SEEDS = tf.constant([[1, 2], [3, 4]], tf.int32)


@keras.saving.register_keras_serializable("test_sequence")
class Brighter(AugmentationLayer):
    """Adds a number to each image."""

    def draw(self, seeds, shape):
        return {"added": Draws(seeds).uniform(0.0, 9.0)}

    def change_images(self, images, drawn):
        return images + drawn["added"][:, None, None, None]


@keras.saving.register_keras_serializable("test_sequence")
class ImagesOnly(Brighter):
    """Moves nothing along with its images."""

    unsupported = ("bounding_boxes", "segmentation_masks")


@keras.saving.register_keras_serializable("test_sequence")
def turned(images):
    return images[:, ::-1]


def boxes_for(images):
    boxes = np.tile(np.array([[1, 1, 3, 2]], np.float32), (len(images), 1, 1))
    return {"boxes": boxes, "labels": np.ones((len(images), 1), np.int32)}


def test_each_place_in_the_list_has_its_own_draws():
    layer = Sequence([Brighter(), Brighter()])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn) == ["0: Brighter", "1: Brighter"]
    expected = [Brighter().draw(folded(SEEDS, place), (4, 6, 3))["added"] for place in (0, 1)]
    for values, known in zip(drawn.values(), expected, strict=True):
        np.testing.assert_array_equal(values["added"], known)
    assert np.all(expected[0] != expected[1])
    changed = layer.apply(IMAGES, drawn)
    np.testing.assert_allclose(
        changed, IMAGES + (expected[0] + expected[1]).numpy()[:, None, None, None], rtol=1e-6
    )


def test_a_sequence_inside_a_sequence_has_its_own_draws():
    layer = Sequence([Brighter(), Sequence([Brighter()])])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn["1: Sequence"]) == ["0: Brighter"]
    inner = Brighter().draw(folded(folded(SEEDS, 1), 0), (4, 6, 3))
    np.testing.assert_array_equal(drawn["1: Sequence"]["0: Brighter"]["added"], inner["added"])


def test_later_layers_see_the_changed_shape():
    layer = Sequence([keras.layers.Resizing(2, 3), Brighter(), keras.layers.CenterCrop(1, 2)])
    assert layer.changed_shape((4, 6, 3)) == (1, 2, 3)
    assert layer(IMAGES).shape == (2, 1, 2, 3)
    resized = keras.layers.CenterCrop(1, 2)(keras.layers.Resizing(2, 3)(IMAGES.astype(np.float32)))
    np.testing.assert_array_equal(layer(IMAGES, training=False), resized)


def test_targets_pass_through_all_layers():
    layer = Sequence(
        [keras.layers.RandomFlip("horizontal"), keras.layers.Rescaling(1.0), Brighter()],
        bounding_box_format="xyxy",
        segmentation_masks=True,
    )
    count = 16
    images = np.tile(np.arange(6, dtype=np.float32)[:, None], (count, 4, 1, 3))
    masks = images[..., :1].astype(np.int32)
    data = {
        "images": images,
        "segmentation_masks": masks,
        "bounding_boxes": boxes_for(images),
        "labels": np.arange(count),
        "others": np.ones(count),
    }
    changed = layer(data)
    flipped = changed["segmentation_masks"].numpy()[:, 0, 0, 0] == 5
    assert 0 < flipped.sum() < count
    left_most = np.where(flipped, 6 - 3, 1)
    np.testing.assert_allclose(changed["bounding_boxes"]["boxes"][:, 0, 0], left_most, atol=1e-5)
    np.testing.assert_array_equal(changed["labels"], np.arange(count))
    np.testing.assert_array_equal(changed["others"], np.ones(count))
    rising = changed["images"][:, 0, 5, 0] > changed["images"][:, 0, 0, 0]
    np.testing.assert_array_equal(rising, ~flipped)


@pytest.mark.parametrize(
    "layers",
    [
        [ImagesOnly()],
        [Brighter(), Sequence([ImagesOnly()])],
        [keras.layers.RandomElasticTransform(0.5)],
        [keras.layers.Pipeline([keras.layers.RandomElasticTransform(0.5)])],
        [lambda images: images],
    ],
)
def test_targets_are_refused_at_construction(layers):
    """The layer that cannot move them is found at any depth."""
    Sequence(layers)
    with pytest.raises(ValueError, match="cannot change `bounding_boxes`"):
        Sequence(layers, bounding_box_format="xyxy")
    with pytest.raises(ValueError, match="cannot change `segmentation_masks`"):
        Sequence(layers, segmentation_masks=True)


@pytest.mark.parametrize("layers", [[], Brighter(), None])
def test_what_is_no_list_of_layers_is_refused(layers):
    with pytest.raises(ValueError, match="`layers` is not a list of layers"):
        Sequence(layers)


@pytest.mark.in_test_all("test_all_layers.py saves layers")
def test_a_saved_model_draws_the_same(tmp_path):
    keras_cv = pytest.importorskip("keras_cv")
    inner = Sequence([keras.layers.RandomFlip(), keras_cv.layers.RandomBrightness(0.3)])
    layer = Sequence([Brighter(), inner, Function(turned)], seed=4)
    inputs = keras.Input((4, 6, 3))
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    images = IMAGES.astype(np.float32)
    np.testing.assert_array_equal(again(images, training=True), model(images, training=True))
    np.testing.assert_array_equal(again(images), model(images))
    assert list(again.layers[1].draw(SEEDS, (4, 6, 3))) == list(layer.draw(SEEDS, (4, 6, 3)))


def test_each_kind_of_layer_gets_its_wrapper():
    keras_cv = pytest.importorskip("keras_cv")
    inner = Sequence([tf.image.flip_up_down])
    assert as_layer(inner) is inner
    assert type(as_layer(keras.layers.RandomFlip())) is KerasLayer
    assert type(as_layer(keras_cv.layers.RandomFlip())) is KerasCVLayer
    assert type(as_layer(tf.image.flip_up_down)) is Function


def test_wrappers_get_the_format_of_boxes():
    assert as_layer(keras.layers.RandomFlip(), "xywh").bounding_box_format == "xywh"


def test_pipelines_become_their_layers():
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
    """Called like a function, it would construct a layer from the images."""
    message = f"{layer.__name__} is a class, not a layer.*Pass `{layer.__name__}"
    with pytest.raises(ValueError, match=message):
        wrapper(layer)


@pytest.mark.parametrize("row", [keras.Sequential([]), keras.layers.Pipeline([])], ids=type)
def test_an_empty_model_or_pipeline_is_refused(row):
    with pytest.raises(ValueError, match=f"This {type(row).__name__} has no layers"):
        Sequence([row])


@pytest.mark.parametrize("layer", [3, None, RandomGeometry(), lambda images: images], ids=str)
def test_wrappers_refuse_what_is_not_a_layer_of_their_package(layer):
    for wrapper, origin in ((KerasLayer, "Keras"), (KerasCVLayer, "keras-cv")):
        with pytest.raises(
            ValueError, match=f"not a layer of {origin}.*Pass other.*Received: layer="
        ):
            wrapper(layer)


def test_wrappers_refuse_layers_of_the_other_package():
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
