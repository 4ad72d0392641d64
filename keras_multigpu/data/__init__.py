"""Data as `Batches`: the same examples in the same order on any number of replicas.

    train, validation = kmg.data.from_directory("photos", image_size=(224, 224)).split(0.2)
    model.fit(train, validation_data=validation, epochs=10)

from_directory  a folder with a subfolder of images for each class
from_files      image files in a list, a CSV file or a pandas table
from_arrays     NumPy arrays, tensors and tables
from_tfds       a split of a TensorFlow Datasets data set
from_flow       an `ImageDataGenerator` flow, a `PyDataset` or a generator
from_source     any object with a length and numbered items
from_records    TFRecord files
from_dataset    a `tf.data.Dataset`
Batches         the result of all of them: `split`, `take`, `with_`, `preview`, class counts

Inside: a source offers its examples in any order (`pipeline/source.py`). `pipeline/` shuffles an
epoch, cuts it into batches (`order.py`), and reads these in a `tf.data.Dataset` (`loader.py`).
Sources that can only be read from front to end go through `streams/`. `sources/` holds those that
can be read in any order, `decoding/` turns files into pixels, and `caching/` keeps decoded
examples. `reading.py` puts them together.
"""

from keras_multigpu.data.batches import Batches as Batches
from keras_multigpu.data.from_arrays import from_arrays as from_arrays
from keras_multigpu.data.from_dataset import from_dataset as from_dataset
from keras_multigpu.data.from_directory import from_directory as from_directory
from keras_multigpu.data.from_files import from_files as from_files
from keras_multigpu.data.from_flow import from_flow as from_flow
from keras_multigpu.data.from_records import from_records as from_records
from keras_multigpu.data.from_source import from_source as from_source
from keras_multigpu.data.from_tfds import from_tfds as from_tfds

__all__ = [
    "Batches",
    "from_arrays",
    "from_dataset",
    "from_directory",
    "from_files",
    "from_flow",
    "from_records",
    "from_source",
    "from_tfds",
]


def __dir__() -> list[str]:
    """The public names, without submodules."""
    return list(__all__)
