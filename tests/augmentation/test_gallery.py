"""`augmentation.gallery` draws an image, its augmentations, and what was drawn for each."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.augmentation.gallery import (
    argument_texts,
    batch_of,
    block,
    drawn_texts,
    gallery,
    parameter_texts,
    titled_layers,
)
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.augmentation.sequence import Sequence
from keras_multigpu.image_grid import wrapped

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


def cells_of(layer, images, count=12, seed=0):
    return block("title", layer, batch_of(images), seed, count).cells


def pixels_of(path):
    return keras.utils.img_to_array(keras.utils.load_img(path))


def test_one_layer_is_drawn_twelve_times_beside_the_original(tmp_path):
    """Thirteen red images, of which the original is pure red."""
    path = tmp_path / "new" / "picture.png"
    figure = gallery(Dimmed(), RED, path)
    assert figure._repr_png_() == path.read_bytes()
    pixels = pixels_of(path)
    # An image is 1.62 inches wide with 100 dots an inch, and three quarters as high.
    assert abs((pixels == (255, 0, 0)).all(-1).sum() - 162 * 121.5) < 600
    red = (pixels[..., 0] >= 205) & (pixels[..., 1:] == 0).all(-1)
    assert abs(red.sum() - 13 * 162 * 121.5) < 13 * 600
    assert [file.name for file in path.parent.iterdir()] == ["picture.png"]


def test_the_text_below_an_image_is_what_was_drawn_for_it():
    """It is the number that was subtracted from the pixels."""
    cells = cells_of(Dimmed(), RED)
    assert len(cells) == 12
    for cell in cells:
        level = 255 - cell.image[0, 0, 0] * 255
        (text,) = cell.texts
        name, value = text.removesuffix(", mirrored").rsplit(" ", 1)
        assert name == "some level"
        assert float(value) == pytest.approx(level, rel=0.06)
    assert {cell.texts[0].endswith(", mirrored") for cell in cells} == {True, False}


def test_a_seed_replays_and_another_draws_differently():
    images = [
        np.stack([cell.image for cell in cells_of(Dimmed(), RED, 3, seed)]) for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(images[0], images[1])
    assert not np.any(images[0][..., 0] == images[2][..., 0])


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
    assert cell.texts == ["label 50% 0 + 50% 1"]


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
    """Titles are given, or the layers' own, numbered where they repeat."""
    titled = titled_layers([Dimmed(), Dimmed(), MixedWithNext()])
    assert list(titled) == ["Dimmed", "Dimmed 2", "MixedWithNext"]
    layers = {"one": Dimmed(), "two": Dimmed(most=9.0)}
    figure = gallery(layers, RED, tmp_path / "picture.png")
    assert len(figure.axes) == 2 * 6
    texts = [text.get_text() for text in figure.texts]
    assert {"one", "two", "most=9", "original"} <= set(texts)


def test_texts_do_not_overlap():
    """Neither each other nor an image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    layer = Sequence([Dimmed(), Dimmed(most=2000.0), Dimmed()])
    figure = gallery({"a title": layer}, RED)
    renderer = FigureCanvasAgg(figure).get_renderer()
    frames = [text.get_window_extent(renderer).padded(-1) for text in figure.texts]
    frames += [axes.get_window_extent(renderer).padded(-1) for axes in figure.axes]
    for place, frame in enumerate(frames):
        assert figure.bbox.containsx(frame.x0) and figure.bbox.containsx(frame.x1)
        assert frame.count_overlaps(frames[place + 1 :]) == 0


def test_a_sequence_gets_a_line_for_each_layer():
    layer = Sequence([Dimmed(), MixedWithNext()])
    drawn = {
        "0: Dimmed": {"some_level": np.float32(12.34), "inner": {"mirrored": np.bool_(True)}},
        "1: MixedWithNext": {"share": np.float32(0.5)},
    }
    other = {
        "0: Dimmed": {"some_level": np.float32(1234.5), "inner": {"mirrored": np.bool_(False)}},
        "1: MixedWithNext": {"share": np.float32(0.5)},
    }
    assert drawn_texts(layer, [drawn, other]) == [
        ["Dimmed: some level 12.34, mirrored", "MixedWithNext"],
        ["Dimmed: some level 1234.5", "MixedWithNext"],
    ]


def test_only_parameters_that_differ_are_written():
    same = {"same": np.array(0.5), "seed": np.array(2**30), "matrix": np.eye(3)}
    draws = [
        {"width_zoom": np.array(zoom), **same, "box": np.array([0, number])}
        for zoom, number in ((0.2, 1), (1234.5, 2))
    ]
    assert parameter_texts(Dimmed(), draws) == [
        "width zoom 0.2, box 0 1",
        "width zoom 1234.5, box 0 2",
    ]


def test_arguments_that_are_not_the_defaults_are_written():
    assert argument_texts(Dimmed()) == []
    assert argument_texts(Dimmed(most=12.5, ranges=[0, 0.25], seed=3)) == [
        "most=12.5",
        "ranges=(0, 0.25)",
    ]
    assert argument_texts(Sequence([Dimmed(most=1.0), Dimmed()])) == ["Dimmed(most=1)", "Dimmed()"]


def test_long_texts_are_wrapped_and_cut():
    lines = wrapped(["first parameter 0.12, second parameter 0.34, third 5"])
    assert lines == ["first parameter 0.12, second", "parameter 0.34, third 5"]
    assert wrapped(["line"] * 9) == ["line"] * 7 + ["..."]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="Run `pip install matplotlib`"):
        gallery(Dimmed(), RED, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Dimmed(), RED, "picture.jpg"), "not a PNG"),
        (([], RED, "picture.png"), "`layers` is empty"),
        (({}, RED, "picture.png"), "`layers` is empty"),
        ((Dimmed(), RED[..., 0], "picture.png"), "no image to draw"),
        ((Dimmed(), {"labels": [1]}, "picture.png"), "no image to draw"),
        ((Dimmed(), RED[None][:0], "picture.png"), "no image to draw"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        gallery(*arguments)


def test_the_seed_is_an_integer():
    with pytest.raises(ValueError, match="`seed` is not an integer"):
        gallery(Dimmed(), RED, "picture.png", seed=1.5)
