"""`augmentation.gallery` draws an image, its augmentations, and what was drawn for each."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.augmentation.gallery import batch_of, gallery, make_cells
from keras_multigpu.augmentation.random_numbers import Draws

RED = np.full((12, 16, 3), (255, 0, 0), np.uint8)


class Dimmed(kmg.augmentation.AugmentationLayer):
    """Subtracts a number from each image; its other draws are too long to show, or constant."""

    def __init__(self, most=50.0, ranges=(0, 1), **kwargs):
        super().__init__(**kwargs)
        self.most = most
        self.ranges = ranges

    def draw(self, seeds, shape):
        draws = Draws(seeds)
        count = tf.shape(seeds)[0]
        return {
            "some_level": draws.uniform(1.0, self.most),
            "inner": {"mirrored": draws.happens(0.5), "unused": tf.zeros(count)},
            "matrix": tf.random.stateless_uniform((count, 3, 3), (1, 2)),
        }

    def change_images(self, images, drawn):
        return images - drawn["some_level"][:, None, None, None]

    def change_boxes(self, boxes, drawn, shape):
        return boxes + [2.0, 0.0, 2.0, 0.0]

    def get_config(self):
        return {**super().get_config(), "most": self.most, "ranges": self.ranges}


class MixedWithNext(kmg.augmentation.AugmentationLayer):
    """Averages each image and its label with the next one."""

    def draw(self, seeds, shape):
        return {"share": Draws(seeds).uniform(0.5, 0.5)}

    def change(self, example, drawn):
        return {
            name: (value + tf.roll(tf.cast(value, tf.float32), -1, 0)) / 2
            for name, value in example.items()
        }


def cells_of(layer, images, count=12):
    return make_cells(layer, batch_of(images), count)[1:]


def pixels_of(path):
    return keras.utils.img_to_array(keras.utils.load_img(path))


def test_one_layer_is_drawn_eleven_times_beside_the_original(tmp_path):
    """Twelve red images, of which the original is pure red."""
    path = tmp_path / "new" / "picture.png"
    figure = gallery(Dimmed(), RED, path)
    assert figure._repr_png_() == path.read_bytes()
    pixels = pixels_of(path)
    original = (pixels == (255, 0, 0)).all(-1).sum()
    red = (pixels[..., 0] >= 205) & (pixels[..., 1:] == 0).all(-1)
    assert red.sum() == pytest.approx(12 * original, rel=0.05)
    assert [file.name for file in path.parent.iterdir()] == ["picture.png"]


@pytest.mark.parametrize(
    ("images", "value"),
    [
        (RED, (255.0 - 1) / 255),
        (RED.astype(np.float32), (255.0 - 1) / 255),
        (RED.astype(np.float32) / 255, 0.0),
        (RED.astype(np.float32) / 127.5 - 1, 0.5),
        (RED[..., :1], (255.0 - 1) / 255),
    ],
    ids=["uint8", "to 255", "to 1", "from -1", "gray"],
)
def test_images_of_any_range_are_shown(images, value):
    """One is subtracted from white, which is 255 or 1; between -1 and 1 the middle is left."""
    (cell,) = cells_of(Dimmed(most=1.0), images, 1)
    assert cell.image[0, 0, 0] == pytest.approx(value)


def test_images_of_a_batch_mix_with_the_first():
    """The mixed labels are written below, with their shares."""
    data = {"images": np.stack([RED, RED // 2, RED * 0]), "labels": np.eye(3, dtype="float32")}
    (cell,) = cells_of(MixedWithNext(), data, count=1)
    assert cell.image[0, 0, 0] == pytest.approx((255 + 127) / 2 / 255)
    assert cell.text == "label: 50% 0 + 50% 1"


def test_boxes_and_masks_are_drawn(tmp_path):
    """Boxes inside the image at their new places, and masks with a colour for each class."""
    data = {
        "images": RED,
        "bounding_boxes": {
            "boxes": np.array([[1.0, 2, 5, 6], [0, 0, 0, 0]]),
            "labels": np.array([3, -1]),
        },
        "segmentation_masks": np.eye(12, 16, dtype=np.int32)[..., None],
    }
    layer = Dimmed(bounding_box_format="xyxy")
    for cell in cells_of(layer, data):
        np.testing.assert_array_equal(cell.boxes, [[3, 2, 7, 6]])
        np.testing.assert_array_equal(cell.mask, np.eye(12, 16))
    gallery(layer, data, tmp_path / "picture.png")
    pixels = pixels_of(tmp_path / "picture.png")
    assert ((pixels[..., 1] > 150) & (pixels[..., 2] < 60)).sum() > 1000  # Yellow frames.
    assert ((pixels[..., 2] > 70) & (pixels[..., 0] > 120) & (pixels[..., 1] < 70)).sum() > 1000


def test_several_layers_get_a_row_each(tmp_path):
    """Titles are given, or the layers' own."""
    layers = {"one": Dimmed(), "two": Dimmed(most=9.0)}
    figure = gallery(layers, RED, tmp_path / "picture.png")
    assert len(figure.axes) == 2 * 6
    assert [axes.get_title("left") for axes in figure.axes[::6]] == ["one", "two"]
    figure = gallery([Dimmed(), MixedWithNext()], RED)
    assert [axes.get_title("left") for axes in figure.axes[::6]] == ["Dimmed", "MixedWithNext"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="Run `pip install matplotlib`"):
        gallery(Dimmed(), RED, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
