"""Digits in many handwritings, drawn here so that nothing is downloaded."""

import numpy as np

SIZE = (8, 8)
"""Height and width of each digit."""

COUNT = 1800
"""How many images are drawn, the same number of each digit."""

# Seven rows of five points for each digit.
SHAPES = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ....#
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .###.
"""


def draw_digits() -> tuple[np.ndarray, np.ndarray]:
    """Grey images, rotated, slanted, stretched, moved and blurred at random, and their kinds."""
    kinds = np.arange(COUNT) % 10
    # The same seed gives the same digits, and so about the same table, on every machine.
    random = np.random.default_rng(0)
    rows = [[list(part) for part in line.split()] for line in SHAPES.split("\n") if line]
    ink = (np.array(rows) == "#").transpose(1, 0, 2).astype(float)

    def vary(low: float, high: float) -> np.ndarray:
        return random.uniform(low, high, (len(kinds), 1, 1))

    # The place of each pixel on its digit's shape, both measured from their centers.
    y, x = np.meshgrid(np.arange(8) - 3.5, np.arange(8) - 3.5, indexing="ij")
    angle, slant = vary(-0.25, 0.25), vary(-0.2, 0.2)
    down = (np.cos(angle) * y + np.sin(angle) * x) * vary(0.85, 1.1) + vary(-0.6, 0.6)
    right = (np.cos(angle) * x - np.sin(angle) * y) * vary(0.7, 1.0) + slant * y + vary(-0.6, 0.6)
    # Ink spreads around each point of a shape.
    height, width = np.arange(7) - 3.0, np.arange(5) - 2.0
    spread = -1 / (2 * vary(0.4, 0.6)[..., None] ** 2)
    near_rows = np.exp((down[..., None] - height) ** 2 * spread)
    near_columns = np.exp((right[..., None] - width) ** 2 * spread)
    images = np.einsum("nyxh,nyxw,nhw->nyx", near_rows, near_columns, ink[kinds])
    images = images * vary(0.7, 1.1) + random.normal(0, 0.08, images.shape)
    return (images.clip(0, 1) * 255).round()[..., None].astype("float32"), kinds
