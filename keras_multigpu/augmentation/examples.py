"""The form in which layers change images and their targets, and the way back from it.

In this form an example is a dictionary: `"images"` are `float32[n, height, width, channels]`,
boxes are (left, top, right, bottom) in pixels, and everything has a batch axis.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error

# Images and their targets, by Keras's names.
Example = dict[str, Any]

# What a layer drew for the images of a batch: tensors, or dictionaries of them.
Drawn = dict[str, Any]

# Height, width and channels; the first two may be tensors.
Shape = tuple[Any, Any, int]

TARGETS = ("labels", "sample_weights", "bounding_boxes", "segmentation_masks")


def image_shape(example: Example) -> Shape:
    """The shape of each image: integers where they are known."""
    images = example["images"]
    dynamic = tf.shape(images)
    height, width = (
        images.shape[axis] if images.shape[axis] is not None else dynamic[axis] for axis in (1, 2)
    )
    return height, width, images.shape[3]


def as_example(
    data: Any, box_format: str | None, dtype: str
) -> tuple[Example, Callable[[Example], Any]]:
    """Return data in the form that layers change, and a function that gives its form back.

    Args:
        data: Images or a dictionary of examples, with or without a batch axis.
        box_format: The format of bounding boxes.
        dtype: The type of the images in the end.
    """
    example = dict(data) if isinstance(data, dict) else {"images": data}
    require_images(example)
    single = len(example["images"].shape) == 3
    if single:
        example = keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[None], example)
    example["images"] = tf.cast(tf.convert_to_tensor(example["images"]), tf.float32)
    given_masks = example.get("segmentation_masks")
    if given_masks is not None:
        example["segmentation_masks"] = keras.tree.map_structure(
            lambda mask: with_channels(mask, example["images"]), given_masks
        )
    label_name = "labels"
    if "bounding_boxes" in example:
        boxes = example["bounding_boxes"]
        require_boxes(boxes, box_format)
        label_name = "labels" if "labels" in boxes else "classes"
        labels = tf.convert_to_tensor(boxes[label_name])
        corners = tf.cast(tf.convert_to_tensor(boxes["boxes"]), tf.float32)
        others = {key: value for key, value in boxes.items() if key not in ("boxes", label_name)}
        boxes = {**others, "boxes": corners, "labels": labels}
        example["bounding_boxes"] = convert_boxes(boxes, image_shape(example), box_format, "xyxy")

    def finish(changed: Example) -> Any:
        changed = dict(changed)
        if "bounding_boxes" in example:
            height, width, _ = shape = image_shape(changed)
            # Boxes are cut at the border; what has left the image gets the label -1, as in Keras.
            boxes = keras.utils.bounding_boxes.clip_to_image_size(
                dict(changed["bounding_boxes"]),
                height=height,
                width=width,
                bounding_box_format="xyxy",
            )
            boxes = convert_boxes(boxes, shape, "xyxy", box_format)
            changed["bounding_boxes"] = {
                label_name if key == "labels" else key: value for key, value in boxes.items()
            }
        if given_masks is not None:
            changed["segmentation_masks"] = keras.tree.map_structure(
                lambda mask, given: mask if len(np.shape(given)) == 4 else mask[..., 0],
                changed["segmentation_masks"],
                given_masks,
            )
        changed["images"] = as_dtype(changed["images"], dtype)
        if single:
            changed = keras.tree.map_structure(lambda leaf: leaf[0], changed)
        return changed if isinstance(data, dict) else changed["images"]

    return example, finish


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


def with_channels(mask: Any, images: tf.Tensor) -> tf.Tensor:
    """A mask with an axis for channels, checked to have as many pixels as the images."""
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank == 3:
        mask = mask[..., None]
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


def require_boxes(boxes: Any, box_format: str | None) -> None:
    if box_format is None:
        raise value_error(
            "There are bounding boxes, but their format is not known.",
            "Expected `bounding_box_format`.",
            "Pass `bounding_box_format='xyxy'`, or the format that you use, to the layer.",
            bounding_box_format=None,
        )
    parts: dict[str, Any] = boxes if isinstance(boxes, dict) else {}
    dense = not any(isinstance(part, tf.RaggedTensor) for part in parts.values())
    found: tuple[Any, Any] = parts.get("boxes"), parts.get("labels", parts.get("classes"))
    corners, labels = (list(np.shape(part)) if dense else [] for part in found)
    if (len(corners), len(labels)) != (3, 2) or corners[2] != 4:
        raise value_error(
            "The bounding boxes are not in the form of Keras.",
            "Expected a dictionary with `boxes`, (batch, boxes, 4), and their `labels`, "
            "(batch, boxes), which are integers.",
            "Fill up images with fewer boxes with the label -1; `ragged.to_tensor(-1)` does so.",
            bounding_boxes={key: getattr(value, "shape", value) for key, value in parts.items()}
            or type(boxes).__name__,
        )


def convert_boxes(boxes: Any, shape: Shape, source: str | None, target: str | None) -> Any:
    if source == target:
        return boxes
    height, width, _ = shape
    return keras.utils.bounding_boxes.convert_format(
        boxes, source=source, target=target, height=height, width=width
    )


def as_dtype(images: tf.Tensor, dtype: str) -> tf.Tensor:
    """Float images in another type; integers are rounded and kept in their range."""
    if tf.as_dtype(dtype).is_integer:
        return tf.saturate_cast(tf.round(images), dtype)
    return tf.cast(images, dtype)
