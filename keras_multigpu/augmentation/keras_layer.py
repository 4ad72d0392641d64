"""`KerasLayer`: a layer of Keras as a layer of this package."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_bool
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.batches import from_batch
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, as_dtype
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals, variable_internals
from keras_multigpu.seeded_layers import (
    build,
    call_of,
    image_by_image,
    is_keras_cv,
    require_instance,
    seeded,
)

# Layers of Keras that take images alone, but leave every pixel in its place.
KEEP_PIXELS = (
    "ContrastLimitedAdaptiveHistogramEqualization",
    "GaussianDropout",
    "GaussianNoise",
    "Normalization",
    "RandomGrayscale",
    "Rescaling",
)

# What has to follow where pixels move.
MOVED = ("bounding_boxes", "segmentation_masks")

# What is wrong with a layer, what was expected, and how to fix it.
Problem = tuple[str, str, str]

MIXES: Problem = (
    "mixes the examples of a batch, and their targets",
    "Expected layers that change each example by itself.",
    "Use `keras_multigpu.augmentation.Mix`, which mixes within a batch and passes the labels and "
    "weights on.",
)

# The shape of the images that layers are tried on; no layer is likely to resize images to it.
TRIAL = (61, 67, 3)


@keras.saving.register_keras_serializable("keras_multigpu")
class KerasLayer(AugmentationLayer):
    """A layer of Keras that, in a pipeline, draws for each image.

    Labels and sample weights stay as they are, and masks follow the images. Boxes raise a
    `ValueError` unless every pixel stays in its place, because Keras moves some of them wrongly:
    use `RandomGeometry`. So do masks that the layer cannot move.

    Args:
        layer: A layer of Keras, or a subclass of one.
        moves_pixels: False if every pixel stays in its place, so boxes and masks need not follow.
            By default a layer is assumed to move pixels, except those of Keras known not to.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    settings = ("moves_pixels",)

    origin = "Keras"

    # Layers that do not change each example by its own draws.
    refused: Mapping[str, Problem] = {
        "AugMix": (
            "draws its operations once, when its graph is made",
            "Expected a layer that draws for every image.",
            "Use `keras_multigpu.augmentation.RandAugment`.",
        ),
        "CutMix": MIXES,
        "MixUp": MIXES,
    }

    def __init__(
        self, layer: keras.Layer, *, moves_pixels: bool | None = None, **kwargs: Any
    ) -> None:
        self._require_wrappable(layer)
        if moves_pixels is not None:
            require_bool("moves_pixels", moves_pixels)
        # Whether boxes can follow is checked below, once the wrapped layer is known.
        box_format = kwargs.pop("bounding_box_format", None)
        super().__init__(**kwargs)
        self.wrapped = layer
        self.moves_pixels = moves_pixels
        self.bounding_box_format = box_format
        self._masks_follow = False
        if box_format is not None:
            self.require_support("bounding_boxes")

    def _require_wrappable(self, layer: Any) -> None:
        require_instance(layer)
        foreign = isinstance(layer, keras.Layer) and not isinstance(layer, AugmentationLayer)
        if not foreign or is_keras_cv(layer) != (self.origin == "keras-cv"):
            raise value_error(
                f"This is not a layer of {self.origin}.",
                f"Expected one, or one of your own that extends a layer of {self.origin}.",
                "Pass layers of all kinds to `augmentation.Sequence([...])`, which wraps those "
                "that need it.",
                layer=layer,
            )
        for part in model_internals.layers_of(layer):
            for name in (cls.__name__ for cls in type(part).__mro__):
                if name in self.refused:
                    what, *rest = self.refused[name]
                    raise value_error(f"{name} {what}.", *rest, layer=type(layer).__name__)

    @property
    def title(self) -> str:
        return type(self.wrapped).__name__

    def get_config(self) -> dict[str, Any]:
        layer = keras.saving.serialize_keras_object(self.wrapped)
        return {**super().get_config(), "layer": layer}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "KerasLayer":
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return cls(**{**config, "layer": layer})

    def require_support(self, *kinds: str) -> None:
        moved = [kind for kind in MOVED if kind in kinds]
        if not moved or self.images_suffice:
            return
        reason: str | Exception | None = "only layers of this package move boxes"
        if moved == ["segmentation_masks"]:
            # Once, because finding out may trace the layer, which is slow.
            reason = None if self._masks_follow else self.mask_obstacle()
            self._masks_follow = reason is None
        if reason is None:
            return
        error = reason if isinstance(reason, Exception) else None
        text = reason if error is None else f"it raised {type(error).__name__} on a trial"
        raise value_error(
            f"{self.title} cannot change `{moved[0]}` along with the images: {text}.",
            "Expected only layers that can, or examples without them.",
            "Use a layer of `keras_multigpu.augmentation`, or pass "
            f"`augmentation.{type(self).__name__}(..., moves_pixels=False)` if every "
            "pixel stays where it is.",
            layer=self.name,
        ) from error

    def mask_obstacle(self) -> str | Exception | None:
        """Why masks cannot follow the images; None if they can."""
        if not hasattr(self.wrapped, "transform_segmentation_masks"):
            return "it takes images only"
        if self.title == "RandomElasticTransform":  # In Keras 3.15.1.
            return "Keras bends them by another draw"
        return trial_error(self._call_seeded)

    @property
    def images_suffice(self) -> bool:
        """Whether boxes and masks stay as they are."""
        if self.moves_pixels is None:
            # By name, because Keras 3.10 lacks some of them.
            kinds = tuple(getattr(keras.layers, name, ()) for name in KEEP_PIXELS)
            return isinstance(self.wrapped, kinds)
        return not self.moves_pixels

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        return {"seeds": seeds}

    def change(self, example: Example, drawn: Drawn) -> Example:
        build(self.wrapped, example["images"])
        data, back = self._unpack(example)
        # Image by image is slower: 8 ms instead of 2 for a layer that doubles 32 images of 224x224.
        if not variable_internals.seed_states(self.wrapped):
            return back(self._run(data, training=True))
        return back(self._call_each(data, drawn["seeds"], image_by_itself=self.on_host))

    def at_inference(self, example: Example) -> Example:
        build(self.wrapped, example["images"])
        data, back = self._unpack(example)
        return back(self._run(data, training=False))

    def augment_batch(
        self, x: Any, y: Any, weight: Any, seeds: tf.Tensor, training: bool
    ) -> tuple[Any, Any, Any]:
        """As every layer's; but bytes that no target follows stay bytes until the layer has them.

        Inputs without images are changed as Keras's layer takes them.
        """
        if not any(leaf.shape.rank == 4 for leaf in keras.tree.flatten(x)):
            return self._change_batch(x, seeds, training), y, weight
        example, back = from_batch(x, y, weight)
        if self.bounding_box_format is not None or example.keys() & set(MOVED):
            return super().augment_batch(x, y, weight, seeds, training)
        changed = self._change_batch(example["images"], seeds, training)
        return back({**example, "images": as_dtype(changed, self.compute_dtype)})

    def _change_batch(self, data: Any, seeds: tf.Tensor, training: bool) -> Any:
        build(self.wrapped, data)
        if training and variable_internals.seed_states(self.wrapped):
            return self._call_each(data, seeds, image_by_itself=True)
        # Not `_run`, whose row for an empty batch would copy every other batch.
        return call_of(self.wrapped, training)(data)

    def changed_shape(self, shape: Shape) -> Shape:
        known = [size if isinstance(size, int) else None for size in shape]
        try:
            after = self.wrapped.compute_output_shape((None, *known))[1:]
        except NotImplementedError:
            return shape
        return replace_size(shape, after)

    def _call_each(self, data: Any, seeds: tf.Tensor, *, image_by_itself: bool) -> Any:
        """Change data with draws for each image, or with those of one seed for the batch."""
        if image_by_itself:
            return image_by_image(self._call_seeded, data, seeds)
        # The first seed; an empty batch has none, but its sum is zero.
        return self._call_seeded(data, tf.reduce_sum(seeds[:1], axis=0))

    def _call_seeded(self, data: Any, seed: tf.Tensor) -> Any:
        with seeded(self.wrapped, seed):
            return self._run(data, training=True)

    def _run(self, data: Any, training: bool) -> Any:
        # This makes a copy; Keras's layers write into the dictionaries they get.
        padded, cut = with_a_row(data)
        return cut(call_of(self.wrapped, training)(padded))

    def _unpack(self, example: Example) -> tuple[Any, Callable[[Any], Example]]:
        """Return what the layer takes, images or a dictionary, and a function for its outputs."""
        images = example["images"]
        if self.images_suffice or "segmentation_masks" not in example:
            return images, lambda outputs: {**example, "images": tf.cast(outputs, tf.float32)}
        masks, masks_back = with_one_mask(example["segmentation_masks"])

        def back(outputs: Any) -> Example:
            return {
                **example,
                "images": tf.cast(outputs["images"], tf.float32),
                "segmentation_masks": masks_back(outputs["segmentation_masks"]),
            }

        return {"images": images, "segmentation_masks": masks}, back


def with_one_mask(masks: Any) -> tuple[tf.Tensor, Callable[[Any], Any]]:
    """Join all masks as the channels of one; return it and a function that splits it again."""
    leaves = keras.tree.flatten(masks)
    joined = tf.concat([tf.cast(leaf, tf.float32) for leaf in leaves], axis=-1)

    def back(changed: Any) -> Any:
        parts = tf.split(changed, [leaf.shape[-1] for leaf in leaves], axis=-1)
        typed = [tf.cast(part, leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return keras.tree.pack_sequence_as(masks, typed)

    return joined, back


def with_a_row(data: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Add an example of zeros to an empty batch; return a copy and a function that removes it."""
    # A replica may have no examples, and some of Keras's layers fail on an empty batch.
    first = keras.tree.flatten(data)[0]
    if first.shape[0]:
        return keras.tree.map_structure(lambda leaf: leaf, data), lambda outputs: outputs
    rows = tf.shape(first)[0]
    extra = tf.maximum(1 - rows, 0)

    def pad_row(leaf: tf.Tensor) -> tf.Tensor:
        zeros = tf.zeros(tf.concat([[extra], tf.shape(leaf)[1:]], axis=0), leaf.dtype)
        return tf.ensure_shape(tf.concat([leaf, zeros], axis=0), [None, *leaf.shape[1:]])

    return (
        keras.tree.map_structure(pad_row, data),
        lambda outputs: keras.tree.map_structure(lambda leaf: leaf[:rows], outputs),
    )


def replace_size(shape: Shape, after: Any) -> Shape:
    """Replace the sizes of a shape by those of `after` that are known."""
    height, width, channels = (
        old if new is None else new for old, new in zip(shape, after, strict=True)
    )
    return height, width, channels


def trace_call(call: Callable[[Any, Any], Any], masks: bool = False) -> tuple[tf.Graph, Any]:
    """Trace a function of examples and a seed; return its graph and its outputs."""
    data: Any = tf.TensorSpec((1, *TRIAL))
    if masks:
        data = {"images": data, "segmentation_masks": tf.TensorSpec((1, *TRIAL[:2], 1))}
    with tf.init_scope():
        # With a seed, because the trial must not advance the layer's generators.
        tried = tf.function(lambda data: call(data, tf.zeros([2], tf.int32)), autograph=False)
        function = tried.get_concrete_function(data)
    return function.graph, function.structured_outputs


def trial_error(call: Callable[[Any, Any], Any]) -> Exception | None:
    """The exception, if any, of a function of examples that gets masks with the images."""
    try:
        trace_call(call, masks=True)
    except Exception as error:
        return error
    return None
