"""`MixUpOrCutMix`: one of the two for each image."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_probability
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.mixing import Mixing, beta, drawn_box, require_alpha
from keras_multigpu.augmentation.random_numbers import Draws


@keras.saving.register_keras_serializable("keras_multigpu")
class MixUpOrCutMix(Mixing):
    """Mixes each image with its neighbour in the batch, as `MixUp` or as `CutMix`.

    Each pair of images draws one of the two. The defaults are those of DeiT (Touvron et al. 2021,
    arXiv:2012.12877) and of most timm recipes since. Partners, sample weights and integer labels
    are those of `MixUp`.

    Args:
        mix_up_alpha: The `alpha` of `MixUp`.
        cut_mix_alpha: The `alpha` of `CutMix`.
        switch_probability: How often a mixed image is one of `CutMix`.
        probability: How often an image is mixed at all.
        num_classes: Makes integer labels one-hot, also at inference.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        **kwargs: `name` and `dtype`.
    """

    settings = ("mix_up_alpha", "cut_mix_alpha", "switch_probability", "probability")

    def __init__(
        self,
        mix_up_alpha: float = 0.8,
        cut_mix_alpha: float = 1.0,
        switch_probability: float = 0.5,
        probability: float = 1.0,
        num_classes: int | None = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=num_classes, seed=seed, **kwargs)
        self.mix_up_alpha = require_alpha("mix_up_alpha", mix_up_alpha)
        self.cut_mix_alpha = require_alpha("cut_mix_alpha", cut_mix_alpha)
        require_probability("switch_probability", switch_probability)
        require_probability("probability", probability)
        self.switch_probability = float(switch_probability)
        self.probability = float(probability)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        mixes = draws.happens(self.probability)
        cuts = draws.happens(self.switch_probability)
        share = beta(draws, self.mix_up_alpha)
        box = drawn_box(draws, self.cut_mix_alpha, shape)
        return {
            "share": tf.where(mixes & ~cuts, share, 1.0),
            "box": tf.where((mixes & cuts)[:, None], box, 0),
        }
