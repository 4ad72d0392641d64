"""What the wrappers of foreign layers and functions have in common."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples.forms import Drawn, Example, Shape
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.seeded_layers import is_keras_cv, require_instance

MOVED = ("bounding_boxes", "segmentation_masks")
"""What has to follow where pixels move."""

# The shape of the images that layers are tried on; no layer is likely to make others that size.
TRIAL = (61, 67, 3)


class WrappedLayer(AugmentationLayer):
    """A layer or function from elsewhere as an `AugmentationLayer`."""

    settings = ("moves_pixels",)
    argument = "layer"
    """What the constructor calls that which is wrapped."""

    moves_pixels: bool | None
    """Whether boxes and masks have to follow."""

    def __init__(self, wrapped: Any, **kwargs: Any) -> None:
        require_instance(wrapped)
        # Whether boxes can follow is asked below, when the wrapped layer is known.
        box_format = kwargs.pop("bounding_box_format", None)
        super().__init__(**kwargs)
        self.wrapped = wrapped
        self.bounding_box_format = box_format
        self._known_to_follow: list[str] = []

    @property
    def title(self) -> str:
        return type(self.wrapped).__name__

    def get_config(self) -> dict[str, Any]:
        wrapped = keras.saving.serialize_keras_object(self.wrapped)
        return {**super().get_config(), self.argument: wrapped}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WrappedLayer":
        wrapped = keras.saving.deserialize_keras_object(config[cls.argument])
        return cls(**{**config, cls.argument: wrapped})

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        return {"seeds": seeds}

    def obstacle(self, kind: str) -> str | Exception | None:
        """Why boxes or masks cannot follow the images, None where they can."""
        raise NotImplementedError

    def require_support(self, *kinds: str) -> None:
        for kind in MOVED:
            asked = kind in kinds and kind not in self._known_to_follow
            reason = self.obstacle(kind) if asked else None
            # A trial traces the layer, so it is made once.
            if asked and reason is None:
                self._known_to_follow.append(kind)
            if reason is not None:
                error = reason if isinstance(reason, Exception) else None
                text = reason if error is None else f"it raised {type(error).__name__} on a trial"
                raise value_error(
                    f"{self.title} cannot change `{kind}` along with the images: {text}.",
                    "Expected only layers that can, or examples without them.",
                    "Use a layer of `keras_multigpu.augmentation`, or pass "
                    f"`augmentation.{type(self).__name__}(..., moves_pixels=False)` if every "
                    "pixel stays where it is.",
                    layer=self.name,
                ) from error


def require_foreign(layer: Any, origin: str) -> None:
    foreign = isinstance(layer, keras.Layer) and not isinstance(layer, AugmentationLayer)
    if foreign and is_keras_cv(layer) == (origin == "keras-cv"):
        return
    raise value_error(
        f"This is not a layer of {origin}.",
        f"Expected one, or one of your own that extends a layer of {origin}.",
        "Pass other layers and functions to `augmentation.Sequence([...])`, which takes all "
        "kinds and wraps those that need it.",
        layer=layer,
    )


def opened(
    example: Example, boxes_in: Callable[[Any], Any], boxes_back: Callable[[Any, Any], Any]
) -> tuple[Any, Callable[[Any], Example]]:
    """Images and what follows them, boxes as a foreign layer takes them; and the way back."""
    data = {"images": example["images"]}
    if "segmentation_masks" in example:
        data["segmentation_masks"], masks_back = with_one_mask(example)
    if "bounding_boxes" in example:
        data["bounding_boxes"] = boxes_in(example["bounding_boxes"])

    def back(outputs: Any) -> Example:
        changed = {**example, "images": as_float(outputs["images"])}
        if "segmentation_masks" in data:
            changed["segmentation_masks"] = masks_back(as_float(outputs["segmentation_masks"]))
        if "bounding_boxes" in data:
            boxes = example["bounding_boxes"]
            changed["bounding_boxes"] = boxes_back(boxes, outputs["bounding_boxes"])
        return changed

    return data, back


def with_one_mask(example: Example) -> tuple[Any, Callable[[Any], Any]]:
    """All masks of the examples as the channels of one, and the way back."""
    masks = keras.tree.flatten(example["segmentation_masks"])
    joined = tf.concat([tf.cast(mask, tf.float32) for mask in masks], axis=-1)

    def back(changed: Any) -> Any:
        parts = tf.split(changed, [mask.shape[-1] for mask in masks], axis=-1)
        typed = [tf.cast(part, mask.dtype) for part, mask in zip(parts, masks, strict=True)]
        return keras.tree.pack_sequence_as(example["segmentation_masks"], typed)

    return joined, back


def as_float(tensor: Any) -> tf.Tensor:
    """A tensor in the type that all arithmetic of this package is in."""
    return tf.cast(tensor, tf.float32)


def replaced(shape: Shape, after: Any) -> Shape:
    """A shape, with those of other sizes that are known."""
    height, width, channels = (
        old if new is None else new for old, new in zip(shape, after, strict=True)
    )
    return height, width, channels


def traced(call: Callable[[Any], Any], *kinds: str) -> tuple[tf.Graph, Any]:
    """The graph of a function of examples with these kinds, on shapes alone, and what comes out."""
    places = tf.TensorSpec((1, 2))
    boxes = {"boxes": tf.TensorSpec((1, 2, 4)), "labels": places, "classes": places}
    targets = {"bounding_boxes": boxes, "segmentation_masks": tf.TensorSpec((1, *TRIAL[:2], 1))}
    data = {"images": tf.TensorSpec((1, *TRIAL)), **{kind: targets[kind] for kind in kinds}}
    with tf.init_scope():
        function = tf.function(call, autograph=False).get_concrete_function(data)
    return function.graph, function.structured_outputs


def trial_error(call: Callable[[Any], Any], kind: str) -> Exception | None:
    """What a function of examples raises when boxes or masks come with the images."""
    try:
        traced(call, kind)
    except Exception as error:
        return error
    return None


def require_no_mixing(layer: keras.Layer, names: tuple[str, ...]) -> None:
    parts = [type(part).__name__ for part in model_internals.layers_of(layer)]
    mixing = [name for name in parts if name in names]
    if mixing:
        raise value_error(
            f"{mixing[0]} mixes the examples of a batch, and their targets with them.",
            "Expected layers that change each example by itself.",
            "Use `MixUp`, `CutMix` or `MixUpOrCutMix` of `keras_multigpu.augmentation`, which "
            "mix within a batch and pass the labels and weights on.",
            layer=type(layer).__name__,
        )
