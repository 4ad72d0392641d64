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
    from keras_multigpu import augmentation

    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (layers, images) in galleries(augmentation).items():
            path = Path(folder, f"{name}.png")
            augmentation.gallery(layers, images, path)
            drawn[name] = as_webp(path)
    return drawn


def galleries(augmentation: Any) -> dict[str, tuple[Any, Any]]:
    """Layers and images of every picture, by name.

    Args:
        augmentation: `keras_multigpu.augmentation`.
    """
    cat, astronaut = photo("chelsea"), photo("astronaut")
    made = {
        "random_geometry": (
            augmentation.RandomGeometry(
                flip="horizontal", rotation=0.1, translation=0.1, zoom=0.2, shear=0.2
            ),
            cat,
        ),
        "random_color": (
            augmentation.RandomColor(
                brightness=0.2, contrast=0.4, saturation=(0.3, 0.7), hue=0.1, grayscale=0.1
            ),
            cat,
        ),
        "random_erasing": (augmentation.RandomErasing(1.0), cat),
        "rand_augment": (augmentation.RandAugment(), astronaut),
        "trivial_augment": (augmentation.TrivialAugment(), astronaut),
        "boxes_and_masks": (
            augmentation.RandomGeometry(
                flip="horizontal", rotation=0.08, zoom=0.2, bounding_box_format="xyxy"
            ),
            coffee_with_targets(),
        ),
        "recipes": (
            {name: augmentation.recipe(name) for name in RECIPES},
            cat,
        ),
    }
    photos = labelled_photos()
    made["mix"] = (augmentation.Mix(), photos)
    return made


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


def labelled_photos() -> dict[str, Any]:
    """Four photographs of one size, and their classes one-hot."""
    import numpy as np

    images = np.stack([photo(name, (SIDE, SIDE)) for name in PHOTOS])
    return {"images": images, "labels": np.eye(len(PHOTOS), dtype=np.float32)}


def coffee_with_targets() -> dict[str, Any]:
    """A cup of coffee, with boxes around cup and spoon and a mask of the saucer."""
    import numpy as np

    image = photo("coffee", (300, 200))
    rows, columns = np.ogrid[: image.shape[0], : image.shape[1]]
    (x, y), (wide, high) = SAUCER
    mask = ((2 * columns - x) / wide) ** 2 + ((2 * rows - y) / high) ** 2 < 1
    boxes = np.array([CUP, SPOON], np.float32) / 2
    return {
        "images": image,
        "bounding_boxes": {"boxes": boxes, "labels": np.array([0, 1])},
        "segmentation_masks": mask[..., None].astype(np.int32),
    }


def as_webp(path: Path) -> bytes:
    """A picture in a quarter of the bytes."""
    from PIL import Image

    content = io.BytesIO()
    Image.open(path).convert("RGB").save(content, format="WEBP", quality=88, method=4)
    return content.getvalue()
