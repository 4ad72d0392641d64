"""Images in rows, each with lines of text below it."""

import textwrap
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.pictures import GREY, INK, new_figure

BOX = "#ffd60a"

# All in inches.
CELL = 1.62
GAP = 0.1
LINE = 0.125
TITLE = 0.36
MARGIN = 0.16

FONT = 7
CHARACTERS = 30
"""How many characters of that font are as wide as an image, and a little less."""

# How many lines fit below an image; more would push the images apart.
MOST_LINES = 8

DPI = 100
PIXELATED = 64
"""Images with shorter sides are drawn as squares, not blurred."""

TALLEST = 1.6
"""How many times as high as wide an image is drawn at most."""


# Floats from 0 to 255 have larger values than that; standardized ones do not.
BRIGHT = 16


def value_range(images: np.ndarray) -> tuple[float, float]:
    """The values of black and white, guessed from the images."""
    integers = images.dtype.kind in "iub"
    images = np.nan_to_num(images.astype(np.float32))
    low, high = float(images.min()), float(images.max())
    slack = 0.01
    if low >= -1 - slack and high <= 1 + slack and not integers:
        return (0.0 if low >= -slack else -1.0), 1.0
    if low >= -slack * 255 and high <= 255 * (1 + slack) and (integers or high > BRIGHT):
        return 0.0, 255.0
    low, high = (float(value) for value in np.percentile(images, [1, 99]))
    return low, high


def scaled(images: np.ndarray, values: tuple[float, float]) -> np.ndarray:
    """Images with values from 0 to 1, where black and white have these values."""
    low, high = values
    return np.clip((np.nan_to_num(images.astype(np.float32)) - low) / max(high - low, 1e-6), 0, 1)


class Cell(NamedTuple):
    """One image.

    Attributes:
        image: Its values from 0 to 1.
        texts: The lines below; a long one is wrapped.
        boxes: (left, top, right, bottom) of each box in pixels.
        mask: The class of each pixel, or None.
    """

    image: np.ndarray
    texts: list[str]
    boxes: np.ndarray = np.zeros((0, 4))
    mask: np.ndarray | None = None


class Row(NamedTuple):
    """Images side by side, None where a column is empty; `apart` sets off the first by a gap."""

    cells: list[Cell | None]
    heading: list[str]
    apart: bool = False

    @property
    def image_height(self) -> float:
        """Of the highest image, in inches."""
        return max(height_of(cell.image) for cell in self.cells if cell is not None)

    @property
    def lines(self) -> int:
        """How many lines of text are below the images."""
        return max(len(wrapped(cell.texts)) for cell in self.cells if cell is not None)

    @property
    def height(self) -> float:
        """With heading, images, texts and a gap, in inches."""
        heading = TITLE + LINE * (len(self.heading) - 1) if self.heading else 0
        return heading + self.image_height + LINE * self.lines + 2 * GAP


def width_of(columns: int) -> float:
    return 2 * MARGIN + columns * (CELL + GAP)


def grid_of(rows: list[Row]) -> Any:
    # Where there are few images their titles need room.
    width = max(width_of(max(len(row.cells) for row in rows)) + GAP, 5.0)
    height = 2 * MARGIN + sum(row.height for row in rows)
    figure = new_figure((width, height), layout=None, dpi=DPI)
    top = MARGIN
    for row in rows:
        draw_row(figure, row, top)
        top += row.height
    return figure


def draw_row(figure: Any, row: Row, top: float) -> None:
    for number, line in enumerate(row.heading):
        style = {"fontsize": FONT, "color": GREY}
        if number == 0:
            style = {"fontsize": 11, "color": INK, "fontweight": "bold"}
        write(figure, MARGIN, top + 0.18 + number * (LINE + 0.02), line, **style)
    images_top = top + row.height - (row.image_height + LINE * row.lines + 2 * GAP)
    for column, cell in enumerate(row.cells):
        if cell is not None:
            left = MARGIN + column * (CELL + GAP) + (GAP if column and row.apart else 0)
            draw_cell(figure, cell, left, images_top)


def draw_cell(figure: Any, cell: Cell, left: float, top: float) -> None:
    width, height = figure.get_size_inches()
    high = height_of(cell.image)
    wide = min(CELL, high * cell.image.shape[1] / cell.image.shape[0])
    axes = figure.add_axes(
        (left / width, 1 - (top + high) / height, wide / width, high / height), frame_on=False
    )
    axes.set_xticks([])
    axes.set_yticks([])
    small = max(cell.image.shape[:2]) <= PIXELATED
    axes.imshow(displayed(cell), interpolation="nearest" if small else "antialiased")
    axes.autoscale(False)
    for x0, y0, x1, y1 in cell.boxes - 0.5:
        axes.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], color=BOX, linewidth=1.6)
    for number, line in enumerate(wrapped(cell.texts)):
        below = top + high + LINE * (number + 0.9)
        write(figure, left, below, line, fontsize=FONT, color=INK)


def displayed(cell: Cell) -> np.ndarray:
    """The image in colours, on white where it is transparent, with its mask laid over it."""
    image = cell.image
    if image.shape[-1] == 2 or image.shape[-1] > 4:
        image = image[..., :1]
    if image.shape[-1] == 1:
        image = np.repeat(image, 3, axis=-1)
    if image.shape[-1] == 4:
        image = image[..., :3] * image[..., 3:] + 1 - image[..., 3:]
    if cell.mask is None:
        return image
    classes = np.asarray(cell.mask).astype(np.int64)
    colors = class_colors()[classes % len(class_colors())]
    return np.where((classes > 0)[..., None], 0.5 * image + 0.5 * colors, image)


def class_colors() -> np.ndarray:
    """The colours of classes in masks, of which 0 is the background."""
    from matplotlib import colormaps

    return colormaps["tab10"](np.array([7, 0, 2, 4, 9, 1, 8, 6, 5, 3]))[:, :3]


def height_of(image: np.ndarray) -> float:
    """How high an image is drawn, in inches: as wide as the others, unless it is very long."""
    return CELL * min(image.shape[0] / image.shape[1], TALLEST)


def wrapped(texts: list[str]) -> list[str]:
    """Texts in lines that are no wider than an image; where there is room, names keep values."""
    lines = []
    for text in texts:
        indent = "  " if ":" in text else ""
        room = CHARACTERS - len(indent)
        parts = ", ".join(
            part.replace(" ", "\xa0") if len(part) < room else part for part in text.split(", ")
        )
        lines += textwrap.wrap(parts, CHARACTERS, subsequent_indent=indent, break_on_hyphens=False)
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "..."]
    return lines


def write(figure: Any, left: float, top: float, text: str, **style: Any) -> None:
    """Write a line at this distance in inches from the left and the upper border."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - top / height, text, parse_math=False, **style)
