"""How much memory the paths of many files take."""

import os
import tracemalloc

import numpy as np
import pytest

from keras_multigpu.data import Batches
from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.sources.file_table import FileTable
from keras_multigpu.data.sources.image_files import ImageFiles
from keras_multigpu.data.sources.targets import of_classes


@pytest.mark.slow
def test_a_million_files_cost_less_than_50_mb():
    """A twentieth of a million, with labels and the order of the epochs, costs less than 2.5 MB."""
    folders = [f"photos/class_{number // 200:04}" for number in range(50_000)]
    names = [f"IMG_{number // 200:05}_{number % 200:05}.jpg" for number in range(50_000)]
    tracemalloc.start()
    table = FileTable(zip(folders, names, strict=True))
    labels = np.repeat(np.arange(250, dtype=np.int32), 200)
    targets = of_classes(labels, "categorical", [str(number) for number in range(250)])
    source = ImageFiles(table, ImageDecoder((224, 224)), targets, name="many")
    batches = Batches(source, global_batch_size=256)
    retained, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batches) == 196
    assert table.path(24_656) == os.path.join("photos/class_0123", "IMG_00123_00056.jpg")
    assert table.path(49_999) == os.path.join("photos/class_0249", "IMG_00249_00199.jpg")
    assert retained <= peak < 2.5e6
