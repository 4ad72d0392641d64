"""A folder with a subfolder of images for each class, as `Batches`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np

from keras_multigpu.checks import require_choice, value_error, warn
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.pipeline.settings import (
    Batching,
    fill_defaults,
    require_known,
    require_valid,
    with_settings,
)
from keras_multigpu.data.pipeline.subsets import Subset
from keras_multigpu.data.sources.image_files import ImageFiles
from keras_multigpu.data.sources.image_folder import image_folder
from keras_multigpu.writing import say


@overload
def from_directory(
    path: str | Path, *args: Any, subset: Literal["both"], **arguments: Any
) -> tuple[Batches, Batches]: ...


@overload
def from_directory(
    path: str | Path,
    labels: str | Sequence[int] | None = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    *,
    image_size: int | tuple[int, int] = (256, 256),
    interpolation: str = "bilinear",
    resize: str = "stretch",
    validation_split: float | None = None,
    subset: Literal["training", "validation"] | None = None,
    verbose: bool = True,
    **batching: Unpack[Batching],
) -> Batches: ...


@with_settings  # type: ignore[misc]  # The first overload stands for all arguments.
def from_directory(
    path: str | Path,
    labels: str | Sequence[int] | None = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    *,
    image_size: int | tuple[int, int] = (256, 256),
    interpolation: str = "bilinear",
    resize: str = "stretch",
    validation_split: float | None = None,
    subset: str | None = None,
    verbose: bool = True,
    **batching: Unpack[Batching],
) -> Any:
    """A folder of images as `Batches`; replaces `keras.utils.image_dataset_from_directory`.

    It finds the same files and labels. The differences: images are `uint8`, a quarter of the bytes
    of Keras's `float32`; `.webp` files count as images; channels always come last; links to folders
    are not followed; an epoch is shuffled fully, not within a buffer; and `batch_size` is called
    `global_batch_size`, or `replica_batch_size` for one replica's part.

    Args:
        path: The folder, or its address, such as `gs://bucket/photos`. With `labels="inferred"`
            each subfolder is a class, with images at any depth; hidden subfolders do not count.
        labels: `"inferred"` from the subfolders; None; or an integer for each file, sorted by
            folder and then by name.
        label_mode: `"int"`: `int32` numbers. `"categorical"`: `float32` vectors with a one at the
            class. `"binary"`: `float32` zeros and ones of shape `(1,)`, for two classes. None: no
            labels.
        class_names: The subfolders to use, in the order of their class numbers. None for all,
            sorted.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`.
        image_size: `(height, width)` of all images, or one integer for both.
        interpolation: How images are resized, as in Keras.
        resize: How an image gets the aspect ratio of `image_size`: `"stretch"` distorts it,
            `"crop"` cuts off what is too wide or too high, `"pad"` adds black. `"random_crop"` cuts
            out a part of random size and place, a new one in each epoch.
        validation_split: A fraction of the files, for use with `subset`, as in Keras. Prefer
            `.split(0.2)`, which splits each class in the same proportion.
        subset: `"training"`, `"validation"`, or `"both"` for a pair. With `shuffle`, the seed
            chooses the same files as in Keras. Without, the last files are for validation; if that
            leaves classes out of training, a warning says so.
        verbose: Whether to print how many files and classes were found.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Returns:
        `Batches`, or two of them with `subset="both"`.

    Example:

    ```python
    train = kmg.data.from_directory("photos", image_size=(224, 224), replica_batch_size=64)
    ```
    """
    remove_arguments_of_keras(batching)
    require_known(batching)
    if batching.get("seed", 0) is None:  # Keras's default.
        batching.pop("seed")
    validation_split = validation_split or None
    require_split(validation_split, subset)
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
    if validation_split is None:
        return Batches(source, **batching)
    settings = fill_defaults(batching)
    require_valid(settings, source)
    # Keras's generator takes seeds of 32 bits.
    training, validation = parts_of(
        source, validation_split, settings["shuffle"], settings["seed"] % 2**32
    )
    if subset != "both":
        return Batches(training if subset == "training" else validation, **batching)
    ordered: Any = {**batching, "shuffle": False}
    return Batches(training, **batching), Batches(validation, **ordered)


def parts_of(
    source: ImageFiles, fraction: float, shuffle: bool, seed: int
) -> tuple[Subset, Subset]:
    """Keras's training and validation parts: chosen by the seed, or without shuffling the last."""
    indices = np.arange(source.num_examples)
    if shuffle:
        # The generator of `keras.utils.image_dataset_from_directory`, for the same files.
        np.random.RandomState(seed).shuffle(indices)
    count = int(fraction * len(indices))
    if not count:
        raise value_error(
            "The validation part would be empty.",
            "Expected at least one image in it.",
            validation_split=fraction,
            images=len(indices),
        )
    training, validation = np.sort(indices[:-count]), np.sort(indices[-count:])
    if source.labels is not None and source.class_names is not None:
        missing = np.setdiff1d(source.labels[validation], source.labels[training])
        if missing.size:
            names = ", ".join(source.class_names[number] for number in missing[:5])
            warn(
                f"validation_split={fraction} leaves no training image of {missing.size} of the "
                f"{len(source.class_names)} classes: {names}{' ...' * (missing.size > 5)}. "
                "Split with `.split(...)` of the batches, which keeps each class's proportion"
                f"{'' if shuffle else ', or pass shuffle=True'}.",
                stacklevel=3,
            )
    return Subset(source, training), Subset(source, validation)


def remove_arguments_of_keras(batching: Any) -> None:
    """Raise a `ValueError` for Keras's arguments that do not apply; remove those without effect."""
    for name, harmless, instead in (
        ("data_format", (None, "channels_last"), "images with the channels last"),
        ("format", (None, "tf"), "`Batches`, whose `.epoch(k)` is a tf.data.Dataset"),
        ("crop_to_aspect_ratio", (None, False), 'resize="crop"'),
        ("pad_to_aspect_ratio", (None, False), 'resize="pad"'),
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


def require_split(fraction: Any, subset: Any) -> None:
    require_choice("subset", subset, (None, "training", "validation", "both"))
    number = isinstance(fraction, int | float) and 0 < fraction < 1
    if (fraction is None) != (subset is None) or not (fraction is None or number):
        raise value_error(
            "`validation_split` and `subset` do not fit together.",
            "Expected both, with a fraction between 0 and 1, or neither.",
            'Pass for example validation_split=0.2, subset="both", or use `.split(0.2)`.',
            validation_split=fraction,
            subset=subset,
        )
