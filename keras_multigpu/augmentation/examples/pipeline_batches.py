"""Batches of a pipeline, `(x, y, weight)`, as examples that layers change, and the way back."""

from collections.abc import Callable
from typing import Any

import keras

from keras_multigpu.augmentation.examples.forms import TARGETS, Example
from keras_multigpu.checks import value_error

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
