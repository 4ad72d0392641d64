"""Batches `(x, y, weight)` of a pipeline as dictionaries of examples, and back."""

from collections.abc import Callable
from typing import Any

import keras

from keras_multigpu.augmentation.examples import TARGETS, Example
from keras_multigpu.checks import value_error

# Inputs, targets and weights; the last two may be None.
Batch = tuple[Any, Any, Any]


def from_batch(x: Any, y: Any, weight: Any) -> tuple[Example, Callable[[Example], Batch]]:
    """Return a batch as a dictionary of examples, and a function that makes it a batch again.

    Targets are known by their names or else by their shapes. Inputs may include targets by name.
    """
    inputs = keras.tree.flatten(x)
    place = place_of_images(x, inputs)
    images = inputs[place]
    has_names = isinstance(x, dict) and "images" in x
    beside = {name: x[name] for name in TARGETS if has_names and name in x}
    targets, targets_back = from_targets(y, images)
    weights = {} if weight is None else {"sample_weights": weight}
    twice = sorted(beside.keys() & {*targets, *weights})
    if twice:
        raise value_error(
            f"`{twice[0]}` was given twice: among the inputs and among the targets.",
            "Expected targets in one place, so that it is clear which follow the images.",
            "Leave one of them out, or give the one among the inputs another name.",
            inputs=sorted(beside),
            targets=sorted({*targets, *weights}),
        )

    def back(changed: Example) -> Batch:
        leaves = [*inputs[:place], changed["images"], *inputs[place + 1 :]]
        changed_x = keras.tree.pack_sequence_as(x, leaves)
        if beside:
            changed_x = {**changed_x, **{name: changed[name] for name in beside}}
        changed_weight = None if weight is None else changed["sample_weights"]
        return changed_x, targets_back(changed), changed_weight

    return {"images": images, **beside, **targets, **weights}, back


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
    """Return targets by kind, and the way back."""
    if isinstance(y, dict) and "boxes" not in y and any(name in y for name in TARGETS):
        named = {name: y[name] for name in TARGETS if name in y}
        return named, lambda changed: {**y, **{name: changed[name] for name in named}}
    targets: list[Any] = []
    each_target(y, targets.append)
    kinds = [kind_of(target, images) for target in targets]
    pairs = list(zip(kinds, targets, strict=True))
    example: Example = {kind: [one for own, one in pairs if own == kind] for kind in kinds}
    if kinds.count("bounding_boxes") > 1:
        raise value_error(
            "There are several sets of bounding boxes.",
            "Expected one dictionary of `boxes` and `labels` for each batch of images.",
            "Join them into one, and distinguish them by their labels.",
            sets=kinds.count("bounding_boxes"),
        )
    if "bounding_boxes" in example:
        (example["bounding_boxes"],) = example["bounding_boxes"]

    def back(changed: Example) -> Any:
        lists = {**changed, "bounding_boxes": [changed.get("bounding_boxes")]}
        remaining = {kind: iter(lists[kind]) for kind in kinds}
        order = iter(kinds)
        return each_target(y, lambda target: next(remaining[next(order)]))

    return example, back


def each_target(y: Any, change: Callable[[Any], Any]) -> Any:
    """Change each target of a structure; boxes with their labels count as one target."""
    if y is None:
        return None
    if isinstance(y, dict) and "boxes" not in y:
        return {name: each_target(part, change) for name, part in y.items()}
    if isinstance(y, list | tuple):
        return type(y)([each_target(part, change) for part in y])
    return change(y)


def kind_of(target: Any, images: Any) -> str:
    """Whether a target is boxes, has a value for each pixel, or belongs to an image as a whole."""
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
