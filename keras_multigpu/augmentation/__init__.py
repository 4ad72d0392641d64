"""Layers that change images at random: each image by draws of its own, and fast.

    seeds ──────────────> draws ─────────────> changed images, labels, boxes, masks
    random_numbers.py     `draw`               `change`

Every layer is an `AugmentationLayer` (`augmentation_layer.py`): it draws parameters from two
integers for each image, and changes images by parameters. In a pipeline the integers come with
the batch (`examples/`), in a model from the layer's own generator; the rest is the same.
`geometry/`, `color/`, `policies/` and `mixing/` hold the arithmetic. `Sequence` puts layers in a
row, and `wrapping/` lets those of Keras and keras-cv join. `gallery.py` draws what they do.

Some names mean the same everywhere and are not explained again: `images` are
`float32[n, height, width, channels]`, `masks` have the same axes, `shape` is `(height, width,
channels)` of the images, `boxes` are `float32[n, boxes, 4]` as (left, top, right, bottom) in
pixels, `seeds` `int32[n, 2]`, `drawn` is what `draw` returned, `matrices` are `float32[n, 2, 3]`
and say where `(x, y, 1)` of the result comes from, `partners` (`int32[n]`) name the image that each
is mixed with, and `kind` and `magnitude` (`int32[n]`, `float32[n]`) an operation of a policy for
each image. Whether this is a pipeline on the CPU, where Python may run and XLA pays, is asked of
`compilation.is_on_host`.
"""

from keras_multigpu.augmentation.aug_mix import AugMix as AugMix
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer as AugmentationLayer
from keras_multigpu.augmentation.cut_mix import CutMix as CutMix
from keras_multigpu.augmentation.function import Function as Function
from keras_multigpu.augmentation.gallery import gallery as gallery
from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer as KerasCVLayer
from keras_multigpu.augmentation.keras_layer import KerasLayer as KerasLayer
from keras_multigpu.augmentation.mix_up import MixUp as MixUp
from keras_multigpu.augmentation.mix_up_or_cut_mix import MixUpOrCutMix as MixUpOrCutMix
from keras_multigpu.augmentation.rand_augment import RandAugment as RandAugment
from keras_multigpu.augmentation.random_color import RandomColor as RandomColor
from keras_multigpu.augmentation.random_erasing import RandomErasing as RandomErasing
from keras_multigpu.augmentation.random_geometry import RandomGeometry as RandomGeometry
from keras_multigpu.augmentation.random_numbers import Draws as Draws
from keras_multigpu.augmentation.recipes import recipe as recipe
from keras_multigpu.augmentation.sequence import Sequence as Sequence
from keras_multigpu.augmentation.trivial_augment import TrivialAugment as TrivialAugment

__all__ = [
    "AugmentationLayer",
    "AugMix",
    "CutMix",
    "Draws",
    "Function",
    "gallery",
    "KerasCVLayer",
    "KerasLayer",
    "MixUp",
    "MixUpOrCutMix",
    "RandAugment",
    "RandomColor",
    "RandomErasing",
    "RandomGeometry",
    "recipe",
    "Sequence",
    "TrivialAugment",
]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
