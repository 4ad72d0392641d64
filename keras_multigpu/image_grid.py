"""Figures of examples: rows of images, each with lines of text below it."""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_multigpu.pictures import GREY, INK, new_figure

BOX = "#ffd60a"

# All in inches.
CELL = 1.62
GAP = 0.1
LINE = 0.125
TITLE = 0.36
MARGIN = 0.16
DPI = 100

FONT = 7
# How many characters of that font fit below an image.
CHARACTERS = 30

# How many lines of text an image has at most.
MOST_LINES = 8

# The largest ratio of height to width of a drawn image.
TALLEST = 1.6

# Floats with a larger value range from 0 to 255. Standardized floats are smaller.
BRIGHT = 16

# How many parts of a mixed label, and how many numbers of any other target, are written.
MOST_PARTS = 3
MOST_NUMBERS = 4


class Cell(NamedTuple):
    """One image.

    Attributes:
        image: Its values from 0 to 1.
        texts: The lines below it; long ones are wrapped.
        boxes: (left, top, right, bottom) of each box in pixels.
        mask: The class of each pixel, or None.
    """

    image: np.ndarray
    texts: list[str]
    boxes: np.ndarray = np.zeros((0, 4))
    mask: np.ndarray | None = None

    @property
    def height(self) -> float:
        """The height in inches at the usual width, limited by `TALLEST`."""
        return CELL * min(self.image.shape[0] / self.image.shape[1], TALLEST)


class Block(NamedTuple):
    """Images below a title and lines of text. A gap separates `first` from the others."""

    title: str
    text: list[str]
    cells: list[Cell]
    first: Cell | None = None


class Row(NamedTuple):
    """Cells, each with its distance from the left in inches, and lines above them."""

    cells: list[tuple[float, Cell]]
    heading: list[str]

    @property
    def images_top(self) -> float:
        return TITLE + LINE * (len(self.heading) - 1) if self.heading else 0

    @property
    def height(self) -> float:
        below = (cell.height + LINE * len(wrapped(cell.texts)) for _, cell in self.cells)
        return self.images_top + max(below) + 2 * GAP


def boxes_of(
    boxes: np.ndarray, labels: np.ndarray | None, box_format: str, shape: tuple[int, ...]
) -> np.ndarray:
    """The boxes of an image as (left, top, right, bottom) in pixels, except those of label -1."""
    corners = keras.utils.bounding_boxes.convert_format(
        boxes, source=box_format, target="xyxy", height=shape[0], width=shape[1]
    )
    return np.asarray(corners)[... if labels is None else labels >= 0]


def grid_of(blocks: list[Block], columns: int) -> Any:
    """A figure; `columns` does not count the first image of a block."""
    indent = CELL + 2 * GAP if any(block.first for block in blocks) else 0.0
    # Titles need some width even for few images.
    width = max(2 * MARGIN + indent + columns * (CELL + GAP), 5.0)
    rows = [row for block in blocks for row in rows_of(block, columns, indent, width)]
    height = 2 * MARGIN + sum(row.height for row in rows)
    figure = new_figure((width, height), layout=None, dpi=DPI)
    top = MARGIN
    for row in rows:
        for number, line in enumerate(row.heading):
            style = {"fontsize": FONT, "color": GREY}
            if number == 0:
                style = {"fontsize": 11, "color": INK, "fontweight": "bold"}
            write(figure, MARGIN, top + 0.18 + number * (LINE + 0.02), line, **style)
        for left, cell in row.cells:
            draw_cell(figure, cell, left, top + row.images_top)
        top += row.height
    return figure


def rows_of(block: Block, columns: int, indent: float, width: float) -> Iterator[Row]:
    characters = int(width / CELL * CHARACTERS)
    text = [line for part in block.text for line in textwrap.wrap(part, characters)]
    first, heading = block.first, [block.title, *text]
    for begin in range(0, len(block.cells), columns):
        cells = [] if first is None else [(MARGIN, first)]
        for column, cell in enumerate(block.cells[begin : begin + columns]):
            cells.append((MARGIN + indent + column * (CELL + GAP), cell))
        yield Row(cells, heading)
        first, heading = None, []


def draw_cell(figure: Any, cell: Cell, left: float, top: float) -> None:
    width, height = figure.get_size_inches()
    wide = min(CELL, cell.height * cell.image.shape[1] / cell.image.shape[0])
    place = left / width, 1 - (top + cell.height) / height, wide / width, cell.height / height
    axes = figure.add_axes(place, frame_on=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.imshow(colored(cell))
    axes.autoscale(False)
    for x0, y0, x1, y1 in cell.boxes - 0.5:
        axes.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], color=BOX, linewidth=1.6)
    for number, line in enumerate(wrapped(cell.texts)):
        below = top + cell.height + LINE * (number + 0.9)
        write(figure, left, below, line, fontsize=FONT, color=INK)


def write(figure: Any, left: float, top: float, text: str, **style: Any) -> None:
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - top / height, text, parse_math=False, **style)


def colored(cell: Cell) -> np.ndarray:
    """The image in RGB, with white behind transparent parts and its mask on top."""
    from matplotlib import colormaps

    image = cell.image
    if image.shape[-1] == 2 or image.shape[-1] > 4:
        image = image[..., :1]
    if image.shape[-1] == 1:
        image = np.repeat(image, 3, axis=-1)
    if image.shape[-1] == 4:
        image = image[..., :3] * image[..., 3:] + 1 - image[..., 3:]
    if cell.mask is None:
        return image
    # Class 0, the background, is not drawn.
    colors = colormaps["tab10"](np.array([7, 0, 2, 4, 9, 1, 8, 6, 5, 3]))[:, :3]
    classes = np.asarray(cell.mask).astype(np.int64)
    blended = 0.5 * image + 0.5 * colors[classes % len(colors)]
    return np.where((classes > 0)[..., None], blended, image)


def wrapped(texts: list[str]) -> list[str]:
    """Texts wrapped to the width of an image."""
    lines = [
        line
        for text in texts
        for line in textwrap.wrap(text, CHARACTERS, subsequent_indent="  " if ":" in text else "")
    ]
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "..."]


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


def scaled(images: np.ndarray, values: tuple[float, float] | None = None) -> np.ndarray:
    """Images scaled to 0..1, where `values` are black and white."""
    low, high = values or value_range(images)
    return np.clip((np.nan_to_num(images.astype(np.float32)) - low) / max(high - low, 1e-6), 0, 1)


def target_text(value: np.ndarray, class_names: list[str] | None = None) -> str:
    """A target as a short text: classes, with their fractions if mixed; numbers; or a shape."""

    def name(number: int) -> str:
        return dict(enumerate(class_names or ())).get(number, str(number))

    if value.dtype == object:
        return value.item().decode(errors="replace") if value.ndim == 0 else "texts"
    if value.ndim > 1:
        return "x".join(str(size) for size in value.shape)
    if value.size == 1:
        number = value.reshape(()).item()
        if isinstance(number, float) and not (class_names and number.is_integer()):
            return f"{number:.4g}"
        return name(int(number))
    if np.isin(value, (0, 1)).all():
        return ", ".join(map(name, np.flatnonzero(value).tolist())) or "-"
    if value.min() >= 0 and abs(value.sum() - 1) < 0.01:
        largest = np.argsort(-value, kind="stable")[:MOST_PARTS].tolist()
        return " + ".join(f"{value[i]:.0%} {name(i)}" for i in largest if value[i] >= 0.005)
    numbers = ", ".join(f"{number:.3g}" for number in value[:MOST_NUMBERS].tolist())
    return numbers + (", ..." if value.size > MOST_NUMBERS else "")
