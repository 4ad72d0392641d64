"""`Sequence`: several layers as one."""

from collections.abc import Sequence as SequenceType
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Example, Shape
from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer
from keras_multigpu.augmentation.keras_layer import KerasLayer
from keras_multigpu.checks import value_error
from keras_multigpu.seeded_layers import fold_seeds, in_a_row, is_keras_cv, require_instance


@keras.saving.register_keras_serializable("keras_multigpu")
class Sequence(AugmentationLayer):
    """Several layers as one: of this package, Keras and keras-cv.

    A `keras.layers.Pipeline` or `keras.Sequential` is taken apart into its layers. Labels, sample
    weights, boxes and masks pass through all of them; a layer that cannot handle boxes or masks
    raises a `ValueError`.

    Args:
        layers: The layers, in the order in which they are applied.
        bounding_box_format: The format of boxes, as in `AugmentationLayer`.
        **kwargs: `seed`, `name` and `dtype`.
    """

    # `Batches(augment=[...])` derives seeds for the layers of a list in the same way.
    makes_seeds = True

    def __init__(
        self,
        layers: SequenceType[Any],
        *,
        bounding_box_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bounding_box_format=bounding_box_format, **kwargs)
        if not isinstance(layers, list | tuple) or not layers:
            raise value_error(
                "`layers` is not a list of layers.",
                "Expected a list or tuple with at least one layer.",
                "Pass for example `[keras.layers.RandomFlip('horizontal')]`.",
                layers=layers,
            )
        self.layers = [one for layer in layers for one in as_layers(layer, bounding_box_format)]
        if bounding_box_format is not None:
            self.require_support("bounding_boxes")

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        drawn = {}
        # Each place has its own seeds, or two equal layers in a row would draw the same.
        for place, (name, layer) in enumerate(self.steps()):
            drawn[name] = layer.draw(fold_seeds(seeds, place), shape)
            shape = layer.changed_shape(shape)
        return drawn

    def change(self, example: Example, drawn: Drawn) -> Example:
        names = [name for name, _ in self.steps()]
        require_draws(drawn, names, needed=names)
        for name, layer in self.steps():
            example = layer.change(example, drawn[name])
        return example

    def at_inference(self, example: Example) -> Example:
        for layer in self.layers:
            example = layer.at_inference(example)
        return example

    def changed_shape(self, shape: Shape) -> Shape:
        for layer in self.layers:
            shape = layer.changed_shape(shape)
        return shape

    def steps(self) -> list[tuple[str, AugmentationLayer]]:
        """The layers with the names of their draws, such as `"0: RandomColor"`."""
        return [(f"{place}: {layer.title}", layer) for place, layer in enumerate(self.layers)]

    def require_support(self, *kinds: str) -> None:
        for layer in getattr(self, "layers", ()):
            layer.require_support(*kinds)

    def get_config(self) -> dict[str, Any]:
        layers = [keras.saving.serialize_keras_object(layer) for layer in self.layers]
        return {**super().get_config(), "layers": layers}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Sequence":
        layers = [keras.saving.deserialize_keras_object(layer) for layer in config["layers"]]
        return cls(**{**config, "layers": layers})


def as_layer(layer: Any, bounding_box_format: str | None = None) -> AugmentationLayer:
    """Wrap a layer in one of this package."""
    if isinstance(layer, AugmentationLayer):
        return layer
    require_instance(layer)
    if isinstance(layer, keras.Layer):
        wrapper = KerasCVLayer if is_keras_cv(layer) else KerasLayer
        return wrapper(layer, bounding_box_format=bounding_box_format)
    raise value_error(
        "This is not a layer.",
        "Expected a layer of `keras_multigpu.augmentation`, of Keras or of keras-cv.",
        "Put a function into the list `Batches(augment=[...])`, or in a model into a "
        "`keras.layers.Lambda`.",
        layer=layer,
    )


def as_layers(layer: Any, bounding_box_format: str | None = None) -> list[AugmentationLayer]:
    """Wrap a layer, and each layer of a Keras chain separately."""
    # Separately, so that targets bypass the layers that leave pixels in their place.
    parts = in_a_row(layer)
    if parts is None:
        return [as_layer(layer, bounding_box_format)]
    if not parts:
        raise value_error(
            f"This {type(layer).__name__} has no layers.",
            "Expected at least one in it.",
            layer=layer.name,
        )
    return [one for part in parts for one in as_layers(part, bounding_box_format)]
