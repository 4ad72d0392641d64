"""`AugMix`: each image mixed with several of its own augmentations."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import (
    as_alpha,
    as_number,
    is_count,
    is_pair,
    require,
    require_draws,
)
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.policies.policy import (
    OPERATIONS,
    Magnitudes,
    Policy,
    operation_text,
)
from keras_multigpu.augmentation.random_numbers import Draws, beta, dirichlet
from keras_multigpu.checks import require_positive_integer

# The severity at which operations are strongest, and that of the weakest operations drawn.
STRONGEST = 10.0
WEAKEST = 0.1

IDENTITY = OPERATIONS.index("identity")
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
        **kwargs: `seed`, `name` and `dtype`.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(value_range=value_range, interpolation=interpolation, **kwargs)
        require_positive_integer("num_chains", num_chains)
        depths: Any = chain_depth if is_pair(chain_depth) else (chain_depth, chain_depth)
        require(
            all(map(is_count, depths)) and depths[0] <= depths[1],
            "chain_depth",
            chain_depth,
            "is neither a number of operations nor a range of such numbers",
            "a positive integer, or the fewest and the most",
            "(1, 3)",
        )
        self.num_chains = num_chains
        self.chain_depth = int(depths[0]), int(depths[1])
        self.severity = as_number("severity", severity, low=WEAKEST, high=STRONGEST)
        self.alpha = as_alpha("alpha", alpha)

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

    def strength(self, draws: Draws) -> tf.Tensor:
        return draws.uniform(WEAKEST, self.severity) / STRONGEST

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        mixture = beta(draws, self.alpha)
        shares = dirichlet(draws, self.alpha, self.num_chains)
        chains = [self._drawn_chain(draws, shape) for _ in range(self.num_chains)]
        operation, magnitude = (tf.stack(one, axis=1) for one in zip(*chains, strict=True))
        return dict(zip(DRAWN, (mixture, shares, operation, magnitude), strict=True))

    def _drawn_chain(self, draws: Draws, shape: Shape) -> tuple[tf.Tensor, tf.Tensor]:
        """The operations of a chain and their magnitudes; a shorter chain ends in identities."""
        fewest, most = self.chain_depth
        depth = fewest + draws.integers(most - fewest + 1)
        operation, magnitude = self.drawn_operations(draws, shape, most)
        used = tf.range(most) < depth[:, None]
        return tf.where(used, operation, IDENTITY), tf.where(used, magnitude, 0.0)

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        require_draws(drawn, DRAWN, needed=DRAWN)
        # All chains form one batch, the first chains of all images first: so in each step an
        # operation runs once, and not once for each chain.
        chains = drawn["operation"].shape[1]
        flat = {
            name: tf.concat(tf.unstack(drawn[name], axis=1), axis=0)
            for name in ("operation", "magnitude")
        }
        share = drawn["mixture"][:, None]
        weights = tf.unstack(share * drawn["shares"], axis=1)
        mixed = (1 - share)[:, :, None, None] * images
        for weight, chain in zip(weights, self.operated_copies(images, flat, chains), strict=True):
            mixed += weight[:, None, None, None] * chain
        return mixed

    def drawn_text(self, drawn: Drawn) -> str:
        chains = zip(drawn["shares"], drawn["operation"], drawn["magnitude"], strict=True)
        total = float(drawn["mixture"])
        return " + ".join(
            f"{total * float(share):.0%} {chain_text(operations, magnitudes)}"
            for share, operations, magnitudes in chains
        )


def chain_text(operations: Any, magnitudes: Any) -> str:
    """Describe the operations of a chain, such as `rotate 4, equalize`."""
    pairs = zip(operations, magnitudes, strict=True)
    return ", ".join(operation_text(*pair) for pair in pairs if int(pair[0]) != IDENTITY)
