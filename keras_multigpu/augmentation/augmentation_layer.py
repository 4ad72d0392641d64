"""`AugmentationLayer`, which all layers of this part extend."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import plain, require_seed
from keras_multigpu.augmentation.batches import from_batch, require_boxes_if_promised
from keras_multigpu.augmentation.compilation import is_on_host, place_on_host
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, as_example, image_shape
from keras_multigpu.augmentation.random_numbers import seeds_of
from keras_multigpu.checks import require_choice, value_error
from keras_multigpu.seeded_layers import fold_seeds

# The formats that `keras.utils.bounding_boxes` converts.
BOX_FORMATS = "xyxy rel_xyxy yxyx rel_yxyx xywh rel_xywh center_xywh center_yxhw".split()


class AugmentationLayer(keras.layers.Layer):
    """A layer that changes each image at random, together with its labels, boxes and masks.

    It runs in a pipeline, as `Batches(augment=layer)`, or in a model, where it changes nothing at
    inference. To write a layer of your own, override `draw` and `change_images`, and if pixels move
    also `change_boxes` and `change_masks`. To make it saveable, name the arguments of its
    constructor in `settings`.

    Images are `[batch, height, width, channels]`, or a single one without the batch axis, integers
    or floats. The result has the layer's `dtype`, float32 by default; arithmetic is always in
    float32. Instead of images a layer takes a dictionary with `"images"` and any of `"labels"`,
    `"sample_weights"`, `"bounding_boxes"` (a dictionary of `"boxes"` and their `"labels"`) and
    `"segmentation_masks"`; other keys pass through.

    Args:
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
    """

    # The keys, of those above, that cannot follow the images through this layer.
    unsupported: tuple[str, ...] = ()

    # The arguments of the constructor, which `get_config` finds as attributes of the same name.
    settings: tuple[str, ...] = ("seed", "bounding_box_format")

    def __init__(
        self, *, seed: int | None = None, bounding_box_format: str | None = None, **kwargs: Any
    ) -> None:
        require_seed(seed)
        require_choice("bounding_box_format", bounding_box_format, (None, *BOX_FORMATS))
        # With autocast, mixed precision would round 0 to 255 to float16 before `call`.
        super().__init__(autocast=False, **kwargs)
        self.seed = None if seed is None else int(seed)
        self.bounding_box_format = bounding_box_format
        self.generator = keras.random.SeedGenerator(self.seed)
        if bounding_box_format is not None:
            self.require_support("bounding_boxes")

    def build(self, input_shape: Any) -> None:
        """Do nothing: the first batch builds any layers inside this one.

        Args:
            input_shape: The shape of the images, or shapes by name.
        """
        # Without this, Keras warns of each layer inside that has not seen a batch yet.
        self.built = True

    @property
    def title(self) -> str:
        """The layer's name in pictures and among the draws of a `Sequence`."""
        return type(self).__name__

    @property
    def on_host(self) -> bool:
        """Whether images are changed in a pipeline on the CPU, where Python may run."""
        return is_on_host()

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        """Draw the parameters of each image.

        Args:
            seeds: `int32[n, 2]`, two integers for each image.
            shape: `(height, width, channels)` of the images.

        Returns:
            Tensors whose first axis counts the images.
        """
        raise NotImplementedError

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        """Change the images of a batch.

        Args:
            images: `float32[n, height, width, channels]`.
            drawn: What `draw` returned.
        """
        raise NotImplementedError

    def change_boxes(self, boxes: tf.Tensor, drawn: Drawn, shape: Shape) -> tf.Tensor:
        """Move boxes with their images.

        Args:
            boxes: `float32[n, boxes, 4]`, as (left, top, right, bottom) in pixels.
            drawn: What `draw` returned.
            shape: `(height, width, channels)` of the images before the change.
        """
        return boxes

    def change_masks(self, masks: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        """Move segmentation masks with their images; classes are not blended.

        Args:
            masks: `[n, height, width, channels]`.
            drawn: What `draw` returned.
        """
        return masks

    def change(self, example: Example, drawn: Drawn) -> Example:
        """Change a batch of examples; override it where an example depends on others."""
        changed = dict(example)
        shape = image_shape(example)
        changed["images"] = self.change_images(example["images"], drawn)
        if "segmentation_masks" in example:
            changed["segmentation_masks"] = keras.tree.map_structure(
                lambda masks: self.change_masks(masks, drawn), example["segmentation_masks"]
            )
        if "bounding_boxes" in example:
            boxes = example["bounding_boxes"]
            moved = self.change_boxes(boxes["boxes"], drawn, shape)
            changed["bounding_boxes"] = {**boxes, "boxes": moved}
        return changed

    def at_inference(self, example: Example) -> Example:
        """Change a batch at inference: not at all, unless the layer gives images another shape."""
        return example

    def changed_shape(self, shape: Shape) -> Shape:
        """The shape of the images after this layer."""
        return shape

    def call(self, data: Any, training: bool | None = True) -> Any:
        """Change images, or a dictionary of examples, with the layer's own draws."""

        def change(example: Example) -> Example:
            if not training:
                return self.at_inference(example)
            count = tf.shape(example["images"])[0]
            seeds = of_this_replica(seeds_of(self.generator.next(), count))
            return self.change(example, self.draw(seeds, image_shape(example)))

        return self._with_examples(data, change, on_host=False)

    def apply(self, data: Any, drawn: Drawn, on_host: bool = False) -> Any:
        """Change images, or a dictionary of examples, with known draws.

        Args:
            data: What `call` takes.
            drawn: What `draw` returned.
            on_host: Whether this is a pipeline on the CPU, where Python may run.
        """
        return self._with_examples(data, lambda example: self.change(example, drawn), on_host)

    @tf.autograph.experimental.do_not_convert
    def augment_batch(
        self, x: Any, y: Any, weight: Any, seeds: tf.Tensor, training: bool
    ) -> tuple[Any, Any, Any]:
        """Change a batch of a pipeline; `Batches` calls it.

        Args:
            x: The inputs: images, or several inputs with one batch of images among them.
            y: The targets: labels, masks of the images' size, boxes, or a dictionary of them
                by the names that this class uses.
            weight: The sample weights, or None.
            seeds: `int32[n, 2]`, two integers for each example.
            training: Whether to draw; otherwise the batch changes as at inference.
        """
        data, back = from_batch(x, y, weight)
        require_boxes_if_promised(data, self.bounding_box_format)

        def change(example: Example) -> Example:
            if not training:
                return self.at_inference(example)
            return self.change(example, self.draw(seeds, image_shape(example)))

        return back(self._with_examples(data, change, on_host=True))

    def require_support(self, *kinds: str) -> None:
        """Raise a `ValueError` if something cannot follow the images through this layer.

        Args:
            *kinds: Keys such as `"bounding_boxes"`.
        """
        for kind in kinds:
            if kind in self.unsupported:
                raise value_error(
                    f"{type(self).__name__} cannot change `{kind}` along with the images.",
                    "Expected only layers that can, or examples without them.",
                    "Leave this layer out, or use another one for this task.",
                    layer=self.name,
                )

    def get_config(self) -> dict[str, Any]:
        names = [name for cls in type(self).__mro__ for name in vars(cls).get("settings", ())]
        return {**super().get_config(), **{name: plain(getattr(self, name)) for name in names}}

    def _with_examples(self, data: Any, change: Callable[[Example], Example], on_host: bool) -> Any:
        if isinstance(data, dict):
            self.require_support(*data)
        example, finish = as_example(data, self.bounding_box_format, self.compute_dtype)
        with place_on_host(on_host):
            return finish(change(example))


def of_this_replica(seeds: tf.Tensor) -> tf.Tensor:
    """Make seeds differ between the replicas of a plain `tf.distribute` strategy."""
    # All replicas of such a strategy have generators in the same state. `DistributedModel` gives
    # each replica its own seeds, and traces its steps outside the strategy.
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seeds
    return fold_seeds(seeds, context.replica_id_in_sync_group)
