"""The table of paths: its size with many of them, and what it gives back."""

import os
import time
import tracemalloc

import numpy as np
import pytest

from keras_multigpu.data.batches import Batches
from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.files.image_files import ClassTargets, FileTable, ImageFiles


@pytest.fixture(scope="module")
def many():
    """A table of 1000 class folders of 200 names of 19 characters; bytes kept, and at most."""
    folders = [f"photos/class_{folder:04}" for folder in range(1000) for _ in range(200)]
    names = [f"IMG_{number // 200:05}_{number % 200:05}.jpg" for number in range(200_000)]
    tracemalloc.start()
    table = FileTable(zip(folders, names, strict=True))
    retained, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return table, retained, peak


@pytest.mark.slow
def test_a_million_files_cost_less_than_50_mb(many):
    """A fifth of a million less than 10 MB: it grows with the number."""
    table, retained, peak = many
    assert len(table) == 200_000
    assert table.path(0) == os.path.join("photos/class_0000", "IMG_00000_00000.jpg")
    assert table.path(24_656) == os.path.join("photos/class_0123", "IMG_00123_00056.jpg")
    assert table.path(199_999) == os.path.join("photos/class_0999", "IMG_00999_00199.jpg")
    assert retained < 8e6
    assert peak < 10e6


@pytest.mark.slow
def test_batches_of_a_million_files_cost_less_than_50_mb(many):
    """The whole index: paths, labels, and the order of the epochs; a fifth of it here."""
    table, retained, _ = many
    tracemalloc.start()
    labels = np.repeat(np.arange(1000, dtype=np.int32), 200)
    targets = ClassTargets(labels, "categorical", [str(number) for number in range(1000)])
    source = ImageFiles(table, ImageDecoder((224, 224)), targets, name="many")
    batches = Batches(source, global_batch_size=256)
    assert len(batches) == 782
    more, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert retained + more < 10e6


def test_a_path_is_found_in_constant_time(many):
    """The last of all takes no longer than the first: no search, no list."""
    table, *_ = many

    def seconds(index):
        start = time.perf_counter()
        for _ in range(1000):
            table.path(index)
        return time.perf_counter() - start

    assert min(seconds(199_999) for _ in range(5)) < 10 * min(seconds(0) for _ in range(5))


def test_folders_may_come_in_any_order():
    files = [("b", "1.png"), ("a", "1.png"), ("b", "2.png"), ("", "top.png"), ("a", "2.png")]
    table = FileTable(files)
    assert [table.path(index) for index in range(len(table))] == [
        os.path.join("b", "1.png"),
        os.path.join("a", "1.png"),
        os.path.join("b", "2.png"),
        "top.png",
        os.path.join("a", "2.png"),
    ]


def test_names_need_not_be_ascii_or_even_unicode():
    names = ["Grüße.png", "写真.jpg", os.fsdecode(b"\xff\xfe.jpg")]
    table = FileTable(("süd", name) for name in names)
    assert [table.path(index) for index in range(3)] == [os.path.join("süd", n) for n in names]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_number_out_of_range_is_an_error(index):
    with pytest.raises(IndexError):
        FileTable([("", "a.png"), ("", "b.png")]).path(index)


def test_an_empty_table():
    assert len(FileTable()) == 0
