"""Images with what belongs to them, in the one form that layers change.

In this form an example is a dictionary: `"images"` are `float32[n, height, width, channels]`,
boxes are (left, top, right, bottom) in pixels, and everything has a batch axis.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error

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
    """Images or a dictionary, batched or not, in the form that layers change, and the way back."""
    example = dict(data) if isinstance(data, dict) else {"images": data}
    require_images(example)
    lone = len(example["images"].shape) == 3
    if lone:
        example = keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[None], example)
    example["images"] = tf.cast(tf.convert_to_tensor(example["images"]), tf.float32)
    flat_masks = with_channels(example)
    names = opened_boxes(example, box_format)

    def finish(changed: Example) -> Any:
        changed = dict(changed)
        if names:
            changed["bounding_boxes"] = clipped(changed)
            changed["bounding_boxes"] = converted(changed, "xyxy", str(box_format))
            closed = changed["bounding_boxes"]
            changed["bounding_boxes"] = {names.get(key, key): closed[key] for key in closed}
        if flat_masks:
            changed["segmentation_masks"] = keras.tree.map_structure(
                lambda mask, flat: mask[..., 0] if flat else mask,
                changed["segmentation_masks"],
                flat_masks,
            )
        changed["images"] = as_dtype(changed["images"], dtype)
        if lone:
            changed = keras.tree.map_structure(lambda leaf: leaf[0], changed)
        return changed if isinstance(data, dict) else changed["images"]

    return example, finish


def with_channels(example: Example) -> Any:
    """Give masks without an axis for channels one, in place; which ones had none."""
    if "segmentation_masks" not in example:
        return None
    masks = keras.tree.map_structure(tf.convert_to_tensor, example["segmentation_masks"])
    flat = keras.tree.map_structure(lambda mask: mask.shape.rank == 3, masks)
    masks = keras.tree.map_structure(
        lambda mask, one: mask[..., None] if one else mask, masks, flat
    )
    example["segmentation_masks"] = keras.tree.map_structure(
        lambda mask: of_the_images_size(mask, example["images"]), masks
    )
    return flat


def of_the_images_size(mask: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """A mask, once it is certain that it has as many pixels as the images."""
    sizes = mask.shape[1:3], images.shape[1:3]
    if mask.shape.rank != 4 or not sizes[0].is_compatible_with(sizes[1]):
        raise value_error(
            "A segmentation mask has another size than the images.",
            "Expected a class for each pixel: (batch, height, width) and perhaps channels.",
            "Resize the masks first; targets that are not masks go under `labels`.",
            mask=tuple(mask.shape),
            images=tuple(images.shape),
        )
    if all(size.is_fully_defined() for size in sizes):
        return mask
    message = "A segmentation mask has another size than the images. Resize the masks first."
    same = tf.debugging.assert_equal(tf.shape(mask)[1:3], tf.shape(images)[1:3], message)
    with tf.control_dependencies([] if same is None else [same]):
        return tf.identity(mask)


def opened_boxes(example: Example, box_format: str | None) -> dict[str, str]:
    """Bring boxes into the form that layers change, in place; what their parts were called."""
    if "bounding_boxes" not in example:
        return {}
    if box_format is None:
        raise value_error(
            "There are bounding boxes, and nothing says how they are written.",
            "Expected the layer to know their format.",
            "Pass `bounding_box_format='xyxy'`, or the format that you use, to the layer.",
            bounding_box_format=None,
        )
    boxes = example["bounding_boxes"]
    require_boxes(boxes)
    names = {"labels": "labels" if "labels" in boxes else "classes", "boxes": "boxes"}
    kept = {key: value for key, value in boxes.items() if key not in names.values()}
    parts = {key: tf.convert_to_tensor(boxes[name]) for key, name in names.items()}
    parts["boxes"] = tf.cast(parts["boxes"], tf.float32)
    example["bounding_boxes"] = {**kept, **parts}
    example["bounding_boxes"] = converted(example, box_format, "xyxy")
    return names


def require_boxes(boxes: Any) -> None:
    parts: dict[str, Any] = boxes if isinstance(boxes, dict) else {}
    labels = parts.get("labels", parts.get("classes"))
    dense = not any(isinstance(part, tf.RaggedTensor) for part in parts.values())
    tensors: list[Any] = [parts.get("boxes"), labels]
    shapes: list[Any] = [np.shape(part) if dense else () for part in tensors]
    if [len(shape) for shape in shapes] == [3, 2] and shapes[0][2] == 4:
        return
    raise value_error(
        "The bounding boxes are not in the form of Keras.",
        "Expected a dictionary with `boxes`, (batch, boxes, 4), and their `labels`, "
        "(batch, boxes), which are integers.",
        "Fill up images with fewer boxes with the label -1; `ragged.to_tensor(-1)` does so.",
        bounding_boxes={key: getattr(value, "shape", value) for key, value in parts.items()}
        or type(boxes).__name__,
    )


def require_images(example: Example) -> None:
    images = example.get("images")
    shape = getattr(images, "shape", None)
    if shape is None or len(shape) not in (3, 4) or shape[-1] is None:
        raise value_error(
            "There are no images to augment.",
            "Expected `[batch, height, width, channels]` with known channels, or a dictionary "
            "with such `images`.",
            "Add a channel axis to images without one, and put other inputs in a dictionary.",
            shape=None if shape is None else tuple(shape),
            keys=sorted(example),
        )


def converted(example: Example, source: str, target: str) -> Any:
    boxes = dict(example["bounding_boxes"])
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
