"""Pictures: figures whose files are written whole, and grids of examples with their targets."""

import io
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.checks import error_of, printable, require_ending, value_error
from keras_multigpu.writing import write_whole, writes_here

INK, GREY, LIGHT, BOX = "#1d2730", "#6b7783", "#e3e7ea", "#ffd60a"

# Inches of an image in a grid, and the characters and lines of text that fit below it.
SIDE, CHARACTERS, MOST_LINES = 1.7, 30, 4

# Floats with a larger value range from 0 to 255. Standardized floats are smaller.
BRIGHT = 16

# Arrays without channels count as images only if their sides are at least this long.
SMALLEST_SIDE = 8

# Targets that layers also find among the inputs.
BESIDE = ("bounding_boxes", "segmentation_masks")

# How many parts of a mixed label, and how many numbers of any other target, are written.
MOST_PARTS = 3
MOST_NUMBERS = 4


def require_png(path: str | Path) -> Path:
    return require_ending(path, ".png", "The picture's file is not a PNG.")


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure, its size in inches; a helpful `ImportError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise error_of(
            ImportError,
            "The package matplotlib is not installed.",
            "Expected it for pictures; the rest of keras_multigpu does without.",
            "Run `pip install matplotlib`, or ask for no picture.",
            package="matplotlib",
        ) from error
    # The state and windows of pyplot belong to the user.
    return Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")


def finish(figure: Any, path: Path | None) -> Any:
    """Write a figure to a file, if there is one, and let notebooks show it."""
    if path is not None:
        write_png(figure, path)
    figure._repr_png_ = lambda: png_of(figure)
    return figure


def png_of(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def write_png(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all, by one of the processes that train together."""
    if not writes_here():
        return
    with write_whole(path) as partial:
        figure.savefig(partial, format="png")


def plain_axes(axes: Any) -> None:
    """Draw few lines, all of them light."""
    axes.grid(color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT)


# Grids of examples.


class Cell(NamedTuple):
    """One image.

    Attributes:
        image: Its values from 0 to 1.
        text: What stands below it.
        boxes: (left, top, right, bottom) of each box in pixels.
        mask: The class of each pixel, or None.
    """

    image: np.ndarray
    text: str = ""
    boxes: np.ndarray = np.zeros((0, 4))
    mask: np.ndarray | None = None


Row = tuple[str, list[Cell]]
"""A title and the images below it."""


def draw_grid(rows: list[Row], columns: int, heading: str = "") -> Any:
    """A figure with at most this many images side by side; longer rows are continued below."""
    lines = [
        ("" if begin else title, cells[begin : begin + columns])
        for title, cells in rows
        for begin in range(0, len(cells), columns)
    ]
    figure = new_figure((SIDE * columns, 1.3 * SIDE * len(lines)))
    figure.suptitle(heading, fontsize=8, color=GREY, parse_math=False)
    places = figure.subplots(len(lines), columns, squeeze=False)
    for place, (title, cells) in zip(places, lines, strict=True):
        place[0].set_title(title, loc="left", fontsize=9, color=INK, parse_math=False)
        for axes in place:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_frame_on(False)
        for axes, cell in zip(place, cells, strict=False):
            draw_image(axes, cell)
            for x0, y0, x1, y1 in cell.boxes - 0.5:
                axes.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], color=BOX, linewidth=1.6)
            text = "\n".join(textwrap.wrap(cell.text, CHARACTERS, max_lines=MOST_LINES))
            axes.set_xlabel(text, fontsize=7, color=INK, parse_math=False)
    return figure


def make_cells(
    x: Any,
    y: Any,
    class_names: list[str] | None = None,
    box_format: str | None = None,
) -> list[Cell]:
    """The images of a batch, with the first mask and boxes drawn and other targets as texts."""
    import keras

    images = image_leaf(x)
    beside = {name: x[name] for name in BESIDE if name in x} if isinstance(x, dict) else {}
    leaves = keras.tree.flatten_with_path((beside, y))
    targets = {path: np.asarray(leaf) for path, leaf in leaves if leaf is not None}
    masks = [path for path, leaf in targets.items() if is_mask(leaf, images)]
    boxes = [path for path in targets if path[-1] == "boxes" and box_format is not None]
    labels = [(*path[:-1], name) for path in boxes for name in ("labels", "classes")]
    labels = [path for path in labels if path in targets]
    cells = []
    for number, image in enumerate(scale_images(images)):
        here = {path: leaf[number, ...] for path, leaf in targets.items()}
        texts = []
        for path, value in here.items():
            if path in labels:
                text = ", ".join(target_text(one, class_names) for one in value[value >= 0])
            elif not path[0] or path in (*masks, *boxes):  # It is drawn, or among the inputs.
                continue
            else:
                text = target_text(value, class_names)
            texts.append((f"{path[-1]}: " if len(path) > 1 else "") + text)
        cell = Cell(image, printable(", ".join(texts)))
        if masks:
            cell = cell._replace(mask=here[masks[0]].reshape(image.shape[:2]))
        if boxes:
            of_boxes = here[labels[0]] if labels else None
            corners = corners_of(here[boxes[0]], of_boxes, str(box_format), image.shape)
            cell = cell._replace(boxes=corners)
        cells.append(cell)
    return cells


def is_mask(target: np.ndarray, images: np.ndarray) -> bool:
    """Whether a target has a class for each pixel."""
    size = images.shape[:3]
    return target.dtype.kind in "iu" and target.shape in (size, (*size, 1))


def image_leaf(x: Any) -> np.ndarray:
    import keras

    leaves = [leaf for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape")]
    for leaf in leaves:
        if len(leaf.shape) == 4 and leaf.shape[-1] in (1, 2, 3, 4):
            return np.asarray(leaf)
    for leaf in leaves:
        if len(leaf.shape) == 3 and min(leaf.shape[1:]) >= SMALLEST_SIDE:
            return np.asarray(leaf)[..., None]
    raise value_error(
        "These batches hold nothing that looks like an image.",
        "Expected inputs of the shape (height, width, channels), with 1 to 4 channels.",
        "Plot other kinds of data yourself.",
        shapes=[tuple(leaf.shape[1:]) for leaf in leaves],
    )


def corners_of(
    boxes: np.ndarray, labels: np.ndarray | None, box_format: str, shape: tuple[int, ...]
) -> np.ndarray:
    """The boxes of an image as (left, top, right, bottom) in pixels, except those of label -1."""
    import keras  # Commands import this module without Keras.

    corners = keras.utils.bounding_boxes.convert_format(
        boxes, source=box_format, target="xyxy", height=shape[0], width=shape[1]
    )
    return np.asarray(corners)[... if labels is None else labels >= 0]


def draw_image(axes: Any, cell: Cell) -> None:
    """Draw an image, of two or many channels the first, and its mask on top."""
    image = cell.image if cell.image.shape[-1] in (3, 4) else cell.image[..., 0]
    axes.imshow(image, cmap="gray", vmin=0, vmax=1)
    axes.autoscale(False)
    if cell.mask is not None:
        # Class 0, the background, is not drawn.
        classes = np.ma.masked_equal(cell.mask, 0)
        axes.imshow(classes % 10, cmap="tab10", vmin=0, vmax=9, alpha=0.5, interpolation="nearest")


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


def scale_images(images: np.ndarray) -> np.ndarray:
    """Images scaled to 0..1."""
    low, high = value_range(images)
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
