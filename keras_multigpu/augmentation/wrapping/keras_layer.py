"""`KerasLayer`: a layer of Keras as a layer of this package."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.batches import from_batch
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, as_dtype
from keras_multigpu.augmentation.wrapping.wrapped_layer import MOVED, WrappedLayer
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals, variable_internals
from keras_multigpu.seeded_layers import build, call_of, image_by_image, is_keras_cv, seeded

# Layers of Keras that take images alone, but leave every pixel in its place.
KEEP_PIXELS = (
    "ContrastLimitedAdaptiveHistogramEqualization",
    "GaussianDropout",
    "GaussianNoise",
    "Normalization",
    "RandomGrayscale",
    "Rescaling",
)

# What Keras 3.15.1 gets wrong, so that targets would no longer fit their images.
WRONG = {
    ("RandAugment", "bounding_boxes"): "Keras moves them in another order than the images",
    ("RandomCrop", "bounding_boxes"): "Keras takes the offset of rows from columns",
    ("RandomElasticTransform", "segmentation_masks"): "Keras bends them by another draw",
    ("RandomShear", "bounding_boxes"): "Keras moves them by another shear than the images",
}

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
class KerasLayer(WrappedLayer):
    """A layer of Keras that, in a pipeline, draws for each image.

    Labels and sample weights stay as they are. Boxes and masks follow the images; if the layer
    cannot move them, or Keras moves them wrongly, they raise a `ValueError`.

    Args:
        layer: A layer of Keras, or a subclass of one.
        moves_pixels: False if every pixel stays in its place, so boxes and masks need not follow.
            By default a layer that takes images only is assumed to move pixels, except those of
            Keras known not to.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

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
        super().__init__(layer, moves_pixels, **kwargs)

    def require_wrappable(self, wrapped: Any) -> None:
        foreign = isinstance(wrapped, keras.Layer) and not isinstance(wrapped, AugmentationLayer)
        if not foreign or is_keras_cv(wrapped) != (self.origin == "keras-cv"):
            raise value_error(
                f"This is not a layer of {self.origin}.",
                f"Expected one, or one of your own that extends a layer of {self.origin}.",
                "Pass other layers and functions to `augmentation.Sequence([...])`, which takes "
                "all kinds and wraps those that need it.",
                layer=wrapped,
            )
        for part in model_internals.layers_of(wrapped):
            for name in (cls.__name__ for cls in type(part).__mro__):
                if name in self.refused:
                    what, *rest = self.refused[name]
                    raise value_error(f"{name} {what}.", *rest, layer=type(wrapped).__name__)

    def obstacle(self, kind: str) -> str | Exception | None:
        if self.images_suffice:
            return None
        if not hasattr(self.wrapped, "transform_bounding_boxes"):
            return "it takes images only"
        # With a seed, because the trial must not advance the layer's generators.
        return WRONG.get((self.title, kind)) or trial_error(self._call_seeded, kind)

    @property
    def images_suffice(self) -> bool:
        """Whether boxes and masks stay as they are."""
        if self.moves_pixels is None:
            # By name, because Keras 3.10 lacks some of them.
            kinds = tuple(getattr(keras.layers, name, ()) for name in KEEP_PIXELS)
            return isinstance(self.wrapped, kinds)
        return not self.moves_pixels

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
        if self.bounding_box_format is not None or set(MOVED) & example.keys():
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
        with boxes_as_xyxy(self.wrapped):
            return cut(call_of(self.wrapped, training)(padded))

    def _unpack(self, example: Example) -> tuple[Any, Callable[[Any], Example]]:
        """Return what the layer takes, images or a dictionary, and a function for its outputs."""
        if self.images_suffice or not set(MOVED) & example.keys():
            images = example["images"]
            return images, lambda outputs: {**example, "images": tf.cast(outputs, tf.float32)}
        data = {"images": example["images"]}
        if "segmentation_masks" in example:
            data["segmentation_masks"], masks_back = with_one_mask(example["segmentation_masks"])
        boxes = example.get("bounding_boxes")
        if boxes:
            labels = tf.cast(boxes["labels"], tf.float32)
            data["bounding_boxes"] = {"boxes": boxes["boxes"], "labels": labels}

        def back(outputs: Any) -> Example:
            changed = {**example, "images": tf.cast(outputs["images"], tf.float32)}
            if "segmentation_masks" in data:
                changed["segmentation_masks"] = masks_back(outputs["segmentation_masks"])
            if boxes:
                moved = outputs["bounding_boxes"]
                labels = tf.cast(moved["labels"], boxes["labels"].dtype)
                own = tf.cast(moved["boxes"], tf.float32)
                changed["bounding_boxes"] = {**boxes, "boxes": own, "labels": labels}
            return changed

        return data, back


def with_one_mask(masks: Any) -> tuple[tf.Tensor, Callable[[Any], Any]]:
    """Join all masks as the channels of one; return it and a function that splits it again."""
    leaves = keras.tree.flatten(masks)
    joined = tf.concat([tf.cast(leaf, tf.float32) for leaf in leaves], axis=-1)

    def back(changed: Any) -> Any:
        parts = tf.split(changed, [leaf.shape[-1] for leaf in leaves], axis=-1)
        typed = [tf.cast(part, leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return keras.tree.pack_sequence_as(masks, typed)

    return joined, back


@contextlib.contextmanager
def boxes_as_xyxy(layer: keras.Layer) -> Iterator[None]:
    """Make the layers inside a layer take boxes in this package's format."""
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


def trace_call(call: Callable[[Any, Any], Any], *kinds: str) -> tuple[tf.Graph, Any]:
    """Trace a function of examples and a seed; return its graph and its outputs.

    Args:
        kinds: The targets to pass with the images.
    """
    boxes = {"boxes": tf.TensorSpec((1, 2, 4)), "labels": tf.TensorSpec((1, 2))}
    targets = {"bounding_boxes": boxes, "segmentation_masks": tf.TensorSpec((1, *TRIAL[:2], 1))}
    images = tf.TensorSpec((1, *TRIAL))
    data = {"images": images, **{kind: targets[kind] for kind in kinds}} if kinds else images
    with tf.init_scope():
        tried = tf.function(lambda data: call(data, tf.zeros([2], tf.int32)), autograph=False)
        function = tried.get_concrete_function(data)
    return function.graph, function.structured_outputs


def trial_error(call: Callable[[Any, Any], Any], kind: str) -> Exception | None:
    """The exception, if any, of a function of examples that gets boxes or masks with the images."""
    try:
        trace_call(call, kind)
    except Exception as error:
        return error
    return None
