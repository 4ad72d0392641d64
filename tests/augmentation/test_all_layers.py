"""What every layer of this package promises, in tables; see `helpers.layer_checks`."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import (
    COLOR,
    GEOMETRY,
    SHAPES,
    check_graphs,
    check_layer,
    check_saved_model,
    drawn_for,
    pictures,
)
from test_augmentation_layer import Shifted

from keras_multigpu.augmentation import (
    KerasLayer,
    Mix,
    RandAugment,
    RandomColor,
    RandomErasing,
    RandomGeometry,
    Sequence,
    TrivialAugment,
    compilation,
    recipe,
)

# Layers, and the arguments of `check_layer` for them.
LAYERS = {
    "Mix": (Mix(0.3, 0.4, seed=1), {"shapes": ((6, 5, 4, 3),), "labels": True}),
    "Mix, by CutMix": (Mix(None), {"labels": True}),
    "Mix, by MixUp": (Mix(cut_mix=None), {"labels": True}),
    "RandAugment": (
        RandAugment(2, 12, magnitude_std=1.5, seed=3),
        {"shapes": ((3, 9, 7, 1), (0, 8, 8, 3))},
    ),
    "RandomColor": (RandomColor(**COLOR), {"shapes": SHAPES}),
    "RandomColor, 0 to 1": (RandomColor(**COLOR, value_range=(0, 1)), {"value_range": (0, 1)}),
    "RandomErasing": (RandomErasing(1.0), {"shapes": SHAPES}),
    "RandomErasing, gray": (RandomErasing(1.0, fill_value=128), {}),
    "RandomGeometry": (RandomGeometry(**GEOMETRY, crop=(5, 3), size=(6, 7)), {"shapes": SHAPES}),
    "RandomGeometry, copied": (RandomGeometry(flip="horizontal", crop=(5, 3)), {}),
    "TrivialAugment": (
        TrivialAugment(value_range=(0, 1), seed=3),
        {"value_range": (0, 1), "shapes": ((2, 8, 11, 4),)},
    ),
    "Sequence": (Sequence([RandomColor(hue=0.2), keras.layers.RandomFlip()], seed=4), {}),
    "KerasLayer": (KerasLayer(keras.layers.RandomFlip(), seed=5), {}),
    **{
        f"recipe, {name}": (recipe(name, seed=1), {"shapes": ((3, 12, 16, 3),)})
        for name in ("light", "standard", "strong", "imagenet")
    },
    "a user's": (Shifted(seed=7, bounding_box_format="xywh"), {"shapes": SHAPES}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_what_every_layer_promises(name):
    layer, settings = LAYERS[name]
    check_layer(layer, **settings)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("Mix, by CutMix", 1e-3), ("RandomErasing", 0), ("RandomGeometry, copied", 1e-3)],
)
@pytest.mark.slow
def test_a_layer_gives_the_same_pixels_in_every_graph(name, tolerance):
    layer, settings = LAYERS[name]
    check_graphs(layer, host_tolerance=tolerance, labels=settings.get("labels", False))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [RandomGeometry(**GEOMETRY, seed=1), Shifted(seed=7)], ids=type)
def test_a_model_with_the_layer_is_saved_and_loaded(layer, tmp_path):
    check_saved_model(layer, tmp_path)


@pytest.mark.parametrize("layer", [RandomColor(**COLOR), RandomGeometry(**GEOMETRY)], ids=type)
def test_with_a_gpu_nothing_is_compiled_and_no_product_is_rounded(layer, monkeypatch):
    """XLA may lack a compiler there, and matrix products round to TensorFloat-32."""
    images = pictures((3, 9, 7, 3))
    drawn = drawn_for(layer, images.shape)

    def change():
        return tf.function(lambda: layer.apply(images, drawn), autograph=False)()

    expected = change()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a card"])
    monkeypatch.setattr(compilation, "compile_function", None)
    monkeypatch.setattr(tf, "matmul", None)
    np.testing.assert_allclose(change(), expected, rtol=0, atol=0.02)


HALF = np.float32(0.5)
PAIR = (np.float32(0.25), HALF)
TWO = np.int64(2)
SIZE = np.array([4, 4])
VALUES = (np.int64(0), np.float32(255))


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (Mix, {"mix_up": HALF, "cut_mix": HALF, "num_classes": TWO}),
        (RandAugment, {"num_ops": TWO, "magnitude": TWO, "magnitude_std": HALF}),
        (RandomColor, {"brightness": HALF, "contrast": PAIR, "saturation": PAIR}),
        (RandomColor, {"hue": np.array(PAIR), "grayscale": HALF}),
        (RandomErasing, {"factor": HALF, "scale": PAIR, "fill_value": HALF, "aspect_ratio": PAIR}),
        (RandomGeometry, {"rotation": PAIR[::-1], "translation": [PAIR] * 2, "zoom": HALF}),
        (RandomGeometry, {"shear": np.array([PAIR, PAIR]), "fill_value": TWO}),
        (RandomGeometry, {"crop_area": np.array(PAIR), "aspect_ratio": PAIR}),
        (RandomGeometry, {"crop": SIZE, "size": tuple(SIZE)}),
        (TrivialAugment, {"value_range": VALUES}),
    ],
)
def test_numpy_numbers_work_as_pythons_do(layer, given):
    """And the layer's configuration can be written as JSON."""
    made = layer(**given)
    config = json.loads(json.dumps(made.get_config()))
    for name, value in given.items():
        np.testing.assert_array_equal(config[name], value)
    numbers = {name: np.asarray(value).tolist() for name, value in given.items()}
    assert json.dumps(layer(**numbers, name=made.name).get_config()) == json.dumps(config)
    seeds = tf.constant([[1, 2], [3, 4]])
    drawn, expected = (one.draw(seeds, (8, 6, 3)) for one in (made, layer(**numbers)))
    tf.nest.map_structure(np.testing.assert_array_equal, drawn, expected)
