"""`CutMix`: a box of each image filled from another."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.mixing import Mixing, drawn_box, require_alpha
from keras_multigpu.augmentation.random_numbers import Draws


@keras.saving.register_keras_serializable("keras_multigpu")
class CutMix(Mixing):
    """Pastes a box of its neighbour in the batch into each image, and mixes the labels by area.

    Each image draws its box: the part that stays is from Beta(alpha, alpha), the box has the
    image's proportions and its centre anywhere, and what is outside the image is cut off (Yun et
    al. 2019, arXiv:1905.04899). Labels are mixed by the pixels replaced. Partners, sample weights
    and integer labels are those of `MixUp`. Segmentation masks get the box, too; labels may then be
    absent.

    Args:
        alpha: The parameter of the distribution: with 1 all areas are equally likely.
        num_classes: Makes integer labels one-hot, also at inference.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
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
