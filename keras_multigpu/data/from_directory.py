"""A folder with a subfolder of images for each class, as `Batches`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from keras_multigpu.checks import value_error
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.decoding.decoder import ImageDecoder, ImageSize
from keras_multigpu.data.pipeline.settings import (
    Batching,
    require_known,
    with_settings,
)
from keras_multigpu.data.sources.image_folder import image_folder
from keras_multigpu.writing import say


@with_settings
def from_directory(
    path: str | Path,
    labels: str | Sequence[int] | None = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    *,
    image_size: ImageSize = (256, 256),
    interpolation: str = "bilinear",
    resize: str = "stretch",
    verbose: bool = True,
    **batching: Unpack[Batching],
) -> Batches:
    """A folder of images as `Batches`; replaces `keras.utils.image_dataset_from_directory`.

    It finds the same files and labels. The differences: images are `uint8`, a quarter of the bytes
    of Keras's `float32`; `.webp` files count as images; channels always come last; links to folders
    are not followed; an epoch is shuffled fully, not within a buffer; and `batch_size` is called
    `global_batch_size`, or `replica_batch_size` for one replica's part. `batches.split(0.2)` keeps
    the proportions of the classes, which `validation_split` does not.

    Args:
        path: The folder, its address, such as `gs://bucket/photos`, or what `keras-multigpu pack`
            has made of it. With `labels="inferred"`
            each subfolder is a class, with images at any depth; hidden subfolders do not count.
        labels: `"inferred"` from the subfolders; None; or an integer for each file, sorted by
            folder and then by name.
        label_mode: `"int"`: `int32` numbers. `"categorical"`: `float32` vectors with a one at the
            class. `"binary"`: `float32` zeros and ones of shape `(1,)`, for two classes. None: no
            labels.
        class_names: The subfolders to use, in the order of their class numbers. None for all,
            sorted.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`.
        image_size: `(height, width)` of all images, or one integer for both. For progressive
            resizing, the size from each epoch on, such as `{0: 128, 10: 224}`; evaluation has the
            last.
        interpolation: How images are resized, as in Keras.
        resize: How an image gets the aspect ratio of `image_size`: `"stretch"` distorts it,
            `"crop"` cuts off what is too wide or too high, `"pad"` adds black. `"random_crop"` cuts
            out a part of random size and place, a new one in each epoch.
        verbose: Whether to print how many files and classes were found.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    train = kmg.data.from_directory("photos", image_size=(224, 224), replica_batch_size=64)
    ```
    """
    remove_arguments_of_keras(batching)
    require_known(batching)
    if batching.get("seed", 0) is None:  # Keras's default.
        batching.pop("seed")
    decoder = ImageDecoder(
        image_size,
        color_mode=color_mode,
        interpolation=interpolation,
        resize=resize,
    )
    source = image_folder(os.path.expanduser(path), labels, label_mode, class_names, decoder)
    if verbose:
        names = source.class_names
        belonging = f" belonging to {len(names)} classes" if names else ""
        say(f"Found {source.num_examples} files{belonging}.")
    return Batches(source, **batching)


def remove_arguments_of_keras(batching: Any) -> None:
    """Raise a `ValueError` for Keras's arguments that do not apply; remove those without effect."""
    for name, harmless, instead in (
        ("data_format", (None, "channels_last"), "images with the channels last"),
        ("format", (None, "tf"), "`Batches`, whose `.epoch(k)` is a tf.data.Dataset"),
        ("crop_to_aspect_ratio", (None, False), 'resize="crop"'),
        ("pad_to_aspect_ratio", (None, False), 'resize="pad"'),
        ("validation_split", (None, 0), "`train, validation = batches.split(0.2)`"),
        ("subset", (None,), "`train, validation = batches.split(0.2)`"),
        ("follow_links", (None, False), "folders, or a list of files for `from_files`"),
    ):
        value = batching.pop(name, None)
        if value not in harmless:
            raise value_error(
                f"`{name}` has a value that `from_directory` does not support.",
                f"Expected {instead}.",
                f"Leave `{name}` out.",
                **{name: value},
            )
