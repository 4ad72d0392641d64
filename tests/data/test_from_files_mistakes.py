"""What `from_files` says about mistakes in labels, tables and paths."""

import os

import pandas as pd
import pytest
from helpers.small_image_files import numbers_and_more, write_numbers

from keras_multigpu.data.from_files import from_files

SMALL = {"image_size": (4, 4), "global_batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_numbers(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def paths(folder):
    return sorted(folder.glob("*.png"))


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        ([0, 1], {}, "`labels` and `paths` differ in length"),
        ({"a": 1, "b": 2, "c": 3}, {}, "The labels cannot be put into one array"),
        (["a", None, "b"], {}, "1 of 3 labels are missing, the first that of .*01.png"),
        (["a", "", "b"], {}, "1 of 3 labels are missing"),
        (["a", float("nan"), "b"], {}, "1 of 3 labels are missing"),
        ([0.5, float("nan"), 1], {}, "1 of 3 labels are missing"),
        ([0.5, 1, float("inf")], {}, "1 of 3 labels are infinite, the first that of .*02.png"),
        ([[1, 2], [3], [4]], {}, "The labels cannot be put into one array"),
        ([["a"], [1], ["b"]], {}, "The labels cannot be put into one array"),
        ([0, -1, 1], {}, "not numbers of classes"),
        ([0.5, 1, 1], {"task": "classification"}, "not numbers of classes"),
        ([["a"], ["b"], ["c"]], {"task": "classification"}, "not numbers of classes"),
        ([0, 1, 2], {"class_names": ["a", "b"]}, "There is a class 2, and 2 class names"),
        ([0, 1, 2], {"label_mode": "binary"}, "There are 3 classes"),
        (["a", "b", "c"], {"class_names": ["a", "b"]}, "1 names among the labels are not classes"),
        (["a", "b", "a"], {"class_names": ["a", "b", "a"]}, "a name twice"),
        (["a", "b", "a"], {"task": "regression"}, "The labels are texts"),
        ([0, 1, 2], {"task": "multi_label"}, "do not say of each class"),
        ([0, 1, 2], {"task": "mask"}, "not paths"),
        ([0.5, 1, 2], {"label_mode": "categorical"}, "was given with labels for .regression"),
        ([0, 1, 2], {"task": "classify"}, "`task` has an unknown value"),
        ([0, 1, 2], {"label_mode": "onehot"}, "`label_mode` has an unknown value"),
        ([0, 1, 2], {"sample_weight": [1, 2]}, "`sample_weight` and `paths` differ in length"),
        ([0, 1, 2], {"sample_weight": [1, "x", 2]}, "1 of 3 weights are not numbers.*01.png"),
        ([0, 1, 2], {"sample_weight": [1, float("inf"), None]}, "2 of 3 weights are not.*01.png"),
        ([0, 1, 2], {"sample_weight": [[1], [2], [3, 4]]}, "of 3 weights are not numbers"),
        (["a.png", "b.png", "c.png"], {}, "None of 3 files that were looked for exists"),
    ],
)
def test_mistakes_in_labels_are_named(paths, labels, arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*Received: "):
        from_files(paths[:3], labels, **SMALL, **arguments)


def test_sets_have_no_order(paths):
    """Texts come out of a set in another order in each process: labels would change places."""
    expected = "has no entries in a fixed order.*Pass a list.*Received: "
    for wrong in (set, frozenset):
        with pytest.raises(ValueError, match=f"`paths` {expected}paths='{wrong.__name__}'"):
            from_files(wrong(paths[:3]), [0, 1, 2], **SMALL)
    with pytest.raises(ValueError, match=f"`labels` {expected}labels='set'"):
        from_files(paths[:3], {"a", "b", "c"}, **SMALL)
    for single in (1, "abc"):
        with pytest.raises(ValueError, match=f"`labels` {expected}"):
            from_files(paths[:3], single, **SMALL)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("file,label\n00.png,1\n", {}, "no column, or several columns, of the name 'path'"),
        ("path,path,label\n00.png,a,1\n", {}, "several columns, of the name 'path'"),
        ("path,species\n00.png,1\n", {}, 'no column "label".*`label_columns`'),
        ("path,label\n00.png,1,2\n", {}, "Line 2 has 3 fields"),
        ("path,label\n00.png,1\n01.png,\n", {}, "1 of 2 labels are missing, .*01.png"),
        ("path,label\n00.png," + "9" * 5000 + "\n", {}, "1 of 1 labels are infinite, .*00.png"),
        ("path,label\n", {}, "There are no files"),
        ("", {}, "no column, or several columns, of the name 'path'"),
        (
            "path,a,b\n00.png,1,x\n",
            {"label_columns": ["a", "b"]},
            "The labels cannot be put into one array",
        ),
        ("path,label\nx/00.png,1\n", {}, "None of 1 files.*`root`"),
        ("path,label\n00.png,1\n", {"labels": [1]}, "`labels` was given together with a table"),
    ],
)
def test_mistakes_in_tables_are_named(folder, text, arguments, message):
    path = folder / "mistakes.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s){message}.*Received: "):
        from_files(path, **SMALL, **arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("path,label\n00.png,1\n".encode("utf-16"), "not text in UTF-8: it holds zero bytes"),
        ("path,label\n00.png,1\n".encode("utf-16-le"), "not text in UTF-8: it holds zero bytes"),
        ("path,label\n00.png,Möwe\n".encode("latin-1"), "not text in UTF-8: 'utf-8' codec can't"),
        (b"path,l\xf6we\n00.png,1\n", "not text in UTF-8: 'utf-8' codec can't"),
        (
            b'path,label\n00.png,1\n01.png,"' + b"2\n" * 70_000,
            "The row of line 3 cannot be read: field larger than field limit",
        ),
        (
            b"x" * 131_073 + b",label\n00.png,1\n",
            "The row of line 1 cannot be read: field",
        ),
    ],
    ids=["UTF-16", "UTF-16 without a mark", "Latin-1", "header", "quotation mark", "large header"],
)
def test_tables_that_cannot_be_read_are_named(folder, content, message):
    path = folder / "mistakes.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){message}.*Received: path=.*mistakes"):
        from_files(path, **SMALL)


def test_the_home_folder_can_be_named(folder, monkeypatch):
    """In the path of a table, in paths, and in `root`; not in the name of a draft."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "home.csv").write_text("path,label\n~/00.png,1\n01.png,1\n")
    draft = folder / "~02.png"
    draft.write_bytes((folder / "02.png").read_bytes())
    expected = [str(folder / name) for name in ("00.png", "01.png")]
    assert from_files("~/home.csv", **SMALL).file_paths == expected
    assert from_files(["~/00.png", "01.png"], root="~", **SMALL).file_paths == expected
    assert from_files([draft.name], root=folder, **SMALL).file_paths == [str(draft)]
    masks = from_files(["~/00.png"], ["~/01.png"], **SMALL)
    assert len(list(masks.epoch(0))) == 1


def test_paths_that_are_no_list_are_explained(folder, tmp_path):
    with pytest.raises(ValueError, match="`paths` is a folder.*from_directory"):
        from_files(folder)
    with pytest.raises(ValueError, match="is one file that is not a table"):
        from_files(folder / "00.png")
    with pytest.raises(ValueError, match="does not exist"):
        from_files(tmp_path / "table.csv")
    with pytest.raises(ValueError, match="There are no files"):
        from_files([])
    for nothing in (None, "", 7, float("nan")):
        with pytest.raises(ValueError, match="Row 1 of `paths` holds no path"):
            from_files([folder / "00.png", nothing])
    with pytest.raises(ValueError, match="Row 0 of `file` holds no path"):
        from_files(pd.DataFrame({"file": [None], "label": [1]}), path_column="file")


def test_relative_paths_start_from_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    batches = from_files(["03.png", os.path.join(".", "01.png")], **SMALL, shuffle=False)
    assert numbers_and_more(batches.epoch(0)) == [[3, 1]]
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match="None of 1 files that were looked for exists"):
        from_files(["03.png"])
