"""Image augmentation in which every image gets its own random draws.

    augment = kmg.augmentation.Sequence(
        [kmg.augmentation.RandomGeometry(flip="horizontal"), keras.layers.RandomContrast(0.2)]
    )
    train = kmg.data.from_directory("photos", augment=augment)

recipe                               proven lists of layers
RandomGeometry, RandomColor          flips, shifts, zooms, crops; brightness, contrast, hue
RandomErasing                        a rectangle of noise
RandAugment, TrivialAugment          policies with little to tune
Mix                                  mixed images with mixed labels
Sequence                             layers of this package, Keras and keras-cv
AugmentationLayer                    the base class, for layers of your own

How it works: a layer draws parameters for each image from two integers (`draw`) and changes images
by these parameters (`change`). In a pipeline the integers come with the batch (`batches`), in a
model from the layer's generator. `examples` brings data into the form that layers change.

These names mean the same everywhere: `images` are `float32[n, height, width, channels]`, `shape` is
`(height, width, channels)`, `boxes` are `float32[n, boxes, 4]` as (left, top, right, bottom) in
pixels, `seeds` are `int32[n, 2]`, `drawn` is what `draw` returned, `matrices` (`float32[n, 2, 3]`)
map `(x, y, 1)` of the result to the input, `partners` (`int32[n]`) are the rows that images are
mixed with, and `kind` and `magnitude` are a policy's operation for each image.
"""

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer as AugmentationLayer
from keras_multigpu.augmentation.geometry.random_geometry import RandomGeometry as RandomGeometry
from keras_multigpu.augmentation.keras_cv_layer import KerasCVLayer as KerasCVLayer
from keras_multigpu.augmentation.keras_layer import KerasLayer as KerasLayer
from keras_multigpu.augmentation.mixing.mixing import Mix as Mix
from keras_multigpu.augmentation.policies.rand_augment import RandAugment as RandAugment
from keras_multigpu.augmentation.policies.rand_augment import TrivialAugment as TrivialAugment
from keras_multigpu.augmentation.random_color import RandomColor as RandomColor
from keras_multigpu.augmentation.random_erasing import RandomErasing as RandomErasing
from keras_multigpu.augmentation.random_numbers import Draws as Draws
from keras_multigpu.augmentation.recipes import recipe as recipe
from keras_multigpu.augmentation.sequence import Sequence as Sequence

__all__ = [
    "AugmentationLayer",
    "Draws",
    "KerasCVLayer",
    "KerasLayer",
    "Mix",
    "RandAugment",
    "RandomColor",
    "RandomErasing",
    "RandomGeometry",
    "recipe",
    "Sequence",
    "TrivialAugment",
]


def __dir__() -> list[str]:
    """List the public names, without the modules."""
    return list(__all__)
