"""The picture of some examples: a grid of images with their labels above."""

import textwrap
from typing import Any
from typing import NamedTuple

import numpy as np

from keras_multigpu.pictures import new_figure

COLUMNS = 8
"""How many images stand side by side."""

INK, GREY = "#1d2730", "#6b7783"

# All in inches.
CELL = 1.5
GAP = 0.07
LABEL = 0.24
TITLE = 0.7
SIDE = 0.32
MARGIN = 0.15

DPI = 110
PIXELATED = 64
"""Images with shorter sides are drawn as squares, not blurred."""


class Examples(NamedTuple):
    """What is drawn.

    Attributes:
        labels: A text for each example.
        rows: `(title, images)`: the originals, then each augmentation of them.
    """

    labels: list[str]
    rows: list[tuple[str, np.ndarray]]


class Grid(NamedTuple):
    """Where everything stands, in inches from the upper left corner.

    Attributes:
        columns: How many images stand side by side.
        rows: How many stand below one another for one example.
        blocks: How often the examples begin a new line.
        height: The height of an image; its width is `CELL`.
    """

    columns: int
    rows: int
    blocks: int
    height: float

    @property
    def left(self) -> float:
        """Where the first column begins: rows have titles if there are several."""
        return MARGIN + (SIDE if self.rows > 1 else 0)

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the figure."""
        block = LABEL + self.rows * (self.height + GAP) + GAP
        width = self.left + self.columns * (CELL + GAP) + MARGIN
        return max(width, 5.0), TITLE + self.blocks * block + MARGIN

    def corner(self, example: int, row: int) -> tuple[float, float]:
        """The upper left corner of an image."""
        block, column = divmod(example, self.columns)
        above = LABEL + row * (self.height + GAP)
        per_block = LABEL + self.rows * (self.height + GAP) + GAP
        return self.left + column * (CELL + GAP), TITLE + block * per_block + above


def drawn(examples: Examples, subtitle: str) -> Any:
    """A figure of the examples."""
    count = len(examples.labels)
    height, width = examples.rows[0][1].shape[1:3]
    columns = min(count, COLUMNS)
    grid = Grid(
        columns,
        len(examples.rows),
        -(-count // columns),
        # Very long or flat images are drawn smaller.
        float(np.clip(CELL * height / width, CELL / 2, 2 * CELL)),
    )
    figure = new_figure(grid.size, layout=None, dpi=DPI)
    draw_title(figure, grid, subtitle)
    for row, (title, images) in enumerate(examples.rows):
        for example, image in enumerate(images):
            axes = image_axes(figure, grid, example, row)
            draw_image(axes, image)
            if row == 0:
                draw_label(axes, examples.labels[example])
            if example % columns == 0:
                axes.set_ylabel(title, fontsize=9, color=GREY)
    return figure


def draw_title(figure: Any, grid: Grid, subtitle: str) -> None:
    """Write above the images what they are."""
    width, height = grid.size
    title = "Examples before and after augmentation" if grid.rows > 1 else "Examples"
    left = grid.left / width
    figure.text(left, 1 - 0.33 / height, title, fontsize=13, fontweight="bold", color=INK)
    line = textwrap.shorten(subtitle, int((width - grid.left - MARGIN) * 16), placeholder=" ...")
    figure.text(left, 1 - 0.56 / height, line, fontsize=8, color=GREY, parse_math=False)


def image_axes(figure: Any, grid: Grid, example: int, row: int) -> Any:
    """The axes of one image, without a frame."""
    width, height = grid.size
    x, y = grid.corner(example, row)
    place = (x / width, 1 - (y + grid.height) / height, CELL / width, grid.height / height)
    axes = figure.add_axes(place)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)
    return axes


def draw_image(axes: Any, image: np.ndarray) -> None:
    """Draw one image with values from 0 to 1."""
    if image.shape[-1] == 1:
        image = np.repeat(image, 3, axis=-1)
    small = max(image.shape[:2]) <= PIXELATED
    axes.imshow(image, interpolation="nearest" if small else "antialiased")


def draw_label(axes: Any, label: str) -> None:
    """Write an example's label above it."""
    line = textwrap.shorten(label, 24, placeholder=" ...") if " " in label else label[:24]
    axes.set_title(line, fontsize=9, color=INK, pad=3, parse_math=False)
