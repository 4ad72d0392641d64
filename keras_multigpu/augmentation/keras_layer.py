"""`KerasLayer`: a layer of Keras among the layers of this package."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_bool
from keras_multigpu.augmentation.examples.forms import Drawn, Example, Shape
from keras_multigpu.augmentation.wrapped_layer import (
    MOVED,
    WrappedLayer,
    as_float,
    opened,
    replaced,
    require_foreign,
    require_no_mixing,
    trial_error,
)
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals, variable_internals
from keras_multigpu.seeded_layers import build, call_of, image_by_image, seeded

# By name: Keras 3.10 has not all of them.
KEEP_PIXELS = tuple(
    getattr(keras.layers, name)
    for name in (
        "ContrastLimitedAdaptiveHistogramEqualization",
        "GaussianDropout",
        "GaussianNoise",
        "Normalization",
        "RandomGrayscale",
        "Rescaling",
    )
    if hasattr(keras.layers, name)
)
"""Layers that take images alone, but leave every pixel in its place."""

WRONG = {
    ("RandAugment", "bounding_boxes"): "Keras moves them in another order than the images",
    ("RandomCrop", "bounding_boxes"): "Keras takes the offset of rows from columns",
    ("RandomElasticTransform", "segmentation_masks"): "Keras bends them by another draw",
    ("RandomShear", "bounding_boxes"): "Keras moves them by another shear than the images",
}
"""What Keras 3.15.1 gets wrong, so that targets would no longer fit their images."""


@keras.saving.register_keras_serializable("keras_multigpu")
class KerasLayer(WrappedLayer):
    """A layer of Keras, with draws that are each image's own in a pipeline.

    Labels and sample weights pass by. Boxes and masks go through the layer where it can move
    them; where it cannot, or where Keras moves them wrongly, they are refused.

    Args:
        layer: A layer of Keras, or of your own that extends one.
        moves_pixels: False if every pixel stays where it is, so that boxes and masks need not
            follow. By default a layer that takes images only is assumed to move pixels, except
            for those of Keras that are known not to.
        seed: Integer, decides the draws in a model. In a pipeline the seed of the `Batches` does.
        bounding_box_format: How boxes come, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
    """

    def __init__(self, layer: keras.Layer, *, moves_pixels: bool | None = None, **kwargs: Any):
        super().__init__(layer, **kwargs)
        require_foreign(layer, "Keras")
        if moves_pixels is not None:
            require_bool("moves_pixels", moves_pixels)
        self.moves_pixels = moves_pixels
        require_no_mixing(layer, ("CutMix", "MixUp"))
        for part in model_internals.layers_of(layer):
            if isinstance(part, keras.layers.AugMix):
                raise value_error(
                    "`keras.layers.AugMix` draws its operations once, when its graph is made.",
                    "Expected a layer that draws for every image.",
                    "Use `keras_multigpu.augmentation.AugMix`.",
                    layer=type(layer).__name__,
                )
        if self.bounding_box_format is not None:
            self.require_support("bounding_boxes")

    def obstacle(self, kind: str) -> str | Exception | None:
        if self.images_suffice:
            return None
        if not hasattr(self.wrapped, "transform_bounding_boxes"):
            return "it takes images only"
        reason = WRONG.get((self.title, kind))
        if reason is not None:
            return reason

        def tried(data: Any) -> Any:
            # Without a scope of its own, the trial would move the layer's generators on.
            with seeded(self.wrapped, tf.zeros([2], tf.int32)):
                return self._run(data, training=True)

        return trial_error(tried, kind)

    @property
    def images_suffice(self) -> bool:
        """Whether boxes and masks stay as they are."""
        if self.moves_pixels is None:
            return isinstance(self.wrapped, KEEP_PIXELS)
        return not self.moves_pixels

    def change(self, example: Example, drawn: Drawn) -> Example:
        build(self.wrapped, example["images"])
        data, back = self._opened(example)
        if not variable_internals.seed_states(self.wrapped):
            return back(self._run(data, training=True))

        def one(data: Any, seed: tf.Tensor) -> Any:
            with seeded(self.wrapped, seed):
                return self._run(data, training=True)

        seeds = drawn["seeds"]
        if self.on_host:
            return back(image_by_image(one, data, seeds))
        # An empty batch has no first seed, but a sum.
        return back(one(data, tf.reduce_sum(seeds[:1], axis=0)))

    def still(self, example: Example) -> Example:
        build(self.wrapped, example["images"])
        data, back = self._opened(example)
        return back(self._run(data, training=False))

    def changed_shape(self, shape: Shape) -> Shape:
        known = [size if isinstance(size, int) else None for size in shape]
        try:
            after = self.wrapped.compute_output_shape((None, *known))[1:]
        except NotImplementedError:
            return shape
        return replaced(shape, after)

    def _run(self, data: Any, training: bool) -> Any:
        # Keras's layers write into the dictionaries that they get; this is a copy.
        padded, cut = with_a_row(data)
        with boxes_as_xyxy(self.wrapped):
            return cut(call_of(self.wrapped, training)(padded))

    def _opened(self, example: Example) -> tuple[Any, Callable[[Any], Example]]:
        if self.images_suffice or not set(MOVED) & example.keys():
            return example["images"], lambda images: {**example, "images": as_float(images)}
        return opened(example, with_float_labels, with_own_labels)


def with_float_labels(boxes: Any) -> Any:
    return {"boxes": boxes["boxes"], "labels": tf.cast(boxes["labels"], tf.float32)}


def with_own_labels(boxes: Any, moved: Any) -> Any:
    labels = tf.cast(moved["labels"], boxes["labels"].dtype)
    return {**boxes, "boxes": as_float(moved["boxes"]), "labels": labels}


@contextlib.contextmanager
def boxes_as_xyxy(layer: keras.Layer) -> Iterator[None]:
    """Let the layers inside a layer take boxes as this package keeps them."""
    parts = [
        part for part in model_internals.layers_of(layer) if hasattr(part, "bounding_box_format")
    ]
    formats = [part.bounding_box_format for part in parts]
    for part in parts:
        part.bounding_box_format = "xyxy"
    try:
        yield
    finally:
        for part, box_format in zip(parts, formats, strict=True):
            part.bounding_box_format = box_format


def with_a_row(data: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Data with an example of zeros if there is none, and how to take it out again."""
    # Some of Keras's layers fail on an empty batch, which a replica can have.
    first = keras.tree.flatten(data)[0]
    if first.shape[0]:
        return keras.tree.map_structure(lambda leaf: leaf, data), lambda outputs: outputs
    rows = tf.shape(first)[0]
    extra = tf.maximum(1 - rows, 0)

    def padded(leaf: tf.Tensor) -> tf.Tensor:
        zeros = tf.zeros(tf.concat([[extra], tf.shape(leaf)[1:]], axis=0), leaf.dtype)
        return tf.ensure_shape(tf.concat([leaf, zeros], axis=0), [None, *leaf.shape[1:]])

    return (
        keras.tree.map_structure(padded, data),
        lambda outputs: keras.tree.map_structure(lambda leaf: leaf[:rows], outputs),
    )
