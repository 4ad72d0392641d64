"""`Function`: a plain function as a layer of this package."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_bool
from keras_multigpu.augmentation.examples import Drawn, Example
from keras_multigpu.augmentation.wrapping.wrapped_layer import WrappedLayer
from keras_multigpu.checks import value_error
from keras_multigpu.seeded_layers import parameters


@keras.saving.register_keras_serializable("keras_multigpu")
class Function(WrappedLayer):
    """A plain function of images as a layer.

    The function takes `float32[n, height, width, channels]` and returns as many images. It may also
    take `seeds`, `int32[n, 2]` to draw from with `tf.random.stateless_*`, and `training`. At
    inference a function that takes `seeds` but not `training` is skipped.

    Args:
        function: The function. To save a layer with it, register it with
            `keras.saving.register_keras_serializable`.
        moves_pixels: False if every pixel stays in its place, so boxes and masks need not follow. A
            function that moves pixels raises a `ValueError` if boxes or masks come.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    argument = "function"

    def __init__(
        self, function: Callable[..., Any], *, moves_pixels: bool = True, **kwargs: Any
    ) -> None:
        require_bool("moves_pixels", moves_pixels)
        super().__init__(function, moves_pixels, **kwargs)

    @property
    def title(self) -> str:
        return getattr(self.wrapped, "__name__", type(self.wrapped).__name__)

    def require_wrappable(self, wrapped: Any) -> None:
        if not callable(wrapped):
            raise value_error(
                "`function` cannot be called.",
                "Expected a function of a batch of images.",
                "Pass for example `tf.image.flip_left_right`.",
                function=wrapped,
            )

    def obstacle(self, kind: str) -> str | Exception | None:
        return "it is a function of images only" if self.moves_pixels else None

    def change(self, example: Example, drawn: Drawn) -> Example:
        return self._run(example, drawn["seeds"], training=True)

    def at_inference(self, example: Example) -> Example:
        taken = parameters(self.wrapped)
        if "seeds" in taken and "training" not in taken:
            return example
        seeds = tf.zeros([tf.shape(example["images"])[0], 2], tf.int32)
        return self._run(example, seeds, training=False)

    def _run(self, example: Example, seeds: tf.Tensor, training: bool) -> Example:
        images = example["images"]
        taken = parameters(self.wrapped)
        offered = {"seeds": seeds, "training": training}
        changed = self.wrapped(images, **{name: offered[name] for name in offered if name in taken})
        same = tf.debugging.assert_equal(
            tf.shape(changed)[0],
            tf.shape(images)[0],
            f"The function {self.title} changed the number of images in a batch. Expected as many "
            "as came in. Change each image by itself.",
        )
        with tf.control_dependencies([] if same is None else [same]):
            return {**example, "images": tf.cast(changed, tf.float32)}
