"""Layers of keras-cv inside this package: draws by seed, targets that follow, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer

keras_cv = pytest.importorskip("keras_cv")

HEIGHT, WIDTH = 32, 48
CV = keras_cv.layers
RANGE = {"value_range": (0, 255)}

LAYERS = {
    "AutoContrast": lambda: CV.AutoContrast(**RANGE),
    "ChannelShuffle": lambda: CV.ChannelShuffle(),
    "Equalization": lambda: CV.Equalization(**RANGE),
    "Grayscale": lambda: CV.Grayscale(output_channels=3),
    "GridMask": lambda: CV.GridMask(),
    "JitteredResize": lambda: CV.JitteredResize((24, 28), (0.9, 1.0), bounding_box_format="xywh"),
    "Posterization": lambda: CV.Posterization(bits=3, **RANGE),
    "RandomApply": lambda: CV.RandomApply(CV.RandomFlip()),
    "RandomAugmentationPipeline": lambda: CV.RandomAugmentationPipeline([CV.RandomFlip()], 2),
    "RandomBrightness": lambda: CV.RandomBrightness(0.1),
    "RandomChannelShift": lambda: CV.RandomChannelShift(factor=0.3, **RANGE),
    "RandomChoice": lambda: CV.RandomChoice([CV.RandomFlip(), CV.RandomHue(0.5, **RANGE)]),
    "RandomColorDegeneration": lambda: CV.RandomColorDegeneration(0.5),
    "RandomColorJitter": lambda: CV.RandomColorJitter((0, 255), 0.1, 0.1, 0.1, 0.1),
    "RandomContrast": lambda: CV.RandomContrast((0, 255), 0.3),
    "RandomCrop": lambda: CV.RandomCrop(28, 40),
    "RandomCropAndResize": lambda: CV.RandomCropAndResize((24, 28), (0.9, 1.0), (0.9, 1.1)),
    "RandomCutout": lambda: CV.RandomCutout(0.3, 0.3, fill_value=20.0),
    "RandomFlip": lambda: CV.RandomFlip("horizontal_and_vertical"),
    "RandomGaussianBlur": lambda: CV.RandomGaussianBlur(3, (0.0, 1.0)),
    "RandomHue": lambda: CV.RandomHue(0.5, **RANGE),
    "RandomJpegQuality": lambda: CV.RandomJpegQuality((80, 100)),
    "RandomRotation": lambda: CV.RandomRotation(0.1, fill_mode="constant"),
    "RandomSaturation": lambda: CV.RandomSaturation((0.2, 0.8)),
    "RandomSharpness": lambda: CV.RandomSharpness(0.5, **RANGE),
    "RandomShear": lambda: CV.RandomShear(0.3, 0.3, fill_mode="constant"),
    "RandomTranslation": lambda: CV.RandomTranslation(0.1, 0.1, fill_mode="constant"),
    "RandomZoom": lambda: CV.RandomZoom((-0.2, 0.1), (-0.2, 0.1), fill_mode="constant"),
    "Rescaling": lambda: CV.Rescaling(0.5),
    "Resizing": lambda: CV.Resizing(20, 30),
    "Solarization": lambda: CV.Solarization(threshold_factor=0.5, **RANGE),
}
"""Every layer of keras-cv for images that this package can seed, besides RandAugment."""

NO_BOXES = {
    "RandomApply",
    "RandomAugmentationPipeline",
    "RandomChoice",
    "RandomCropAndResize",
    "RandomShear",
    "RandomZoom",
    "Resizing",
}
NO_MASKS = {"RandomCrop", "RandomRotation"}
# The others leave targets alone, in the same two lines of keras-cv.
WITH_TARGETS = {
    "AutoContrast",
    "JitteredResize",
    "RandomCrop",
    "RandomCropAndResize",
    "RandomCutout",
    "RandomFlip",
    "RandomGaussianBlur",
    "RandomRotation",
    "RandomShear",
    "RandomTranslation",
    "RandomZoom",
    "Resizing",
}
# How colours change says nothing about where the bright rectangle is.
BRIGHTNESS_CHANGES = {"GridMask", "RandomCutout", "RandomJpegQuality", "Solarization"}


def examples_for(name, count):
    """Dark images with a bright rectangle, its mask of sevens and its box after a lost one."""
    images = np.full((count, HEIGHT, WIDTH, 3), 20, np.float32)
    images[:, 12:20, 18:28] = 200
    data = {"images": images, "labels": np.arange(count)}
    if name in WITH_TARGETS - NO_MASKS:
        data["segmentation_masks"] = np.where(images[..., :1] > 100, 7, 0).astype(np.int32)
    if name in WITH_TARGETS - NO_BOXES:
        boxes = np.array([[-90, -90, -80, -80], [18, 12, 28, 20]], np.float32)
        labels = np.tile([[4, 3]], (count, 1))
        data["bounding_boxes"] = {"boxes": np.tile(boxes, (count, 1, 1)), "labels": labels}
    return data


def seeds_for(count):
    """Seeds for each of some images."""
    return tf.stack([tf.range(count) * 7919 + 3, tf.range(count) + 11], axis=1)


def pipeline_of(layer):
    """The layer as a pipeline calls it, on batches of any size."""

    @tf.function(autograph=False)
    def run(data, seeds):
        return layer.apply(data, layer.draw(seeds, (HEIGHT, WIDTH, 3)), on_host=True)

    def arrays(data, seeds):
        tensors = keras.tree.map_structure(tf.convert_to_tensor, data)
        specs = keras.tree.map_structure(
            lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), tensors
        )
        graph = run.get_concrete_function(specs, tf.TensorSpec((None, 2), tf.int32))
        outputs = graph(*keras.tree.flatten(tensors), seeds)
        return keras.tree.map_structure(np.array, outputs)

    return arrays


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slow
def test_each_layer(name):
    """Each image is drawn for by its seeds alone; masks, boxes and labels go with it."""
    layer = KerasCVLayer(LAYERS[name]())
    layer.bounding_box_format = "xyxy"
    data, seeds = examples_for(name, 3), seeds_for(3)
    run = pipeline_of(layer)
    changed = run(data, seeds)
    alone = run(keras.tree.map_structure(lambda leaf: leaf[1:], data), seeds[1:])
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_array_equal(one[1:], other), changed, alone
    )
    images = changed["images"]
    assert images.dtype == np.float32
    assert changed["labels"].tolist() == [0, 1, 2]
    assert layer.changed_shape((HEIGHT, WIDTH, 3)) == images.shape[1:]
    bright = images[..., 0] > (images.min() + images.max()) / 2
    if "segmentation_masks" in changed:
        masks = changed["segmentation_masks"]
        assert masks.dtype == np.int32
        assert set(np.unique(masks)) == {0, 7}
        assert name in BRIGHTNESS_CHANGES or np.mean(bright != (masks[..., 0] == 7)) < 0.04
    if "bounding_boxes" in changed and name not in BRIGHTNESS_CHANGES:
        labels, boxes = (changed["bounding_boxes"][key] for key in ("labels", "boxes"))
        assert labels[:, 1].tolist() == [3] * 3
        for image, box in zip(bright, boxes[:, 1], strict=True):
            rows, columns = np.nonzero(image)
            around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            np.testing.assert_allclose(box, around, atol=1.5)


@pytest.mark.parametrize("name", ["RandomCropAndResize", "RandomShear", "RandomZoom", "Resizing"])
def test_boxes_are_refused_at_construction(name):
    """Where keras-cv cannot move boxes, or moves them wrongly."""
    with pytest.raises(ValueError, match=f"{name} cannot change `bounding_boxes`"):
        KerasCVLayer(LAYERS[name](), bounding_box_format="xyxy")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CV.MixUp(), "MixUp mixes the examples"),
        (lambda: CV.RandomChoice([CV.CutMix()]), "CutMix mixes the examples"),
        (lambda: CV.Mosaic(), "Mosaic mixes the examples"),
        (lambda: CV.AugMix((0, 255)), "AugMix draws from TensorFlow's global stream"),
        (
            lambda: CV.RandomCutout(0.3, 0.3, fill_mode="gaussian_noise"),
            "RandomCutout draws from TensorFlow's global stream .RandomStandardNormal",
        ),
        (lambda: CV.RandomAspectRatio((0.8, 1.2)), "RandomAspectRatio gives each image another"),
    ],
)
@pytest.mark.slow
def test_layers_are_refused_at_construction(make, message):
    """Those that are not a function of one example and its seed, or cannot be batched."""
    with pytest.raises(ValueError, match=message):
        KerasCVLayer(make())


def test_masks_are_refused():
    """By a rotation that does not know the number of classes."""
    layer = KerasCVLayer(LAYERS["RandomRotation"]())
    with pytest.raises(ValueError, match="RandomRotation cannot change `segmentation_masks`"):
        layer.require_support("segmentation_masks")


@pytest.mark.slow
def test_a_lost_box_is_marked_and_others_keep_their_places():
    """keras-cv takes lost boxes out; here each box stays in its row."""
    layer = KerasCVLayer(LAYERS["RandomFlip"](), bounding_box_format="xyxy")
    changed = pipeline_of(layer)(examples_for("RandomFlip", 2), seeds_for(2))["bounding_boxes"]
    assert changed["labels"].tolist() == [[-1, 3], [-1, 3]]
    assert changed["boxes"][:, 0].tolist() == [[0, 0, 0, 0]] * 2


@pytest.mark.parametrize("name", ["RandomFlip", "RandomChoice"])
@pytest.mark.slow
def test_in_a_model(name):
    """A batch, also an empty one, is drawn for by one seed; at inference nothing happens."""
    images = np.random.default_rng(0).uniform(0, 255, (8, 6, 5, 3)).astype(np.float32)
    first, again = (KerasCVLayer(LAYERS[name](), seed=3)(images) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != images)
    layer = KerasCVLayer(LAYERS[name](), seed=3)
    np.testing.assert_array_equal(layer(images, training=False), images)
    assert layer(images[:0]).shape == (0, 6, 5, 3)


def test_sizes_at_inference():
    """What crops images resizes them, and what is not an augmentation stays."""
    images = np.full((2, HEIGHT, WIDTH, 3), 20, np.float32)
    crop = KerasCVLayer(LAYERS["RandomCropAndResize"]())
    np.testing.assert_allclose(crop(images, training=False), np.full((2, 24, 28, 3), 20))
    scaled = KerasCVLayer(LAYERS["Rescaling"]())(images, training=False)
    np.testing.assert_allclose(scaled, images / 2)


@pytest.mark.slow
def test_config_round_trip():
    """With the keras-cv layer inside."""
    layer = KerasCVLayer(CV.RandomRotation(0.1), seed=5, bounding_box_format="xywh")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == layer.get_config()
    assert again.title == "RandomRotation"
