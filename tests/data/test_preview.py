"""`Batches.preview` draws examples before and after augmentation."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data import from_arrays, from_dataset, from_files

RED, CYAN = (255, 0, 0), (0, 255, 255)


def red_images(count):
    images = np.zeros((count, 24, 24, 3), np.uint8)
    images[..., 0] = 255
    return images


def inverted(x):
    return 255 - x


def areas(path, *colors):
    pixels = keras.utils.img_to_array(keras.utils.load_img(path))
    return [int((pixels == color).all(-1).sum()) for color in colors]


@pytest.mark.parametrize("kind", ["arrays", "stream"])
@pytest.mark.slow
def test_originals_stand_above_their_augmentations(tmp_path, kind):
    labels = np.zeros(4, np.int64)
    if kind == "arrays":
        batches = from_arrays(red_images(4), labels, augment=inverted)
    else:
        dataset = tf.data.Dataset.from_tensor_slices((red_images(4), labels)).batch(3)
        batches = from_dataset(dataset, augment=inverted)
    path = tmp_path / "new" / "picture.png"
    figure = batches.preview(path, count=2)
    assert figure._repr_png_() == path.read_bytes()
    # Two originals and six augmentations; borders may be blurred.
    red, cyan = areas(path, RED, CYAN)
    assert red > 2 * 100**2
    assert cyan == pytest.approx(3 * red, rel=0.03)
    assert [file.name for file in path.parent.iterdir()] == ["picture.png"]


def test_without_augmentation_only_originals_are_drawn(tmp_path):
    path = tmp_path / "picture.png"
    from_arrays(red_images(20)).preview(path, count=11)
    red, cyan = areas(path, RED, CYAN)
    assert red > 11 * 100**2
    assert cyan == 0


def cells(batches, count, **settings):
    """The titles of a picture's rows, and the axes of each row."""
    columns = min(count, batches.num_examples)
    axes = batches.preview(count=count, **settings).axes
    rows = [axes[start : start + columns] for start in range(0, len(axes), columns)]
    return [row[0].get_title("left") for row in rows], rows


def texts(row):
    return [axes.get_xlabel().replace("\n", " ") for axes in row]


def image_in(axes):
    return np.atleast_3d(axes.images[0].get_array())


def boxes_in(axes):
    """(left, top, right, bottom) of each box that is drawn."""
    lines = [line.get_xydata() + 0.5 for line in axes.lines]
    return [[*line.min(axis=0), *line.max(axis=0)] for line in lines]


def test_few_examples_are_all_drawn_and_no_label_is_parsed_as_math(tmp_path):
    batches = kmg.data.from_source(
        [*zip(red_images(3), [0, 1, 2], strict=True)],
        class_names=["$a_1", "b$", "c"],
        shuffle=False,
        remainder="drop",
        augment=lambda x: x,
    )
    titles, rows = cells(batches, 8)
    assert titles == ["Examples", "Augmented 1", "Augmented 2", "Augmented 3"]
    assert [texts(row) for row in rows] == [["$a_1", "b$", "c"], *[[""] * 3] * 3]
    assert [image_in(axes).shape for axes in rows[0]] == [(24, 24, 3)] * 3
    batches.preview(tmp_path / "picture.png")  # Raises if it parses them.


@pytest.mark.slow
def test_each_row_draws_its_own_augmentation():
    images = np.tile(np.arange(24, dtype=np.uint8)[:, None, None], (8, 1, 24, 1))
    batches = from_arrays(images, augment=keras.layers.RandomFlip("vertical"))
    _, rows = cells(batches, 8)
    flipped = [
        tuple(bool(image_in(axes)[0, 0, 0] > image_in(axes)[-1, 0, 0]) for axes in row)
        for row in rows
    ]
    assert flipped[0] == (False,) * 8
    assert len(set(flipped)) == 4


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (np.array([0, 51, 255], np.uint8), [0, 0.2, 1]),
        (np.array([0, 1, 1], np.uint8), [0, 1 / 255, 1 / 255]),
        (np.array([0, 51, 255], np.float32), [0, 0.2, 1]),
        (np.array([-2, 51, 257], np.float32), [0, 0.2, 1]),
        (np.array([0, 0.25, 1], np.float32), [0, 0.25, 1]),
        (np.array([-1, 0, 1], np.float32), [0, 0.5, 1]),
        (np.array([-1, 0, 1], np.float16), [0, 0.5, 1]),
        (np.array([0, np.nan, 1], np.float32), [0, 0, 1]),
        (np.array([0, 600, 60_000], np.uint16), [0, 0, 1]),
        # Standardized values: from the lowest to the highest, except a hundredth at each end.
        (np.array([-2.0] * 5 + [0.5] * 3 + [3.0] * 5), [0] * 5 + [0.5] * 3 + [1] * 5),
    ],
)
def test_values_of_any_range_are_scaled_for_display(values, shown):
    image = np.tile(values[None, :, None], (len(values), 1, 1))
    (axes,) = from_arrays(image[None]).preview().axes
    np.testing.assert_allclose(image_in(axes)[0, :, 0], shown, atol=0.02)


@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 1), (16, 20, 4), (300, 9, 3)])
def test_greys_transparency_and_odd_shapes_are_drawn(tmp_path, shape):
    path = tmp_path / "picture.png"
    from_arrays(np.zeros((3, *shape), np.uint8)).preview(path)
    assert keras.utils.load_img(path).width == 3 * 187


def test_the_image_among_several_inputs_is_drawn():
    x = {"age": np.zeros((2, 1)), "photo": red_images(2)}
    batches = from_arrays(x, augment=lambda x: {**x, "photo": 255 - x["photo"]})
    _, (first, second, *_) = cells(batches, 2)
    assert image_in(first[0])[0, 0].tolist() == [1, 0, 0]
    assert image_in(second[0])[0, 0].tolist() == [0, 1, 1]


NAMES = ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    ("y", "names", "texts_below"),
    [
        (None, NAMES, ["", ""]),
        (np.array([2, 0]), NAMES, ["owl", "cat"]),
        (np.array([2, 0]), None, ["2", "0"]),
        (np.array([3, 0]), NAMES, ["3", "cat"]),
        (np.array([[1.0], [0.0]]), NAMES[:2], ["dog", "cat"]),
        (np.array([[0, 0, 1], [0, 1, 0]]), NAMES, ["owl", "dog"]),
        (np.array([[1, 0, 1], [0, 0, 0]]), NAMES, ["cat, owl", "-"]),
        (np.array([[0, 1], [1, 1]]), None, ["1", "0, 1"]),
        (
            np.array([[0.1, 0.8, 0.1], [0.9, 0.1, 0]]),
            NAMES,
            ["80% dog + 10% cat + 10% owl", "90% cat + 10% dog"],
        ),
        (np.array([0.51234, 1234.5]), None, ["0.5123", "1234"]),
        (np.array([[0.5, 1.5], [-2, 3]]), None, ["0.5, 1.5", "-2, 3"]),
        (np.arange(10.0).reshape(2, 5), None, ["0, 1, 2, 3, ...", "5, 6, 7, 8, ..."]),
        (np.zeros((2, 8, 6, 1)), None, ["8x6x1", "8x6x1"]),
        (np.array([b"a cat", b"an owl"], object), None, ["a cat", "an owl"]),
        (
            {"a": np.array([1, 2]), "b": np.array([0.5, 1.5])},
            None,
            ["a: 1, b: 0.5", "a: 2, b: 1.5"],
        ),
    ],
)
def test_labels_are_written_briefly(y, names, texts_below):
    dataset = tf.data.Dataset.from_tensors((red_images(2), y) if y is not None else red_images(2))
    dataset.class_names = names
    _, (row,) = cells(from_dataset(dataset, batched=True, shuffle=False), 2)
    assert texts(row) == texts_below


def test_masks_and_boxes_are_drawn_where_augmentation_has_moved_them():
    """Padding is left out, and the labels of boxes are written."""
    mask = np.zeros((1, 24, 24), np.uint8)
    mask[0, :, :6] = 1
    boxes = {
        "boxes": np.float32([[[0, 0, 6, 12], [12, 12, 18, 18], [-1, -1, -1, -1]]]),
        "labels": np.array([[0, 2, -1]]),
    }
    dataset = tf.data.Dataset.from_tensors((red_images(1), {"mask": mask, "thing": boxes}))
    flip = kmg.augmentation.RandomGeometry(flip="horizontal", bounding_box_format="xyxy")
    _, ([plain], *rows) = cells(from_dataset(dataset, batched=True, augment=[flip]), 1)
    moved = next(axes for (axes,) in rows if boxes_in(axes)[0][0])
    assert boxes_in(plain) == [[0, 0, 6, 12], [12, 12, 18, 18]]
    assert boxes_in(moved) == [[18, 0, 24, 12], [6, 12, 12, 18]]
    masks = [np.ma.filled(axes.images[1].get_array(), 0)[0] for axes in (plain, moved)]
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[*range(6)], [*range(18, 24)]]
    assert texts([plain]) == ["labels: 0, 2"]
    beside = from_arrays({"images": red_images(1), "bounding_boxes": boxes})
    _, ([relative],) = cells(beside, 1, bounding_box_format="xywh")
    assert boxes_in(relative) == [[0, 0, 6, 12], [12, 12, 30, 30]]


def test_preview_needs_images(tmp_path):
    batches = from_arrays({"a": np.zeros((5, 3)), "b": np.zeros((5, 16, 16, 7))})
    message = r"nothing that looks like an image\. Expected .* shapes=\[\(3,\), \(16, 16, 7\)\]"
    with pytest.raises(ValueError, match=message):
        batches.preview(tmp_path / "picture.png")


def test_a_notebook_shows_the_figure_without_a_file(tmp_path, monkeypatch):
    """Notebooks call `_repr_png_`."""
    monkeypatch.chdir(tmp_path)
    assert from_arrays(red_images(2)).preview()._repr_png_().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"bad\.png cannot be read: it is empty"):
        from_files([str(tmp_path / "bad.png")], image_size=8).preview()


def test_only_png_files_are_written(tmp_path):
    with pytest.raises(ValueError, match=r"is not a PNG\. Expected .* Received: path='.*\.jpg'"):
        from_arrays(red_images(2)).preview(tmp_path / "picture.jpg")
    assert list(tmp_path.iterdir()) == []


def test_preview_opens_no_pyplot_figure(tmp_path):
    from matplotlib import pyplot

    mine = pyplot.figure()
    from_arrays(red_images(2)).preview(tmp_path / "picture.png")
    assert pyplot.get_fignums() == [mine.number]
    pyplot.close(mine)
