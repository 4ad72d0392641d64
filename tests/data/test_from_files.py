"""Lists and tables of real files of 4 x 4 pixels."""

import os

import numpy as np
import pandas as pd
import pytest
from helpers.small_image_files import numbers_and_more, write_csv, write_images, write_numbers

import keras_multigpu as kmg
from keras_multigpu.data import from_files

SMALL = {"image_size": (4, 4), "global_batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_numbers(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def paths(folder):
    return sorted(folder.glob("*.png"))


def unshuffled(*arguments, **keywords):
    batches = from_files(*arguments, **{**SMALL, "shuffle": False, **keywords})
    return batches, numbers_and_more(batches.epoch(0))


# What labels mean.


def test_without_labels_batches_hold_images_alone(paths):
    batches, parts = unshuffled(paths)
    assert parts == [list(range(12))]
    assert batches.class_names is None
    assert batches.class_counts is None
    assert unshuffled(paths, ["a", "b"] * 6, label_mode=None)[1] == parts


@pytest.mark.parametrize("kind", [list, tuple, np.array, pd.Series])
def test_integers_are_classes(paths, kind):
    batches, (_, labels) = unshuffled(paths, kind([0, 1, 2] * 4))
    assert labels.tolist() == [0, 1, 2] * 4
    assert labels.dtype == np.int32
    assert batches.class_counts == {"0": 4, "1": 4, "2": 4}


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, lambda x: np.array(x, object)])
def test_class_names_are_numbered_in_sorted_order(paths, kind):
    batches, (_, labels) = unshuffled(paths, kind(["dog", "cat", "emu"] * 4))
    assert labels.tolist() == [1, 0, 2] * 4
    assert batches.class_counts == {"cat": 4, "dog": 4, "emu": 4}


MULTI, NUMBERS, MASKS = ({"task": task} for task in ("multi_label", "regression", "mask"))
SEVERAL = [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
ROWS = [[0, 1], [1, 1], [0, 0]]
OF_SEVERAL = ["cat", "dog", "emu"]


@pytest.mark.parametrize(
    ("labels", "arguments", "expected", "names"),
    [
        (["b", "a", "c"], {"label_mode": "categorical"}, np.eye(3)[[1, 0, 2]], ["a", "b", "c"]),
        ([True, False, True], {"label_mode": "binary"}, [[1], [0], [1]], None),
        ([["cat", "dog"], [], ["emu"]], MULTI, SEVERAL, OF_SEVERAL),
        ([{"dog", "cat"}, set(), {"emu"}], MULTI, SEVERAL, OF_SEVERAL),
        (["cat|dog", "dog", "emu | cat"], MULTI, [[1, 1, 0], [0, 1, 0], [1, 0, 1]], OF_SEVERAL),
        (
            ["cat|dog", "", "dog"],
            {"task": "multi_label", "class_names": ["dog", "emu", "cat"]},
            [[1, 0, 1], [0, 0, 0], [1, 0, 0]],
            ["dog", "emu", "cat"],
        ),
        (
            np.array([[0, 1], [1, 1], [0, 0]]),
            {"class_names": "ab", **MULTI},
            [[0, 1], [1, 1], [0, 0]],
            ["a", "b"],
        ),
        ([0.5, 1.5, -2.0], NUMBERS, [0.5, 1.5, -2.0], None),
        ([1, 2, 3], NUMBERS, [1, 2, 3], None),
        ([[0.5, 1], [2, 3], [4, 5]], NUMBERS, [[0.5, 1], [2, 3], [4, 5]], None),
        (np.ones((3, 2, 5)) * 3, NUMBERS, np.ones((3, 2, 5)) * 3, None),
    ],
)
def test_other_labels_are_floats(paths, labels, arguments, expected, names):
    """Classes as vectors, several classes, or numbers to predict."""
    batches, (_, found) = unshuffled(paths[:3], labels, **arguments)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    assert batches.class_names == names


def test_class_names_define_the_numbers(paths):
    names = ["emu", "dog", "cat", "yak"]
    batches, (_, labels) = unshuffled(paths, ["dog", "cat", "emu"] * 4, class_names=names)
    assert labels.tolist() == [1, 2, 0] * 4
    assert batches.class_counts == {"emu": 4, "dog": 4, "cat": 4, "yak": 0}


def test_the_weight_of_a_mask_counts_for_all_its_pixels(paths):
    """Keras would take a plain vector for weights of columns, or raise an error."""
    _, (_, masks, weights) = unshuffled(paths[:3], paths[:3], [1, 0.5, 2], **MASKS)
    assert masks.shape == (3, 4, 4, 1)
    assert weights.tolist() == [[[1]], [[0.5]], [[2]]]


# Tables.


def test_a_csv_file_is_read(folder, tmp_path):
    """Columns in any order; paths relative to the file; a byte order mark; an empty line."""
    table = folder / "table.csv"
    text = '\ufeffweight,"label",path,note\n1,dog,03.png,"a, b"\n\n0.5,cat,01.png,\n'
    table.write_text(text, encoding="utf-8")
    for path in (table, str(table)):
        batches, (images, labels, weights) = unshuffled(path)
        assert images == [3, 1]
        assert labels.tolist() == [1, 0]
        assert weights.tolist() == [1, 0.5]
        assert batches.class_names == ["cat", "dog"]


def test_a_pandas_table_is_read(folder, tmp_path):
    frame = pd.DataFrame(
        {"path": ["03.png", "01.png"], "label": ["dog", "cat"], "weight": [1, 0.5]}, index=[7, 9]
    )
    batches, (images, labels, weights) = unshuffled(frame, root=folder)
    assert images == [3, 1]
    assert labels.tolist() == [1, 0]
    assert weights.tolist() == [1, 0.5]
    assert batches.class_names == ["cat", "dog"]


@pytest.mark.parametrize("form", ["csv", "tsv", "pandas"])
def test_columns_may_have_other_names_and_paths_another_root(folder, tmp_path, form):
    frame = pd.DataFrame({"file": ["03.png", "01.png"], "species": [4, 1], "trust": [3, 2]})
    table = frame
    if form != "pandas":
        table = tmp_path / f"table.{form}"
        frame.to_csv(table, index=False, sep="\t" if form == "tsv" else ",")
    _, (images, labels, weights) = unshuffled(
        table,
        labels="species",
        sample_weight="trust",
        root=folder,
    )
    assert images == [3, 1]
    assert labels.tolist() == [4, 1]
    assert weights.tolist() == [3, 2]


@pytest.mark.parametrize("form", ["csv", "pandas"])
def test_several_label_columns_become_a_vector(folder, tmp_path, form):
    rows = [["00.png", 1, 0, 0.25], ["01.png", 1, 1, 4]]
    table = write_csv(tmp_path / "table.csv", ["path", "hat", "tie", "age"], rows)
    table = pd.read_csv(table) if form == "pandas" else table
    batches, (_, labels) = unshuffled(table, ["hat", "tie"], root=folder, **MULTI)
    assert labels.tolist() == [[1, 0], [1, 1]]
    assert batches.class_names == ["hat", "tie"]
    batches, (_, labels) = unshuffled(table, ["tie", "age"], root=folder, **NUMBERS)
    assert labels.tolist() == [[0, 0.25], [1, 4]]
    assert batches.class_names is None
    _, (_, labels) = unshuffled(table, "age", root=folder, **NUMBERS)
    assert labels.tolist() == [0.25, 4]
    assert unshuffled(table, [], root=folder)[1] == [[0, 1]]


def test_names_that_look_like_numbers_stay_names(folder, tmp_path):
    rows = [["00.png", "1_0"], ["01.png", "2_5"]]
    table = write_csv(tmp_path / "table.csv", ["path", "label"], rows)
    assert unshuffled(table, root=folder)[0].class_names == ["1_0", "2_5"]


def test_a_path_of_digits_keeps_its_zeros(folder, tmp_path):
    (tmp_path / "007").write_bytes((folder / "07.png").read_bytes())
    table = write_csv(tmp_path / "table.csv", ["path", "label"], [["007", 0]])
    assert unshuffled(table)[1][0] == [7]


# What `Batches` offers.


def test_one_hot_rows_are_counted(paths):
    counted = from_files(paths[:3], [[1, 0], [0, 1], [0, 1]], **SMALL, **MULTI)
    assert counted.class_counts == {"0": 1, "1": 2}
    assert from_files(paths[:2], [["b"], ["a"]], **SMALL, **MULTI).class_counts == {"a": 1, "b": 1}
    assert from_files(paths[:2], [[1, 1], [0, 1]], **SMALL, **MULTI).class_counts is None


def test_generators_are_read_like_lists(paths):
    made = from_files(
        iter(paths[:3]),
        (number % 2 for number in range(3)),
        (number / 2 for number in range(3)),
        shuffle=False,
        **SMALL,
    )
    ((_, labels, weights),) = made.epoch(0)
    assert (labels.numpy().tolist(), weights.numpy().tolist()) == ([0, 1, 0], [0, 0.5, 1])


def test_paths_of_any_folders_and_bytes_are_kept_in_their_order(folder, tmp_path):
    names = ["b/1.png", "süd/Grüße.png", "b/写真.png", "top.png", os.fsdecode(b"s\xff\xfe.png")]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((folder / f"{number:02}.png").read_bytes())
    batches, (found,) = unshuffled(names, root=tmp_path)
    assert found == [0, 1, 2, 3, 4]
    assert batches.file_paths == [f"{tmp_path}/{name}" for name in names]


def test_a_tilde_means_the_home_folder(folder, monkeypatch):
    """In every path that sources take, but not in a name such as `~draft`."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "home.csv").write_text("path,label\n~/00.png,1\n01.png,1\n")
    draft = folder / "~02.png"
    draft.write_bytes((folder / "02.png").read_bytes())
    expected = [str(folder / name) for name in ("00.png", "01.png")]
    assert from_files("~/home.csv", **SMALL).file_paths == expected
    assert from_files(["~/00.png", "01.png"], root="~", **SMALL).file_paths == expected
    assert from_files([draft.name], root=folder, **SMALL).file_paths == [str(draft)]
    masks = from_files(["~/00.png"], ["~/01.png"], **SMALL, **MASKS)
    assert len(list(masks.with_(cache="~/cache").epoch(0))) == 1
    assert (folder / "cache").is_dir()
    write_images(folder / "photos", ["cat/1.webp"])
    photos = kmg.data.from_directory("~/photos", image_size=4, verbose=False)
    assert photos.file_paths == [str(folder / "photos/cat/1.webp")]


def test_relative_paths_start_at_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    batches = from_files(["03.png", os.path.join(".", "01.png")], **SMALL, shuffle=False)
    assert numbers_and_more(batches.epoch(0)) == [[3, 1]]
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match="None of 1 files that were looked for exists"):
        from_files(["03.png"])
