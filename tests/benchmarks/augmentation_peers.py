"""The peers of bench_augmentation.py and quality_of_augmentation.py, from other packages.

Each function returns a layer that draws from the ranges of `GEOMETRY` and `COLOR`, or of one of
them. A peer that is not installed raises ImportError.
"""

from collections.abc import Callable
from typing import Any

import keras

GEOMETRY = {"flip": "horizontal", "rotation": 0.05, "translation": 0.1, "zoom": 0.1}
COLOR = {"brightness": 0.2, "contrast": 0.2}
"""The ranges of the fused comparison, by the names of this package's arguments."""

RANGES = {
    **GEOMETRY,
    **COLOR,
    "shear": 0.1,
    "crop": (192, 192),
    "saturation": (0.3, 0.7),
    "hue": 0.1,
    "grayscale": 0.5,
}
"""The ranges of single layers."""

OPS, MAGNITUDE = 2, 0.5
"""How many operations RandAugment applies to an image, and how strongly."""

LAYERS: dict[str, Callable[[Any, Any], keras.Layer]] = {
    "flip": lambda layers, value: layers.RandomFlip(value),
    "rotation": lambda layers, value: layers.RandomRotation(value),
    "translation": lambda layers, value: layers.RandomTranslation(value, value),
    "zoom": lambda layers, value: layers.RandomZoom(value),
    "shear": lambda layers, value: layers.RandomShear(value, value),
    "crop": lambda layers, value: layers.RandomCrop(*value),
    "brightness": lambda layers, value: layers.RandomBrightness(value, value_range=(0, 255)),
    "contrast": lambda layers, value: layers.RandomContrast(factor=value, value_range=(0, 255)),
    "saturation": lambda layers, value: layers.RandomSaturation(value, value_range=(0, 255)),
    "hue": lambda layers, value: layers.RandomHue(value, value_range=(0, 255)),
    "grayscale": lambda layers, value: layers.RandomGrayscale(value),
}
"""A layer of `keras.layers` or `keras_cv.layers` for each argument."""


def keras_layer(argument: str) -> keras.Layer:
    """The layer of Keras that does what an argument of ours does."""
    return LAYERS[argument](keras.layers, RANGES[argument])


def keras_stack(ranges: dict[str, Any] = GEOMETRY | COLOR) -> keras.Layer:
    """Several layers of Keras in a row."""
    layers = [LAYERS[argument](keras.layers, value) for argument, value in ranges.items()]
    return keras.layers.Pipeline(layers)


def cv_stack() -> keras.Layer:
    """The same layers of keras-cv, as its `Augmenter` runs them."""
    import keras_cv

    layers = [LAYERS[name](keras_cv.layers, value) for name, value in (GEOMETRY | COLOR).items()]
    return keras_cv.layers.Augmenter(layers)


def cv_rand_augment() -> keras.Layer:
    """RandAugment of keras-cv with the same number of operations for each image.

    By default it leaves out each of them with a probability of one in eleven.
    """
    import keras_cv

    return keras_cv.layers.RandAugment(
        value_range=(0, 255), augmentations_per_image=OPS, magnitude=MAGNITUDE
    )
