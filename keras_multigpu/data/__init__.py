"""Folders, files, arrays, TFDS, generators and datasets as `Batches`.

    files ──> indices ─────────> examples ─────────────> batches
    disk      pipeline/order     from_*.py, decoding/    pipeline/dataset
              pipeline/plan      pipeline/loader         batches.py

A source offers its examples in any order (`pipeline/source.py`). Every source goes through
`pipeline/`: `order.py` shuffles an epoch, `plan.py` cuts it into batches, `loader.py` reads them,
and `dataset.py` makes a `tf.data.Dataset` of them. Sources that can only be read from front to end
go through `streams/`. `files/` and `tfds/` are kinds of sources, `caching/` keeps decoded
examples, and `preview.py` draws them.
"""

from keras_multigpu.data.batches import Batches as Batches
from keras_multigpu.data.from_arrays import from_arrays as from_arrays
from keras_multigpu.data.from_dataset import from_dataset as from_dataset
from keras_multigpu.data.from_directory import from_directory as from_directory
from keras_multigpu.data.from_files import from_files as from_files
from keras_multigpu.data.from_flow import from_flow as from_flow
from keras_multigpu.data.from_tfds import from_tfds as from_tfds

__all__ = [
    "Batches",
    "from_arrays",
    "from_dataset",
    "from_directory",
    "from_files",
    "from_flow",
    "from_tfds",
]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
