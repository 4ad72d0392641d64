"""`KerasCVLayer`: a layer of keras-cv as a layer of this package."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, image_shape
from keras_multigpu.augmentation.keras_layer import (
    MIXES,
    TRIAL,
    KerasLayer,
    replace_size,
    trace_call,
    trial_error,
    with_a_row,
)
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals.keras_cv_internals import seeded_keras_cv

# TensorFlow's operations that draw from a stream of their own.
STATEFUL = """
    Multinomial RandomGamma RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform
    RandomUniformInt RngReadAndSkip TruncatedNormal
""".split()

# Layers of keras-cv that do the same in training and at inference.
ALWAYS = ("Grayscale", "Rescaling", "Resizing")


@keras.saving.register_keras_serializable("keras_multigpu")
class KerasCVLayer(KerasLayer):
    """A layer of keras-cv that draws for each image, from the seed.

    Labels and sample weights stay as they are, and masks follow the images. If pixels move, boxes
    raise a `ValueError`: use `RandomGeometry`. At inference only `Grayscale`, `Rescaling` and
    `Resizing` act, because keras-cv has no inference mode.

    Args:
        layer: An image layer of keras-cv, or a subclass of one.
        moves_pixels: False if every pixel stays in its place, so boxes and masks need not follow.
            By default pixels are assumed to move.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    origin = "keras-cv"
    refused = {
        **dict.fromkeys(("CutMix", "FourierMix", "MixUp", "Mosaic", "RepeatedAugmentation"), MIXES),
        "RandomAspectRatio": (
            "gives each image another size",
            "Expected images that still fit in one batch.",
            "Use `augmentation.RandomGeometry(aspect_ratio=...)`, or leave it out.",
        ),
    }

    def __init__(
        self, layer: keras.Layer, *, moves_pixels: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(layer, moves_pixels=moves_pixels, **kwargs)
        graph, outputs = trace_call(self._call_seeded)
        definition = graph.as_graph_def()
        functions = (function.node_def for function in definition.library.function)
        nodes = [node for some in (definition.node, *functions) for node in some]
        unknown = sorted({node.op for node in nodes if node.op in STATEFUL})
        if unknown:
            raise value_error(
                f"{self.title} draws from TensorFlow's global stream ({unknown[0]}).",
                "Expected a layer whose draws follow from the seed of each example.",
                "Use a layer of `keras_multigpu.augmentation` or of Keras in its place.",
                layer=self.title,
            )
        # The size is unknown where images are encoded as JPEG and decoded again.
        self.new_shape = tuple(
            None if new in (None, old) else new
            for new, old in zip(outputs.shape[1:], TRIAL, strict=True)
        )

    def mask_obstacle(self) -> Exception | None:
        return trial_error(self._call_seeded)

    def change(self, example: Example, drawn: Drawn) -> Example:
        data, back = self._unpack(example)
        # Only these draw for each image of a batch.
        vectorized = any(
            cls.__name__.startswith("VectorizedBase") for cls in type(self.wrapped).__mro__
        )
        alone = self.on_host or not vectorized
        changed = back(self._call_each(data, drawn["seeds"], image_by_itself=alone))
        shape = [None, *self.changed_shape(example["images"].shape[1:])]
        return {**changed, "images": tf.ensure_shape(changed["images"], shape)}

    def at_inference(self, example: Example) -> Example:
        if self.title in ALWAYS:
            seeds = tf.zeros([tf.shape(example["images"])[0], 2], tf.int32)
            return self.change(example, {"seeds": seeds})
        if self.new_shape[:2] == (None, None):
            return example
        height, width, _ = self.changed_shape(image_shape(example))
        return KerasLayer(keras.layers.Resizing(height, width)).at_inference(example)

    def changed_shape(self, shape: Shape) -> Shape:
        return replace_size(shape, self.new_shape)

    # Layers of keras-cv take floats.
    augment_batch = AugmentationLayer.augment_batch

    def _call_seeded(self, data: Any, seed: tf.Tensor) -> Any:
        # With AutoGraph, because several layers of keras-cv branch on tensors.
        @tf.function
        def call_with_seed(data: Any, seed: tf.Tensor) -> Any:
            with seeded_keras_cv(self.wrapped, seed):
                return self.wrapped(data)

        padded, cut = with_a_row(data)
        return cut(call_with_seed(padded, seed))
