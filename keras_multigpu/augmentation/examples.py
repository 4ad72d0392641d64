"""Images with what belongs to them, in the one form that layers change.

In this form an example is a dictionary: `"images"` are `float32[n, height, width, channels]`,
boxes are (left, top, right, bottom) in pixels, and everything has a batch axis.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import problem

Example = dict[str, Any]
"""Images and their targets, by Keras's names."""

Drawn = dict[str, Any]
"""What was drawn for the images of a batch: tensors, or dictionaries of them."""

Shape = tuple[Any, Any, int]
"""Height, width and channels; the first two may be tensors."""

TARGETS = ("labels", "sample_weights", "bounding_boxes", "segmentation_masks")
"""What can belong to images."""


def image_shape(example: Example) -> Shape:
    """The shape of each image: integers where they are known."""
    images = example["images"]
    dynamic = tf.shape(images)
    height, width = (
        images.shape[axis] if images.shape[axis] is not None else dynamic[axis] for axis in (1, 2)
    )
    return height, width, images.shape[3]


def opened(
    data: Any, box_format: str | None, dtype: str
) -> tuple[Example, Callable[[Example], Any]]:
    """Data as users pass them, in the form that layers change, and the way back.

    Args:
        data: Images, or a dictionary with `"images"`; in batches or without the batch axis.
        box_format: The format of bounding boxes.
        dtype: What the images become in the end.
    """
    example = dict(data) if isinstance(data, dict) else {"images": data}
    require_images(example)
    images = tf.convert_to_tensor(example["images"])
    lone = images.shape.rank == 3
    example["images"] = images
    if lone:
        example = keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[None], example)
    example["images"] = tf.cast(example["images"], tf.float32)
    if "bounding_boxes" in example:
        example["bounding_boxes"] = converted(example, box_format, "xyxy", tf.float32)

    def finish(changed: Example) -> Any:
        changed = dict(changed)
        if "bounding_boxes" in changed:
            boxes = clipped(changed)
            changed["bounding_boxes"] = boxes
            changed["bounding_boxes"] = converted(changed, "xyxy", box_format, tf.float32)
        changed["images"] = as_dtype(changed["images"], dtype)
        if lone:
            changed = keras.tree.map_structure(lambda leaf: leaf[0], changed)
        return changed if isinstance(data, dict) else changed["images"]

    return example, finish


def require_images(example: Example) -> None:
    """Raise a `ValueError` unless there are images of three or four axes and known channels."""
    images = example.get("images")
    shape = getattr(images, "shape", None)
    if shape is None or len(shape) not in (3, 4) or shape[-1] is None:
        raise ValueError(
            problem(
                "There are no images to augment.",
                "Expected `[batch, height, width, channels]` with known channels, or a dictionary "
                "with such `images`.",
                "Add a channel axis to images without one, and put other inputs in a dictionary.",
                shape=None if shape is None else tuple(shape),
                keys=sorted(example),
            )
        )


def converted(example: Example, source: str | None, target: str | None, dtype: Any) -> Any:
    """The boxes of examples in another format."""
    if source is None or target is None:
        raise ValueError(
            problem(
                "There are bounding boxes, and nothing says how they are written.",
                "Expected the layer to know their format.",
                "Pass `bounding_box_format='xyxy'`, or the format that you use, to the layer.",
                bounding_box_format=None,
            )
        )
    boxes = dict(example["bounding_boxes"])
    boxes["boxes"] = tf.cast(boxes["boxes"], dtype)
    if source == target:
        return boxes
    height, width, _ = image_shape(example)
    return keras.utils.bounding_boxes.convert_format(
        boxes, source=source, target=target, height=height, width=width
    )


def clipped(example: Example) -> Any:
    """Boxes cut at the image's border; what has left the image gets the label -1, as in Keras."""
    height, width, _ = image_shape(example)
    return keras.utils.bounding_boxes.clip_to_image_size(
        dict(example["bounding_boxes"]), height=height, width=width, bounding_box_format="xyxy"
    )


def as_dtype(images: tf.Tensor, dtype: str) -> tf.Tensor:
    """Float images in another type; integers are rounded and kept in their range."""
    if tf.as_dtype(dtype).is_integer:
        return tf.saturate_cast(tf.round(images), dtype)
    return tf.cast(images, dtype)
