"""Batches of a pipeline, `(x, y, weight)`, as examples that layers change, and the way back."""

from collections.abc import Callable
from typing import Any

import keras

from keras_multigpu.augmentation.examples import TARGETS
from keras_multigpu.augmentation.examples import Example
from keras_multigpu.checks import problem

Batch = tuple[Any, Any, Any]
"""Inputs, targets and weights; the last two may be None."""


def from_batch(x: Any, y: Any, weight: Any) -> tuple[Example, Callable[[Example], Batch]]:
    """A batch as a dictionary of examples, and the way back.

    Args:
        x: The inputs.
        y: The targets or None.
        weight: The sample weights or None.
    """
    inputs = keras.tree.flatten(x)
    place = place_of_images(x, inputs)
    targets, targets_back = from_targets(y, inputs[place])
    example = {"images": inputs[place], **targets}
    weights, weights_back = from_weights(weight, y, inputs[place])
    if weight is not None:
        example["sample_weights"] = weights

    def back(changed: Example) -> Batch:
        leaves = [*inputs[:place], changed["images"], *inputs[place + 1 :]]
        changed_x = keras.tree.pack_sequence_as(x, leaves)
        changed_weights = None if weight is None else weights_back(changed["sample_weights"])
        return changed_x, targets_back(changed), changed_weights

    return example, back


def place_of_images(x: Any, inputs: list) -> int:
    """The place of the images among the inputs of a batch.

    Args:
        x: The inputs.
        inputs: Their leaves.
    """
    if isinstance(x, dict) and "images" in x:
        return next(place for place, leaf in enumerate(inputs) if leaf is x["images"])
    places = [place for place, leaf in enumerate(inputs) if leaf.shape.rank == 4]
    if len(places) != 1:
        raise ValueError(
            problem(
                f"The inputs hold {len(places)} batches of images.",
                "Expected one tensor of four axes, (batch, height, width, channels).",
                "Call the one to augment `images` in a dictionary of inputs, or augment inside "
                "the model.",
                shapes=[tuple(leaf.shape) for leaf in inputs],
            )
        )
    return places[0]


def from_targets(y: Any, images: Any) -> tuple[Example, Callable[[Example], Any]]:
    """Targets by the names that layers use, and the way back.

    Args:
        y: The targets: a dictionary by name, boxes, or labels and masks told by their shapes.
        images: The images.
    """
    if y is None:
        return {}, lambda changed: None
    if isinstance(y, dict) and "boxes" in y:
        return {"bounding_boxes": y}, lambda changed: changed["bounding_boxes"]
    if isinstance(y, dict) and any(name in y for name in TARGETS):
        named = {name: y[name] for name in TARGETS if name in y}
        return named, lambda changed: {**y, **{name: changed[name] for name in named}}
    leaves = keras.tree.flatten(y)
    kinds = [kind_of(leaf, images) for leaf in leaves]
    # Masks without an axis for channels get one while they are changed.
    flat = [
        kind == "segmentation_masks" and leaf.shape.rank == 3
        for kind, leaf in zip(kinds, leaves, strict=True)
    ]
    example: Example = {}
    for kind, leaf, add in zip(kinds, leaves, flat, strict=True):
        example.setdefault(kind, []).append(leaf[..., None] if add else leaf)

    def back(changed: Example) -> Any:
        queues = {kind: iter(changed[kind]) for kind in example}
        found = [next(queues[kind]) for kind in kinds]
        return keras.tree.pack_sequence_as(
            y, [leaf[..., 0] if add else leaf for leaf, add in zip(found, flat, strict=True)]
        )

    return example, back


def from_weights(weight: Any, y: Any, images: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Sample weights by the names of their targets where each target has its own; the way back.

    Args:
        weight: The sample weights or None.
        y: The targets.
        images: The images.
    """
    leaves, targets = keras.tree.flatten(weight), keras.tree.flatten(y)
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
    rank = target.shape.rank
    same = target.shape[1:3] == images.shape[1:3] and images.shape[1:3].is_fully_defined()
    return "segmentation_masks" if rank == 4 or (rank == 3 and same) else "labels"
