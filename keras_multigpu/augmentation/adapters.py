"""Layers of Keras and keras-cv, and functions, as `AugmentationLayer`."""

from typing import Any

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer


def as_layer(layer: Any, bounding_box_format: str | None = None) -> AugmentationLayer:
    """A layer or function as a layer of this package.

    Args:
        layer: Any layer, or a function of images.
        bounding_box_format: How boxes come, for layers that do not know it yet.
    """
    if isinstance(layer, AugmentationLayer):
        return layer
    raise NotImplementedError
