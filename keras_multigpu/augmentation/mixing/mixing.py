"""`Mix`: MixUp and CutMix.

A row's partner is its neighbour: rows 0 and 1, 2 and 3, and so on. So a pair stays together
however a batch is split into even shards, and in shuffled batches neighbours are as random as any
other two rows.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_alpha, require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.compilation import fuse
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, image_shape
from keras_multigpu.augmentation.mixing.labels import as_float, both_count, mix_targets, soft_labels
from keras_multigpu.augmentation.random_numbers import Draws, beta
from keras_multigpu.checks import require_positive_integer, value_error


@keras.saving.register_keras_serializable("keras_multigpu")
class Mix(AugmentationLayer):
    """Mixes each image, and its label, with its neighbour in the batch: by MixUp or by CutMix.

    MixUp blends the two images (Zhang et al. 2018, arXiv:1710.09412); CutMix pastes a box of the
    neighbour, of the image's proportions and with its centre anywhere, and mixes the labels by the
    pixels replaced (Yun et al. 2019, arXiv:1905.04899). Each image draws one of the two, equally
    often, and its own share from Beta(alpha, alpha). The defaults are those of DeiT (Touvron et al.
    2021, arXiv:2012.12877) and of most timm recipes since.

    Rows 0 and 1 are partners, 2 and 3, and so on; the last of an odd number takes the row before
    it, and a single image stays as it is. The number of replicas or workers does not matter, nor
    does `epoch(shard=)` if it reads even numbers of rows. Shuffle the examples, because neighbours
    are often of one class.

    With sample weights, one for each image, a mixture's loss is that of its two parts, by share and
    weight, if the loss is linear in the label, as cross-entropy is. Rows of weight zero are not
    mixed. To weight classes, use `Batches(balance="class_weight")`, whose weights are mixed with
    the labels; `fit(class_weight=)` comes after the mix and gives a mixture the weight of its
    larger share.

    Segmentation masks get the box, too, if images are not blended; labels may then be absent.

    Args:
        mix_up: The `alpha` of MixUp: small values mix little, 1 is uniform. None to use CutMix
            alone.
        cut_mix: The `alpha` of CutMix. None to use MixUp alone.
        num_classes: Makes integer labels one-hot, even at inference. Float labels are mixed as they
            are: one-hot ones, or without `num_classes` those of a regression.
        **kwargs: `seed`, `name` and `dtype`.

    Example:

    ```python
    batches = kmg.data.from_directory("photos", augment=Mix(num_classes=10))
    model.compile("adam", "categorical_crossentropy")
    ```
    """

    settings = ("mix_up", "cut_mix", "num_classes")

    def __init__(
        self,
        mix_up: float | None = 0.8,
        cut_mix: float | None = 1.0,
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.mix_up, self.cut_mix = as_alpha("mix_up", mix_up), as_alpha("cut_mix", cut_mix)
        if mix_up is None and cut_mix is None:
            raise value_error(
                "`mix_up` and `cut_mix` are both None.",
                "Expected a number for at least one of them.",
                mix_up=mix_up,
                cut_mix=cut_mix,
            )
        if num_classes is not None:
            require_positive_integer("num_classes", num_classes)
        self.num_classes = num_classes
        masks = () if mix_up is None else ("segmentation_masks",)
        self.unsupported = ("bounding_boxes", *masks)
        super().__init__(**kwargs)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        """Draw `"share"`, the image's own share of a blend, and `"box"`, to fill from the partner.

        A box is (left, top, right, bottom) in pixels.
        """
        draws = Draws(seeds)
        if self.mix_up is None:
            assert self.cut_mix is not None
            return {"box": draw_box(draws, self.cut_mix, shape)}
        if self.cut_mix is None:
            return {"share": beta(draws, self.mix_up)}
        cuts = draws.happens(0.5)
        share = beta(draws, self.mix_up)
        box = draw_box(draws, self.cut_mix, shape)
        return {"share": tf.where(cuts, 1.0, share), "box": tf.where(cuts[:, None], box, 0)}

    def at_inference(self, example: Example) -> Example:
        if "labels" not in example:
            return example
        return {**example, "labels": soft_labels(example["labels"], self.num_classes)}

    def change(self, example: Example, drawn: Drawn) -> Example:
        require_draws(drawn, ("share", "box"))
        if not {"labels", "segmentation_masks"} & example.keys():
            raise value_error(
                "Mix got images without labels, but mixing needs labels.",
                "Expected what is mixed into an image to be mixed into its label, too.",
                'In a model pass a dictionary with "images" and "labels"; in a pipeline use '
                "`Batches` with labels.",
                keys=sorted(example),
            )
        changed = dict(self.at_inference(example))
        images = example["images"]
        weights = as_float(example.get("sample_weights"))
        partners = partners_of(images)
        mixes = both_count(weights, partners)
        own = tf.ones_like(mixes, tf.float32)
        if "share" in drawn:
            own = tf.where(mixes, tf.cast(drawn["share"], tf.float32), 1.0)
            images = fuse(blend_images, [images, partners, own])
        if "box" in drawn:
            box = tf.where(mixes[:, None], tf.cast(drawn["box"], tf.int32), 0)
            images = fuse(paste_box, [images, partners, box])
            # By the pixels that were replaced: the border may have cut the box.
            own = own * (1 - area(box, image_shape(example)))
            if "segmentation_masks" in example:
                changed["segmentation_masks"] = keras.tree.map_structure(
                    lambda masks: paste_box(masks, partners, box), example["segmentation_masks"]
                )
        return {
            **changed,
            "images": images,
            **mix_targets(changed.get("labels"), weights, own, partners),
        }


def draw_box(draws: Draws, alpha: float, shape: Shape) -> tf.Tensor:
    """Boxes as CutMix draws them: centre anywhere, cut at the border; `int32[n, 4]`."""
    # The box has the image's proportions: of each side the root of its part of the area.
    half = tf.sqrt(1 - beta(draws, alpha)) / 2
    across, down = draws.numbers(), draws.numbers()
    height, width = (tf.cast(side, tf.float32) for side in shape[:2])
    left, right = ((across + side) * width for side in (-half, half))
    top, bottom = ((down + side) * height for side in (-half, half))
    sides = [
        tf.clip_by_value(tf.round(place), 0, size)
        for place, size in ((left, width), (top, height), (right, width), (bottom, height))
    ]
    return tf.cast(tf.stack(sides, axis=1), tf.int32)


def partners_of(images: tf.Tensor) -> tf.Tensor:
    """The number of each row's partner, `int32[n]`; a single row is its own."""
    count = images.shape[0]
    if count is None:
        rows = tf.range(tf.shape(images)[0])
        flipped = tf.bitwise.bitwise_xor(rows, 1)
        # The last of an odd number has no row after it, and takes the one before.
        return tf.where(flipped < tf.shape(images)[0], flipped, tf.maximum(rows - 1, 0))
    known = np.arange(count, dtype=np.int32)
    return tf.constant(np.where(known ^ 1 < count, known ^ 1, np.maximum(known - 1, 0)))


def blend_images(images: tf.Tensor, partners: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Blend images with their partners; `share`, `float32[n]`, is each image's own share."""
    # In this order shares of 1 are exact.
    return images + (1 - share)[:, None, None, None] * (tf.gather(images, partners) - images)


def paste_box(images: tf.Tensor, partners: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    left, top, right, bottom = tf.unstack(box[:, :, None, None, None], axis=1)
    rows = tf.range(tf.shape(images)[1])[:, None, None]
    columns = tf.range(tf.shape(images)[2])[:, None]
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return tf.where(inside, tf.gather(images, partners), images)


def area(box: tf.Tensor, shape: Shape) -> tf.Tensor:
    covered = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    return tf.cast(covered, tf.float32) / tf.cast(shape[0] * shape[1], tf.float32)
