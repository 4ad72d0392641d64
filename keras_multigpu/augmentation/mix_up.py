"""`MixUp`: each image blended with another."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.mixing import Mixing, beta, require_alpha
from keras_multigpu.augmentation.random_numbers import Draws


@keras.saving.register_keras_serializable("keras_multigpu")
class MixUp(Mixing):
    """Blends each image, and its label, with its neighbour in the batch.

    Each image draws its own share from Beta(alpha, alpha) (Zhang et al. 2018, arXiv:1710.09412).
    Rows 0 and 1 are partners, 2 and 3, and so on; the last of an odd number takes the row before
    it, and a single image stays as it is. The number of replicas or workers does not matter, nor
    does `epoch(shard=)` if it reads even numbers of rows. Shuffle the examples, because neighbours
    are often of one class.

    With sample weights, a mixture's loss is that of its two parts, by share and weight, if the loss
    is linear in the label, as cross-entropy is. Rows of weight zero are not mixed. To weight
    classes, use `Batches(balance="class_weight")`, whose weights are mixed with the labels;
    `fit(class_weight=)` comes after the mix and gives a mixture the weight of its larger share.

    Args:
        alpha: The parameter of the distribution: small values mix little, 1 is uniform.
        num_classes: Makes integer labels one-hot, also at inference. Float labels are mixed as they
            are: one-hot ones, or without `num_classes` those of a regression.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        **kwargs: `name` and `dtype`.

    Example:

    ```python
    batches = kmg.data.from_directory("photos", augment=MixUp(num_classes=10))
    model.compile("adam", "categorical_crossentropy")
    ```
    """

    settings = ("alpha",)

    def __init__(
        self,
        alpha: float = 0.2,
        num_classes: int | None = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=num_classes, seed=seed, **kwargs)
        self.alpha = require_alpha("alpha", alpha)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        return {"share": beta(Draws(seeds), self.alpha)}
