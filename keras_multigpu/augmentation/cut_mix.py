"""`CutMix`: a box of each image filled from another."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.mixing import Mixing, drawn_box, require_alpha
from keras_multigpu.augmentation.random_numbers import Draws


@keras.saving.register_keras_serializable("keras_multigpu")
class CutMix(Mixing):
    """Fills a box of each image from its neighbour in the batch, and mixes the labels by area.

    Each image draws its box: the share that stays is from Beta(alpha, alpha), the box has the
    image's proportions, its centre is anywhere, and what is outside of the image is cut off (Yun
    et al. 2019, arXiv:1905.04899). Labels are mixed by the pixels that were really replaced.
    Partners, sample weights and integer labels are those of `MixUp`. Segmentation masks get the
    box, too, and then labels may be absent.

    Args:
        alpha: The parameter of the distribution: 1 makes boxes of any area alike.
        num_classes: Integer, makes integer labels one-hot, also at inference.
        seed: Integer, decides the draws in a model. In a pipeline the seed of the `Batches` does.
        **kwargs: `name` and `dtype`.
    """

    settings = ("alpha",)
    unsupported = ("bounding_boxes",)

    def __init__(
        self,
        alpha: float = 1.0,
        num_classes: int | None = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=num_classes, seed=seed, **kwargs)
        self.alpha = require_alpha("alpha", alpha)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        return {"box": drawn_box(Draws(seeds), self.alpha, shape)}
