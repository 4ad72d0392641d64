"""`KerasCVLayer`: a layer of keras-cv among the layers of this package."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_bool
from keras_multigpu.augmentation.examples.forms import Drawn, Example, Shape, image_shape
from keras_multigpu.augmentation.keras_layer import KerasLayer, boxes_as_xyxy, with_a_row
from keras_multigpu.augmentation.wrapped_layer import (
    TRIAL,
    WrappedLayer,
    as_float,
    opened,
    replaced,
    require_foreign,
    require_no_mixing,
    traced,
    trial_error,
)
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.keras_cv_internals import seeded_keras_cv
from keras_multigpu.seeded_layers import image_by_image

MIXING = ("CutMix", "FourierMix", "MixUp", "Mosaic", "RepeatedAugmentation")
"""Layers of keras-cv that are not a function of one example."""

WRONG = {
    ("RandomCropAndResize", "bounding_boxes"): "keras-cv does not resize them",
    ("RandomShear", "bounding_boxes"): "keras-cv moves them by another shear than the images",
    ("Resizing", "bounding_boxes"): "keras-cv leaves them where they are",
}
"""What keras-cv 0.9.0 gets wrong, so that targets would no longer fit their images."""

STATEFUL = """
    Multinomial RandomGamma RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform
    RandomUniformInt RngReadAndSkip TruncatedNormal
""".split()
"""TensorFlow's operations that draw from a stream of their own."""

NO_SEED = (0, 0)
"""Any seed, where only shapes matter."""

ALWAYS = ("Grayscale", "Rescaling", "Resizing")
"""Layers of keras-cv that do the same in training and at inference."""


@keras.saving.register_keras_serializable("keras_multigpu")
class KerasCVLayer(WrappedLayer):
    """A layer of keras-cv, with draws that are each image's own and follow from the seed.

    Labels and sample weights pass by. Boxes and masks go through the layer. keras-cv has no
    inference mode: there its layers are left out, except for `Grayscale`, `Rescaling`
    and `Resizing`.

    Args:
        layer: An image layer of keras-cv, or of your own that extends one.
        moves_pixels: False if every pixel stays where it is, so that boxes and masks need not
            follow. By default they are passed through the layer.
        seed: Integer, decides the draws in a model. In a pipeline the seed of the `Batches` does.
        bounding_box_format: How boxes come, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
    """

    def __init__(self, layer: keras.Layer, *, moves_pixels: bool = True, **kwargs: Any) -> None:
        super().__init__(layer, **kwargs)
        require_foreign(layer, "keras-cv")
        require_bool("moves_pixels", moves_pixels)
        self.moves_pixels = moves_pixels
        require_no_mixing(layer, MIXING)
        for part in model_internals.layers_of(layer):
            if type(part).__name__ == "RandomAspectRatio":
                raise value_error(
                    "RandomAspectRatio gives each image another size.",
                    "Expected images that still fit in one batch.",
                    "Use `augmentation.RandomGeometry(aspect_ratio=...)`, or leave it out.",
                    layer=type(layer).__name__,
                )
        graph, outputs = traced(lambda data: self._one(data, NO_SEED))
        definition = graph.as_graph_def()
        nodes = [
            *definition.node,
            *(node for f in definition.library.function for node in f.node_def),
        ]
        unknown = sorted({node.op for node in nodes if node.op in STATEFUL})
        if unknown:
            raise value_error(
                f"{type(layer).__name__} draws from TensorFlow's global stream ({unknown[0]}).",
                "Expected a layer whose draws follow from the seed of each example.",
                "Use a layer of `keras_multigpu.augmentation` or of Keras in its place.",
                layer=type(layer).__name__,
            )
        shape = outputs["images"].shape[1:]
        # The size is unknown where images are written as JPEG and read again.
        self.new_shape = tuple(
            None if new in (None, old) else new for new, old in zip(shape, TRIAL, strict=True)
        )
        if self.bounding_box_format is not None:
            self.require_support("bounding_boxes")

    def obstacle(self, kind: str) -> str | Exception | None:
        if not self.moves_pixels:
            return None
        wrong = [
            reason
            for part in model_internals.layers_of(self.wrapped)
            for (name, target), reason in WRONG.items()
            if (name, target) == (type(part).__name__, kind)
        ]
        return wrong[0] if wrong else trial_error(lambda data: self._one(data, NO_SEED), kind)

    def change(self, example: Example, drawn: Drawn) -> Example:
        data, back = self._opened(example)
        seeds = drawn["seeds"]
        # Only vectorized layers draw for each image of a batch; boxes that they drop would leave
        # ragged batches.
        classes = [cls.__name__ for cls in type(self.wrapped).__mro__]
        vectorized = any(name.startswith("VectorizedBase") for name in classes)
        if self.on_host or "bounding_boxes" in data or not vectorized:
            return back(image_by_image(self._one, data, seeds))
        padded, cut = with_a_row(data)
        return back(cut(self._one(padded, tf.reduce_sum(seeds[:1], axis=0))))

    def still(self, example: Example) -> Example:
        if type(self.wrapped).__name__ in ALWAYS:
            seeds = tf.zeros([tf.shape(example["images"])[0], 2], tf.int32)
            return self.change(example, {"seeds": seeds})
        height, width, _ = self.changed_shape(image_shape(example))
        if self.new_shape[:2] == (None, None):
            return example
        return KerasLayer(keras.layers.Resizing(height, width)).still(example)

    def changed_shape(self, shape: Shape) -> Shape:
        return replaced(shape, self.new_shape)

    def _one(self, data: Any, seed: Any) -> Any:
        @tf.function
        def called(data: Any, seed: tf.Tensor) -> Any:
            with seeded_keras_cv(self.wrapped, seed), boxes_as_xyxy(self.wrapped):
                outputs = self.wrapped(as_keras_cv(data))
            return outputs if isinstance(outputs, dict) else {"images": outputs}

        # Several layers of keras-cv branch on tensors, which needs AutoGraph.
        outputs = called(data, seed)
        if "bounding_boxes" in data:
            outputs["bounding_boxes"] = in_place(outputs["bounding_boxes"], data["bounding_boxes"])
        return outputs

    def _opened(self, example: Example) -> tuple[Any, Callable[[Any], Example]]:
        followed = example if self.moves_pixels else {"images": example["images"]}
        data, back = opened(followed, with_places, without_lost)

        def in_shape(outputs: Any) -> Example:
            changed = back(outputs)
            shape = [None, *self.changed_shape(example["images"].shape[1:])]
            return {**example, **changed, "images": tf.ensure_shape(changed["images"], shape)}

        return data, in_shape


def with_places(boxes: Any) -> Any:
    """Boxes whose classes are their places, which identify the boxes that are left."""
    rows, count = tf.unstack(tf.shape(boxes["boxes"])[:2])
    places = tf.tile(tf.range(tf.cast(count, tf.float32))[None], [rows, 1])
    return {"boxes": boxes["boxes"], "classes": tf.ensure_shape(places, boxes["boxes"].shape[:2])}


def as_keras_cv(data: Any) -> Any:
    """Examples as layers of keras-cv take them, which write into the dictionaries they get."""
    if len(data) == 1:
        return data["images"]
    copy = dict(data)
    if "bounding_boxes" in data:
        copy["bounding_boxes"] = {key: data["bounding_boxes"][key] for key in ("boxes", "classes")}
    return copy


def in_place(moved: Any, boxes: Any) -> Any:
    """Ragged boxes of one image at the places in their classes; keras-cv takes out lost ones."""
    count = tf.shape(boxes["boxes"])[1]
    dense, places = moved["boxes"], moved["classes"]
    if isinstance(dense, tf.RaggedTensor):
        dense = dense.to_tensor(shape=[1, None, 4])
        places = places.to_tensor(-1)
    # Places of -1 are nowhere, so that they add nothing.
    chosen = tf.one_hot(tf.cast(places, tf.int32), count, dtype=tf.float32)
    put = tf.matmul(chosen, as_float(dense), transpose_a=True)
    return {
        "boxes": tf.ensure_shape(put, boxes["boxes"].shape),
        "classes": tf.ensure_shape(tf.reduce_sum(chosen, axis=1), boxes["classes"].shape),
    }


def without_lost(boxes: Any, moved: Any) -> Any:
    """Boxes where they moved to; what has left the image (class 1 has not) gets the label -1."""
    labels = boxes["labels"]
    there = tf.reshape(
        moved["classes"] > 0,
        tf.concat([tf.shape(labels)[:2], tf.ones([labels.shape.rank - 2], tf.int32)], axis=0),
    )
    lost = tf.constant(-1, labels.dtype)
    return {**boxes, "boxes": moved["boxes"], "labels": tf.where(there, labels, lost)}
