"""Draws the pictures of the pages on augmentation while the documentation is built.

So a picture always shows what the layers do now. mkdocs calls `on_files`: see `hooks` in
mkdocs.yml. The photographs come with scikit-image.
"""

import functools
import io
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PHOTOS = ("chelsea", "astronaut", "coffee", "rocket")
SIDE = 180

# Images side by side in a picture.
COLUMNS = 6

RECIPES = ("light", "standard", "strong", "imagenet")

# The coffee of scikit-image: corners of cup and spoon, middle and radii of the saucer, in pixels.
CUP, SPOON = (173, 18, 408, 308), (326, 67, 425, 327)
SAUCER = ((278, 227), (202, 162))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pictures to the files of the site.

    Args:
        files: The files.
        config: The settings of mkdocs.
    """
    for name, content in pictures().items():
        files.append(File.generated(config, f"api/images/{name}.webp", content=content))
    return files


@functools.cache
def pictures() -> dict[str, bytes]:
    """Every picture by name, drawn once, even where `mkdocs serve` builds again and again."""
    # Neither needs a GPU, nor does anybody want to read what TensorFlow logs about it.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    import keras_multigpu as kmg

    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (layer, x, y) in previews(kmg.augmentation).items():
            path = Path(folder, f"{name}.png")
            batches = kmg.data.from_arrays(x, y, augment=layer, shuffle=False)
            batches.preview(path, count=COLUMNS)
            drawn[name] = as_webp([path])
        paths = [Path(folder, f"{name}.png") for name in RECIPES]
        for name, path in zip(RECIPES, paths, strict=True):
            layer = kmg.augmentation.recipe(name)
            kmg.data.from_arrays(repeated(photo("chelsea")), augment=layer).preview(path, COLUMNS)
        drawn["recipes"] = as_webp(paths)
    return drawn


def previews(augmentation: Any) -> dict[str, tuple[Any, Any, Any]]:
    """The layer, images and targets of every picture, by name.

    Args:
        augmentation: `keras_multigpu.augmentation`.
    """
    cat, astronaut = repeated(photo("chelsea")), repeated(photo("astronaut"))
    moves: dict[str, Any] = {"rotation": 0.1, "translation": 0.1, "zoom": 0.2, "shear": 0.2}
    colors: dict[str, Any] = {"saturation": (0.3, 0.7), "hue": 0.1, "grayscale": 0.1}
    boxes: dict[str, Any] = {"zoom": 0.2, "bounding_box_format": "xyxy"}
    return {
        "random_geometry": (augmentation.RandomGeometry(flip="horizontal", **moves), cat, None),
        "random_color": (
            augmentation.RandomColor(brightness=0.2, contrast=0.4, **colors),
            cat,
            None,
        ),
        "random_erasing": (augmentation.RandomErasing(1.0), cat, None),
        "rand_augment": (augmentation.RandAugment(), astronaut, None),
        "trivial_augment": (augmentation.TrivialAugment(), astronaut, None),
        "boxes_and_masks": (
            augmentation.RandomGeometry(flip="horizontal", rotation=0.08, **boxes),
            *coffee_with_targets(),
        ),
        "mix": (augmentation.Mix(), *labelled_photos()),
    }


def repeated(image: Any) -> Any:
    """A row of equal images."""
    import numpy as np

    return np.stack([image] * COLUMNS)


@functools.cache
def photo(name: str, size: tuple[int, int] = (270, 180)) -> Any:
    """A photograph of scikit-image.

    Args:
        name: Its name there.
        size: Width and height; what does not fit is cut off.
    """
    import numpy as np
    from PIL import Image, ImageOps
    from skimage import data

    image = Image.fromarray(getattr(data, name)())
    # The astronaut's head is in the upper part.
    return np.array(ImageOps.fit(image, size, centering=(0.5, 0.15)))


def labelled_photos() -> tuple[Any, Any]:
    """Four photographs of one size, and their classes one-hot."""
    import numpy as np

    images = np.stack([photo(name, (SIDE, SIDE)) for name in PHOTOS])
    return images, np.eye(len(PHOTOS), dtype=np.float32)


def coffee_with_targets() -> tuple[Any, Any]:
    """Cups of coffee, with boxes around cup and spoon and a mask of the saucer."""
    import numpy as np

    image = photo("coffee", (300, 200))
    rows, columns = np.ogrid[: image.shape[0], : image.shape[1]]
    (x, y), (wide, high) = SAUCER
    mask = ((2 * columns - x) / wide) ** 2 + ((2 * rows - y) / high) ** 2 < 1
    boxes = np.array([CUP, SPOON], np.float32) / 2
    targets = {
        "bounding_boxes": {"boxes": repeated(boxes), "labels": repeated(np.array([0, 1]))},
        "segmentation_masks": repeated(mask[..., None].astype(np.int32)),
    }
    return repeated(image), targets


def as_webp(paths: list[Path]) -> bytes:
    """Pictures, one below the other, in a quarter of the bytes."""
    from PIL import Image

    images = [Image.open(path).convert("RGB") for path in paths]
    joined = Image.new("RGB", (images[0].width, sum(image.height for image in images)))
    top = 0
    for image in images:
        joined.paste(image, (0, top))
        top += image.height
    content = io.BytesIO()
    joined.save(content, format="WEBP", quality=88, method=4)
    return content.getvalue()
