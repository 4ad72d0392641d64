"""Folders of JPEGs for the benchmarks, made from photographs that other packages ship."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SHIPPED = ("astronaut", "chelsea", "coffee", "immunohistochemistry", "retina", "rocket")
"""Photographs in scikit-image's wheel, so that nothing is downloaded."""

SIZE = (500, 375)
"""Width and height, as of many photographs in ImageNet."""

QUALITY = 92


def originals() -> dict[str, np.ndarray]:
    """Eight colour photographs, by name."""
    import skimage.data
    from sklearn.datasets import load_sample_images

    shipped = {name: getattr(skimage.data, name)() for name in SHIPPED}
    samples = load_sample_images()
    names = (Path(name).stem for name in samples.filenames)
    found = shipped | dict(zip(names, samples.images, strict=True))
    return {name: np.ascontiguousarray(image[..., :3]) for name, image in found.items()}


def write_photographs(folder: Path, each: int, seed: int = 0) -> None:
    """Write a class of JPEGs for each of the eight photographs: random parts of it, some mirrored.

    Args:
        folder: Where; a folder for each class is made in it.
        each: How many files of each class.
        seed: Decides the parts.
    """

    def write(number: int, name: str, image: np.ndarray, index: int) -> None:
        random = np.random.default_rng((seed, number, index))
        random_part(image, random).save(folder / name / f"{name}_{index:04d}.jpg", quality=QUALITY)

    with ThreadPoolExecutor() as pool:
        work = []
        for number, (name, image) in enumerate(sorted(originals().items())):
            (folder / name).mkdir(parents=True)
            work += [pool.submit(write, number, name, image, index) for index in range(each)]
        for one in work:
            one.result()


def random_part(image: np.ndarray, random: np.random.Generator):
    """A part of half to all of an image's height, 4 to 3, at another size, perhaps mirrored."""
    from PIL import Image

    width, height = SIZE
    rows, columns = image.shape[:2]
    part = int(min(rows, columns * height / width) * random.uniform(0.5, 1))
    across = part * width // height
    top = random.integers(rows - part + 1)
    left = random.integers(columns - across + 1)
    picture = Image.fromarray(image[top : top + part, left : left + across])
    picture = picture.resize(SIZE, Image.Resampling.BICUBIC)
    flipped = random.random() < 0.5
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else picture
