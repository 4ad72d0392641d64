"""Images with what belongs to them, in the one form that layers change, and the way back.

In this form an example is a dictionary: `"images"` are `float32[n, height, width, channels]`,
boxes are (left, top, right, bottom) in pixels, and everything has a batch axis. `opened` brings
images and dictionaries of them into it, `from_batch` the batches `(x, y, weight)` of a pipeline.
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
            "There are bounding boxes, but their format is not known.",
            "Expected `bounding_box_format`.",
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


Batch = tuple[Any, Any, Any]
"""Inputs, targets and weights; the last two may be None."""


def from_batch(x: Any, y: Any, weight: Any) -> tuple[Example, Callable[[Example], Batch]]:
    """A batch, whose inputs may name targets, as a dictionary of examples, and the way back."""
    place = place_of_images(x, keras.tree.flatten(x))
    images = keras.tree.flatten(x)[place]
    named = isinstance(x, dict) and "images" in x
    beside = {name: x[name] for name in TARGETS if named and name in x}
    targets, targets_back = from_targets(y, images)
    given = {*targets, *([] if weight is None else ["sample_weights"])}
    twice = sorted(beside.keys() & given)
    if twice:
        raise value_error(
            f"`{twice[0]}` was given twice: among the inputs and among the targets.",
            "Expected targets in one place, so that it is clear which follow the images.",
            "Leave one of them out, or give the one among the inputs another name.",
            inputs=sorted(beside),
            targets=sorted(given),
        )
    weights, weights_back = from_weights(weight, y, images)
    example = {"images": images, **beside, **targets}
    if weight is not None:
        example["sample_weights"] = weights

    def back(changed: Example) -> Batch:
        leaves = keras.tree.flatten(x)
        leaves[place] = changed["images"]
        changed_x = keras.tree.pack_sequence_as(x, leaves)
        if beside:
            changed_x = {**changed_x, **{name: changed[name] for name in beside}}
        changed_weights = None if weight is None else weights_back(changed["sample_weights"])
        return changed_x, targets_back(changed), changed_weights

    return example, back


def place_of_images(x: Any, inputs: list) -> int:
    if isinstance(x, dict) and "images" in x:
        return next(place for place, leaf in enumerate(inputs) if leaf is x["images"])
    places = [place for place, leaf in enumerate(inputs) if leaf.shape.rank == 4]
    if len(places) != 1:
        raise value_error(
            f"The inputs hold {len(places)} batches of images.",
            "Expected one tensor of four axes, (batch, height, width, channels).",
            "Call the one to augment `images` in a dictionary of inputs, or augment inside "
            "the model.",
            shapes=[tuple(leaf.shape) for leaf in inputs],
        )
    return places[0]


def from_targets(y: Any, images: Any) -> tuple[Example, Callable[[Example], Any]]:
    """Targets by the names that layers use, known by name or else by shape, and the way back."""
    if isinstance(y, dict) and "boxes" not in y and any(name in y for name in TARGETS):
        named = {name: y[name] for name in TARGETS if name in y}
        return named, lambda changed: {**y, **{name: changed[name] for name in named}}
    example: Example = {}

    def sort(target: Any) -> None:
        example.setdefault(kind_of(target, images), []).append(target)

    each_target(y, sort)
    if len(example.get("bounding_boxes", [])) > 1:
        raise value_error(
            "There are several sets of bounding boxes.",
            "Expected one dictionary of `boxes` and `labels` for each batch of images.",
            "Join them into one, and distinguish them by their labels.",
            sets=len(example["bounding_boxes"]),
        )
    if "bounding_boxes" in example:
        example["bounding_boxes"] = example["bounding_boxes"][0]

    def back(changed: Example) -> Any:
        queues = {kind: iter(changed[kind]) for kind in example if kind != "bounding_boxes"}
        queues["bounding_boxes"] = iter([changed.get("bounding_boxes")])
        return each_target(y, lambda target: next(queues[kind_of(target, images)]))

    return example, back


def each_target(y: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of targets, each changed; boxes with their labels count as one target."""
    if y is None:
        return None
    if isinstance(y, dict) and "boxes" not in y:
        return {name: each_target(part, change) for name, part in y.items()}
    if isinstance(y, list | tuple):
        return type(y)([each_target(part, change) for part in y])
    return change(y)


def from_weights(weight: Any, y: Any, images: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Sample weights by the names of their targets where each target has its own; the way back."""
    leaves = keras.tree.flatten(weight)
    targets: list[Any] = []
    each_target(y, targets.append)
    named = isinstance(y, dict) and any(name in y for name in (*TARGETS, "boxes"))
    if named or len(leaves) == 1 or len(leaves) != len(targets):
        return weight, lambda changed: changed
    kinds = [kind_of(target, images) for target in targets]
    parts: dict[str, list] = {}
    for kind, leaf in zip(kinds, leaves, strict=True):
        parts.setdefault(kind, []).append(leaf)

    def back(changed: Any) -> Any:
        queues = {kind: iter(changed[kind]) for kind in parts}
        return keras.tree.pack_sequence_as(weight, [next(queues[kind]) for kind in kinds])

    return parts, back


def kind_of(target: Any, images: Any) -> str:
    """Whether a target has a value for each pixel, or belongs to an image as a whole."""
    if isinstance(target, dict):
        return "bounding_boxes"
    # Classes of pixels have the images' height and width; other targets of three axes are labels.
    if target.shape.rank != 3:
        return "segmentation_masks" if target.shape.rank == 4 else "labels"
    sizes = target.shape[1:3], images.shape[1:3]
    if not sizes[0].is_compatible_with(sizes[1]):
        return "labels"
    if all(size.is_fully_defined() for size in sizes):
        return "segmentation_masks"
    raise value_error(
        "A target has three axes, and images of unknown size: is it a mask?",
        "Expected to see by its shape whether it has a value for each pixel.",
        "Pass the targets in a dictionary, as `segmentation_masks` or as `labels`.",
        target=tuple(target.shape),
        images=tuple(images.shape),
    )


def require_boxes_if_promised(example: Example, box_format: str | None) -> None:
    if box_format is not None and "bounding_boxes" not in example:
        raise value_error(
            "The layer has a `bounding_box_format`, but the batch has no boxes that it knows.",
            "Expected a dictionary with `boxes`, (batch, boxes, 4), and `labels` among the "
            "targets, or `bounding_boxes` among the inputs.",
            "Put the boxes into such a dictionary, or leave out `bounding_box_format`.",
            bounding_box_format=box_format,
            found=sorted(example),
        )
