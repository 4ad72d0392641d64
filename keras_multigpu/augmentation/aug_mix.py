"""`AugMix`: each image mixed with several of its own augmentations."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_number, is_pair, require_draws
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.mixing import beta, require_alpha
from keras_multigpu.augmentation.policies.draws import (
    OPERATIONS,
    Magnitudes,
    dirichlet,
    drawn_operation,
    operation_text,
)
from keras_multigpu.augmentation.policies.operations import as_levels, from_levels
from keras_multigpu.augmentation.policies.policy import Policy, steps
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_positive_integer, value_error

STRONGEST = 10.0
"""The severity at which operations are strongest."""

WEAKEST = 0.1
"""The severity of the weakest operation that is drawn."""


DRAWN = ("mixture", "shares", "operation", "magnitude")


@keras.saving.register_keras_serializable("keras_multigpu")
class AugMix(Policy):
    """Mixes each image with several chains of operations on it.

    The method is that of Hendrycks et al. 2020 (arXiv:1912.02781). Each image draws its chains,
    their lengths, their shares in a mixture (from a Dirichlet distribution), and the mixture's
    share in the result (from a Beta distribution). Each operation draws its strength evenly from
    0.1 to `severity`. At strength S, as in the authors' code, an operation changes

    | Operations | by |
    | --- | --- |
    | `rotate` | 3 S degrees, either way |
    | `shear_x`, `shear_y` | 0.03 S, either way |
    | `translate_x`, `translate_y` | S / 30 of the side, either way |
    | `solarize` | from level 256 - 25.6 S on |
    | `posterize` | to 4 - 0.4 S bits, rounded |
    | `auto_contrast`, `equalize` | (no strength) |

    Pixels from outside the image are black. Operations are Pillow's, on 256 levels. A mixture shows
    things in several places, so boxes and masks cannot follow it.

    Each operation runs only on the images that drew it, which XLA cannot compile: with
    `jit_compile="auto"` Keras does not compile a model that contains this layer. In a pipeline the
    model is not affected.

    Args:
        num_chains: Integer, the number of chains.
        chain_depth: The fewest and the most operations in a chain, or one number for both.
        severity: The largest strength of an operation, from 0.1 to 10.
        alpha: The parameter of both distributions: the smaller, the more unequal the shares.
        value_range: The values of black and white in the images.
        interpolation: How to read between pixels, `"bilinear"` or `"nearest"`.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes; they cannot follow this layer.
        **kwargs: `name` and `dtype`.
    """

    settings = ("num_chains", "chain_depth", "severity", "alpha")
    unsupported = ("bounding_boxes", "segmentation_masks")

    def __init__(
        self,
        num_chains: int = 3,
        chain_depth: int | tuple[int, int] = (1, 3),
        severity: float = 3,
        alpha: float = 1.0,
        *,
        value_range: tuple[float, float] = (0, 255),
        interpolation: str = "bilinear",
        seed: int | None = None,
        bounding_box_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            value_range=value_range,
            interpolation=interpolation,
            seed=seed,
            bounding_box_format=bounding_box_format,
            **kwargs,
        )
        require_positive_integer("num_chains", num_chains)
        self.num_chains = int(num_chains)
        self.chain_depth = as_depths(chain_depth)
        self.severity = as_number("severity", severity, low=WEAKEST, high=STRONGEST)
        self.alpha = require_alpha("alpha", alpha)

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        height, width = (tf.cast(side, tf.float32) for side in shape[:2])
        return {
            "auto_contrast": Magnitudes(),
            "equalize": Magnitudes(),
            "posterize": Magnitudes(4.0, 0.0),
            "rotate": Magnitudes(0.0, 30.0, either_way=True),
            "solarize": Magnitudes(256.0, 0.0),
            "shear_x": Magnitudes(0.0, 0.3, either_way=True),
            "shear_y": Magnitudes(0.0, 0.3, either_way=True),
            "translate_x": Magnitudes(0.0, width / 3, either_way=True),
            "translate_y": Magnitudes(0.0, height / 3, either_way=True),
        }

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        mixture = beta(draws, self.alpha)
        shares = dirichlet(draws, self.alpha, self.num_chains)
        chains = [self._drawn_chain(draws, shape) for _ in range(self.num_chains)]
        operation, magnitude = (tf.stack(one, axis=1) for one in zip(*chains, strict=True))
        return dict(zip(DRAWN, (mixture, shares, operation, magnitude), strict=True))

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        require_draws(drawn, DRAWN, needed=DRAWN)
        # All chains are one batch, the first chain of all images first: so each operation runs once
        # in a step, and not once for each chain.
        chains = drawn["operation"].shape[1]
        flat = {
            name: tf.concat(tf.unstack(drawn[name], axis=1), axis=0)
            for name in ("operation", "magnitude")
        }
        levels = as_levels(images, self.value_range)
        places = tf.tile(tf.range(tf.shape(images)[0]), [chains])
        for kind, magnitude in steps(flat):
            levels, places = self.operated(levels, places, kind, magnitude)
        share = drawn["mixture"][:, None]
        weights = tf.unstack(share * drawn["shares"], axis=1)
        mixed = (1 - share)[:, :, None, None] * images
        for weight, some in zip(weights, tf.split(places, chains), strict=True):
            one = tf.ensure_shape(tf.gather(levels, some), images.shape)
            mixed += weight[:, None, None, None] * from_levels(one, self.value_range)
        return mixed

    def drawn_text(self, drawn: Drawn) -> str:
        chains = zip(drawn["shares"], drawn["operation"], drawn["magnitude"], strict=True)
        total = float(drawn["mixture"])
        return " + ".join(
            f"{total * float(share):.0%} {chain_text(operations, magnitudes)}"
            for share, operations, magnitudes in chains
        )

    def _drawn_chain(self, draws: Draws, shape: Shape) -> tuple[tf.Tensor, tf.Tensor]:
        """The operations of a chain and their magnitudes; a shorter chain ends in identities."""
        least, most = self.chain_depth
        depth = least + draws.integers(most - least + 1)
        operations, magnitudes = [], []
        for place in range(most):
            strength = draws.uniform(WEAKEST, self.severity) / STRONGEST
            operation, magnitude = drawn_operation(draws, self.magnitudes(shape), strength)
            operations.append(tf.where(place < depth, operation, OPERATIONS.index("identity")))
            magnitudes.append(tf.where(place < depth, magnitude, 0.0))
        return tf.stack(operations, axis=1), tf.stack(magnitudes, axis=1)


def chain_text(operations: Any, magnitudes: Any) -> str:
    """The operations of a chain, such as `rotate 4, equalize`."""
    pairs = zip(operations, magnitudes, strict=True)
    kept = [pair for pair in pairs if OPERATIONS[int(pair[0])] != "identity"]
    return ", ".join(operation_text(*pair) for pair in kept)


def as_depths(value: Any) -> tuple[int, int]:
    """The argument `chain_depth` as a pair, checked."""
    depths = list(value) if is_pair(value) else [value, value]
    whole = all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in depths)
    if not whole or not 1 <= depths[0] <= depths[1]:
        raise value_error(
            "`chain_depth` is neither a number of operations nor a range of such numbers.",
            "Expected a positive integer, or the least and the most.",
            "Pass for example `chain_depth=(1, 3)`.",
            chain_depth=value,
        )
    return int(depths[0]), int(depths[1])
