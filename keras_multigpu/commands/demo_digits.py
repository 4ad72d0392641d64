"""The handwritten digits that come with scikit-learn, as a folder of images."""

from pathlib import Path

SIZE = (8, 8)
"""Height and width of each digit."""


def write_digits(folder: Path) -> None:
    """Write 1,797 digits as PNG files, those of each kind in a folder of their own.

    Args:
        folder: Where; ten folders are made in it.
    """
    from PIL import Image
    from sklearn import datasets

    images, kinds = datasets.load_digits(return_X_y=True)
    # Grey levels from 0 to 16.
    pixels = (images * (255 / 16)).round().astype("uint8").reshape(-1, *SIZE)
    for kind in range(10):
        (folder / str(kind)).mkdir()
    for number, (image, kind) in enumerate(zip(pixels, kinds, strict=True)):
        Image.fromarray(image).save(folder / str(kind) / f"{number:04}.png")
