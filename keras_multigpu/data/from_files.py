"""Lists and tables of image files as `Batches`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from keras_multigpu.checks import shorten, value_error
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.decoding.decoder import ImageDecoder, ImageSize
from keras_multigpu.data.pipeline.settings import (
    Batching,
    require_examples,
    require_known,
    with_settings,
)
from keras_multigpu.data.sources.file_table import FileTable
from keras_multigpu.data.sources.image_files import ImageFiles
from keras_multigpu.data.sources.labelling import (
    class_targets,
    labels_as_array,
    mask_paths,
    require_task,
    value_targets,
)
from keras_multigpu.data.sources.lists import FileList, read_list
from keras_multigpu.data.sources.masks import MaskTargets
from keras_multigpu.data.sources.targets import Targets


@with_settings
def from_files(
    paths: Any,
    labels: Any = None,
    sample_weight: Any = None,
    *,
    task: str = "classification",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    root: str | Path | None = None,
    image_size: ImageSize = (256, 256),
    color_mode: str = "rgb",
    interpolation: str = "bilinear",
    resize: str = "stretch",
    **batching: Unpack[Batching],
) -> Batches:
    """Image files as `Batches`: a list of paths, a CSV file, or a pandas table.

    `task` says what labels mean:

    - `"classification"`: integers or names, in the form of `label_mode`;
    - `"multi_label"`: any number of classes, as lists or sets of names, texts that join them with
      `|`, or rows or columns of zeros and ones; `float32` ones and zeros;
    - `"regression"`: numbers to predict, or rows or columns of them, `float32`;
    - `"mask"`: paths of images, `uint8` of shape `(height, width, 1)`, each pixel a class.

    Names are numbered in sorted order. To number another table in the same way, pass
    `class_names=train.class_names`. Integers are class numbers; without `class_names`, the largest
    one gives the number of classes.

    A missing file counts as damaged when it is read. If none of a few files exists, an error is
    raised at once.

    Args:
        paths: A sequence of paths; a `.csv` or `.tsv` file with a header; or a pandas table, whose
            column `"path"`, or else the first one, has the paths. Any path may be an address, such
            as `gs://bucket/photos/1.jpg`.
        labels: A label for each path of a sequence, or None. Of a table, the column with the
            labels, or a list of columns for a target of several numbers; None for `"label"`, an
            empty list for no labels.
        sample_weight: A weight for each path of a sequence, or None. Of a table, the column with
            the weights; None for `"weight"`, if there is one.
        task: What labels mean.
        label_mode: For classes, `"int"`, `"categorical"` or `"binary"`, as in `from_directory`;
            None: no labels.
        class_names: The names of the classes in the order of their numbers.
        root: The folder that relative paths start from. None for the CSV file's, otherwise the
            working folder.
        image_size: `(height, width)` of all images and masks, or one integer for both, or the size
            from each epoch on, as in `from_directory`. Masks are never interpolated.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`.
        interpolation: How images are resized, as in Keras.
        resize: How an image gets the aspect ratio of `image_size`, as in `from_directory`; for
            `"random_crop"` a mask must have the size of its image, and is cropped with it.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    train = kmg.data.from_files("train.csv", "species", image_size=(224, 224))
    test = kmg.data.from_files("test.csv", "species", class_names=train.class_names)
    ```
    """
    require_known(batching)
    decoder = ImageDecoder(
        image_size, color_mode=color_mode, interpolation=interpolation, resize=resize
    )
    require_task(task, label_mode)
    files = read_list(paths, labels, sample_weight, root)
    require_examples(files.name, len(files.paths))
    table = files.table()
    targets: Targets | None = None
    if files.labels is not None and label_mode is not None:
        targets = make_targets(files, table, task, label_mode, class_names, image_size, resize)
    height, width, _ = decoder.shape
    name = f"{files.name}, {height}x{width}"
    return Batches(ImageFiles(table, decoder, targets, check_weights(files), name=name), **batching)


def make_targets(
    files: FileList,
    images: FileTable,
    task: str,
    label_mode: str,
    class_names: Sequence[str] | None,
    image_size: ImageSize,
    resize: str,
) -> Targets:
    labels = labels_as_array(files.labels, files.paths, may_be_empty=task == "multi_label")
    if task == "classification":
        return class_targets(labels, label_mode, class_names)
    if task == "mask":
        return MaskTargets(files.table(mask_paths(labels)), images, image_size, resize=resize)
    return value_targets(labels, task, class_names or files.columns)


def check_weights(files: FileList) -> np.ndarray | None:
    if files.weights is None:
        return None
    weights = labels_as_array(files.weights, files.paths, "weights")
    if weights.dtype == object:
        raise value_error(
            "The weights are text.",
            "Expected one number for each file.",
            weights=shorten(list(weights), 100),
        )
    return weights.astype(np.float32)
