"""`recipe`: proven lists of layers, by name."""

from collections.abc import Callable

from keras_multigpu.augmentation.arguments import Range, as_size, as_value_range
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.geometry.random_geometry import RandomGeometry
from keras_multigpu.augmentation.mixing.mixing import Mix
from keras_multigpu.augmentation.policies.rand_augment import RandAugment, TrivialAugment
from keras_multigpu.augmentation.random_color import RandomColor
from keras_multigpu.augmentation.random_erasing import RandomErasing
from keras_multigpu.augmentation.sequence import Sequence
from keras_multigpu.checks import require_choice, require_positive_integer, value_error

# The crops of Szegedy et al. 2015, used since to train most models for ImageNet.
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)

Size = tuple[int, int] | None


def recipe(
    name: str,
    *,
    size: tuple[int, int] | None = None,
    value_range: Range = (0, 255),
    num_classes: int | None = None,
    seed: int | None = None,
    bounding_box_format: str | None = None,
) -> Sequence:
    """Return a proven list of layers as one layer.

    - `"light"`: horizontal flips, and shifts by up to an eighth of the side over black. Residual
      networks were trained with it on CIFAR-10 (He et al. 2016, arXiv:1512.03385).
    - `"standard"`: horizontal flips, rotations by up to 54 degrees, shifts by up to a tenth, and a
      little contrast. The list of Keras's guide to fine-tuning EfficientNet, which also flips
      images upside down.
    - `"strong"`: crops, horizontal flips, two operations of `RandAugment` at a magnitude of 9 with
      a deviation of 0.5, and noise in a quarter of the images. With `num_classes` every image is
      mixed by `Mix`, with an alpha of 0.8 for MixUp. Vision transformers need it (DeiT, Touvron et
      al. 2021, arXiv:2012.12877).
    - `"imagenet"`: crops, horizontal flips, `TrivialAugment`, and a gray box in a tenth of the
      images. With `num_classes` every image is mixed by `Mix`, with an alpha of 0.2 for MixUp. The
      second weights of torchvision's ResNet-50 were trained with it (Vryniotis 2021, "How to train
      state-of-the-art models using TorchVision's latest primitives").

    The crops of the last two take 8 to 100 percent of an image, with an aspect ratio between 3/4
    and 4/3 (Szegedy et al. 2015, arXiv:1409.4842).

    Args:
        name: One of the names above.
        size: The height and width of the results, even at inference; by default those of the
            images. One resampling does this and all moves, so pass large images as they are.
        value_range: The values of black and white in the images.
        num_classes: Lets `"strong"` and `"imagenet"` mix images and their labels, which become
            one-hot, even at inference.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...

    Returns:
        A `Sequence`. Its `layers` are the list.
    """
    require_choice("name", name, RECIPES)
    if num_classes is not None:
        require_positive_integer("num_classes", num_classes)
        if name not in MIXES:
            raise value_error(
                "`num_classes` was given for a recipe that does not mix images.",
                f"Expected it for {' or '.join(map(repr, MIXES))} only.",
                "Leave `num_classes` out, or add `Mix(num_classes=...)` to the recipe's layers.",
                name=name,
            )
    layers = RECIPES[name](as_size("size", size), as_value_range(value_range))
    if num_classes is not None:
        layers.append(Mix(MIXES[name], num_classes=num_classes))
    return Sequence(layers, seed=seed, bounding_box_format=bounding_box_format)


def light(size: Size, value_range: Range) -> list[AugmentationLayer]:
    black = value_range[0]
    return [
        RandomGeometry(
            flip="horizontal", translation=0.125, size=size, fill_mode="constant", fill_value=black
        )
    ]


def standard(size: Size, value_range: Range) -> list[AugmentationLayer]:
    return [
        RandomGeometry(flip="horizontal", rotation=0.15, translation=0.1, size=size),
        RandomColor(contrast=0.1, value_range=value_range),
    ]


def strong(size: Size, value_range: Range) -> list[AugmentationLayer]:
    return [
        RandomGeometry(flip="horizontal", crop_area=AREA, aspect_ratio=RATIO, size=size),
        # This is timm's rand-m9-mstd0.5-inc1, which also erases at most a third of the area.
        RandAugment(num_ops=2, magnitude=9, magnitude_std=0.5, value_range=value_range),
        RandomErasing(0.25, scale=(0.02, 1 / 3), value_range=value_range),
    ]


def imagenet(size: Size, value_range: Range) -> list[AugmentationLayer]:
    # torchvision erases normalised images and fills with 0, which is their mean.
    gray = sum(value_range) / 2
    return [
        RandomGeometry(flip="horizontal", crop_area=AREA, aspect_ratio=RATIO, size=size),
        TrivialAugment(value_range=value_range),
        RandomErasing(0.1, scale=(0.02, 0.33), aspect_ratio=(0.3, 3.3), fill_value=gray),
    ]


RECIPES: dict[str, Callable[[Size, Range], list[AugmentationLayer]]] = {
    one.__name__: one for one in (light, standard, strong, imagenet)
}

# The recipes that can mix images, with the `alpha` of MixUp.
MIXES = {"strong": 0.8, "imagenet": 0.2}
