"""`Batches.preview` draws examples before and after augmentation."""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data import from_arrays, from_dataset, from_files
from keras_multigpu.data.pipeline.damage import DamagedExample
from keras_multigpu.data.preview import collect_rows, draw_rows
from keras_multigpu.pictures import make_cells, scale_images

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


def test_few_examples_are_all_drawn():
    batches = from_arrays(red_images(3), np.array([0, 1, 2]), shuffle=False, remainder="drop")
    examples = collect_rows(batches.reading(), 8)
    ((title, cells),) = examples
    assert [cell.text for cell in cells] == ["0", "1", "2"]
    assert [cell.image.shape for cell in cells] == [(24, 24, 3)] * 3


def test_titles_and_labels_are_not_parsed_as_math():
    batches = from_arrays(red_images(2), np.array([0, 1]), augment=lambda x: x)
    examples = collect_rows(batches.reading(), 2)
    title, cells = examples[0]
    texts = zip(cells, ["$a_1", "b$"], strict=True)
    examples[0] = title, [cell._replace(text=text) for cell, text in texts]
    figure = draw_rows(examples, "a $heading$")
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["$a_1", "b$"]
    titles = [axes.get_title("left") for axes in figure.axes[::2]]
    assert titles == ["Examples", "Augmented 1", "Augmented 2", "Augmented 3"]
    figure.savefig(io.BytesIO())  # Raises if it parses them.


@pytest.mark.slow
def test_each_row_draws_its_own_augmentation():
    images = np.tile(np.arange(24, dtype=np.uint8)[:, None, None], (32, 1, 24, 1))
    batches = from_arrays(images, augment=keras.layers.RandomFlip("vertical"))
    examples = collect_rows(batches.reading(), 32)
    flipped = {
        title: tuple(bool(cell.image[0, 0, 0] > cell.image[-1, 0, 0]) for cell in cells)
        for title, cells in examples
    }
    assert flipped["Examples"] == (False,) * 32
    assert len(set(flipped.values())) == 4


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
    np.testing.assert_allclose(scale_images(values), shown, atol=0.02)


@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 1), (16, 20, 4), (300, 9, 3)])
def test_greys_transparency_and_odd_shapes_are_drawn(tmp_path, shape):
    path = tmp_path / "picture.png"
    from_arrays(np.zeros((3, *shape), np.uint8)).preview(path)
    assert keras.utils.load_img(path).width == 3 * 187


def test_the_image_among_several_inputs_is_drawn():
    x = {"age": np.zeros((2, 1)), "photo": red_images(2)}

    batches = from_arrays(x, augment=lambda x: {**x, "photo": 255 - x["photo"]})
    examples = collect_rows(batches.reading(), 2)
    assert examples[0][1][0].image[0, 0].tolist() == [1, 0, 0]
    assert examples[1][1][0].image[0, 0].tolist() == [0, 1, 1]


NAMES = ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    ("y", "names", "texts"),
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
def test_labels_are_written_briefly(y, names, texts):
    cells = make_cells(tf.zeros((2, 24, 24, 3)), y, names)
    assert [cell.text for cell in cells] == texts


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
    batches = from_dataset(dataset, batched=True, augment=[flip])
    (_, [plain]), *rows = collect_rows(batches.reading(), 1)
    moved = next(cell for _, (cell,) in rows if cell.boxes[0, 0])
    assert plain.boxes.tolist() == [[0, 0, 6, 12], [12, 12, 18, 18]]
    assert moved.boxes.tolist() == [[18, 0, 24, 12], [6, 12, 12, 18]]
    assert np.flatnonzero(plain.mask[0]).tolist() == list(range(6))
    assert np.flatnonzero(moved.mask[0]).tolist() == list(range(18, 24))
    assert plain.text == "labels: 0, 2"
    beside = {"images": tf.zeros((1, 24, 24, 3)), "bounding_boxes": boxes}
    (relative,) = make_cells(beside, None, None, "xywh")
    assert relative.boxes.tolist() == [[0, 0, 6, 12], [12, 12, 30, 30]]


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
    with pytest.raises(DamagedExample, match=r"bad\.png cannot be read: it is empty"):
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
