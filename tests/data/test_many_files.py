"""How much memory the paths of many files take."""

import tracemalloc

import numpy as np
import pytest
from helpers.small_image_files import write_image

from keras_multigpu.data import from_files


@pytest.mark.slow
def test_a_million_files_cost_less_than_50_mb(tmp_path):
    """A twentieth of a million, with labels and the order of the epochs, costs less than 2.5 MB."""
    names = [f"class_{n // 200:04}/IMG_{n // 200:05}_{n % 200:05}.jpg" for n in range(50_000)]
    labels = np.repeat(np.arange(250, dtype=np.int32), 200)
    write_image(tmp_path / names[0], 1)  # Of a few that are looked for one must be there.
    settings = {"root": tmp_path, "label_mode": "categorical", "global_batch_size": 256}
    tracemalloc.start()
    batches = from_files(names, labels, **settings)
    retained, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert retained < 2.5e6 and len(batches) == 196
    assert batches.file_paths == [f"{tmp_path}/{name}" for name in names]
