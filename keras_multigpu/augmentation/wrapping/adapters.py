"""Layers of Keras and keras-cv, and functions, as `AugmentationLayer`."""

from typing import Any

import keras

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.function import Function
from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer
from keras_multigpu.augmentation.keras_layer import KerasLayer
from keras_multigpu.checks import value_error
from keras_multigpu.seeded_layers import in_a_row, is_keras_cv


def as_layer(layer: Any, bounding_box_format: str | None = None) -> AugmentationLayer:
    """A layer or function as a layer of this package."""
    if isinstance(layer, AugmentationLayer):
        return layer
    if isinstance(layer, keras.Layer):
        wrapper = KerasCVLayer if is_keras_cv(layer) else KerasLayer
        return wrapper(layer, bounding_box_format=bounding_box_format)
    if callable(layer):
        return Function(layer, bounding_box_format=bounding_box_format)
    raise value_error(
        "This is neither a layer nor a function.",
        "Expected a layer of `keras_multigpu.augmentation`, of Keras or of keras-cv, or a "
        "function of a batch of images.",
        "Pass for example `keras.layers.RandomFlip('horizontal')`.",
        layer=layer,
    )


def as_layers(layer: Any, bounding_box_format: str | None = None) -> list[AugmentationLayer]:
    """A layer or function as layers of this package; several where Keras puts layers in a row."""
    # One by one, targets pass by those that leave pixels in their place.
    parts = in_a_row(layer)
    if parts is not None:
        if not parts:
            raise value_error(
                f"This {type(layer).__name__} has no layers.",
                "Expected at least one in it.",
                "Put layers into it, or leave it out.",
                layer=layer.name,
            )
        return [one for part in parts for one in as_layers(part, bounding_box_format)]
    return [as_layer(layer, bounding_box_format)]
