"""`augmentation.gallery` draws an image and what layers make of it, in rows of cells."""

import sys

import keras
import numpy as np
import pytest

from keras_multigpu.augmentation import Mix, RandomColor, RandomGeometry, gallery
from keras_multigpu.augmentation.gallery import batch_of, make_cells

RED = np.full((12, 16, 3), (255, 0, 0), np.uint8)
DIMMED = RandomColor(brightness=(-0.2, -0.1))


def pixels_of(path):
    return keras.utils.img_to_array(keras.utils.load_img(path))


def test_one_layer_is_drawn_eleven_times_beside_the_original(tmp_path):
    """Twelve red images, of which the original is pure red."""
    path = tmp_path / "new" / "picture.png"
    figure = gallery(DIMMED, RED, path)
    assert figure._repr_png_() == path.read_bytes()
    pixels = pixels_of(path)
    original = (pixels == (255, 0, 0)).all(-1).sum()
    red = (pixels[..., 0] >= 200) & (pixels[..., 1:] == 0).all(-1)
    assert red.sum() == pytest.approx(12 * original, rel=0.05)
    assert [file.name for file in path.parent.iterdir()] == ["picture.png"]


@pytest.mark.parametrize(
    ("images", "values"), [(RED, (0, 255)), (RED / np.float32(255), (0, 1)), (RED[..., :1], None)]
)
def test_images_are_shown_in_the_range_of_their_layer(images, values):
    layer = RandomColor(brightness=(-0.2, -0.2), value_range=values or (0, 255))
    original, changed = make_cells(layer, batch_of(images), 1)
    assert (original.image[0, 0, 0], changed.image[0, 0, 0]) == pytest.approx((1, 0.8))


def test_images_of_a_batch_mix_with_the_first():
    """The mixed labels are written below, with their shares."""
    data = {"images": np.stack([RED, RED * 0]), "labels": np.eye(2, dtype="float32")}
    for cell in make_cells(Mix(1.0, None, num_classes=2), batch_of(data), 4)[1:]:
        share = round(100 * cell.image[0, 0, 0])
        first, _, second = cell.text.removeprefix("label: ").partition(" + ")
        assert {first, second} <= {f"{share}% 0", f"{100 - share}% 1"}


def test_boxes_and_masks_are_drawn_at_their_new_places(tmp_path):
    boxes = {"boxes": np.array([[1.0, 2, 5, 6], [0, 0, 0, 0]]), "labels": np.array([3, -1])}
    mask = np.zeros((12, 16, 1), np.int32)
    mask[2:6, 1:5] = 1
    data = {"images": RED, "bounding_boxes": boxes, "segmentation_masks": mask}
    layer = RandomGeometry(flip="horizontal", bounding_box_format="xyxy")
    cells = make_cells(layer, batch_of(data), 12)
    found = {(*map(int, cell.boxes[0]), *np.argwhere(cell.mask)[0]) for cell in cells}
    assert found == {(1, 2, 5, 6, 2, 1), (11, 2, 15, 6, 2, 11)}
    gallery(layer, data, tmp_path / "picture.png")
    pixels = pixels_of(tmp_path / "picture.png")
    assert ((pixels[..., 1] > 150) & (pixels[..., 2] < 60)).sum() > 1000, "yellow frames"


@pytest.mark.parametrize("titles", [["one", "two"], None])
def test_several_layers_get_a_row_each(titles):
    """Titles are given, or the layers' own."""
    layers = [DIMMED, keras.layers.RandomFlip()]
    figure = gallery(dict(zip(titles, layers, strict=True)) if titles else layers, RED)
    found = [axes.get_title("left") for axes in figure.axes[::6]]
    assert found == (titles or ["RandomColor", "RandomFlip"])
    assert len(figure.axes) == 2 * 6


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="Run `pip install matplotlib`"):
        gallery(DIMMED, RED, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
