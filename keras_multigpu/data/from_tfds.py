"""A split of a TensorFlow Datasets (TFDS) data set as `Batches`."""

from typing import Any, Unpack

from keras_multigpu.checks import value_error
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.settings import Batching, require_known, with_settings
from keras_multigpu.data.pipeline.source import Source, Stream
from keras_multigpu.data.sources.tfds_features import Features
from keras_multigpu.data.sources.tfds_preparation import find_builder, import_tfds, prepare
from keras_multigpu.data.sources.tfds_splits import TfdsRecords, TfdsStream


@with_settings
def from_tfds(
    name_or_builder: Any,
    split: str,
    *,
    features: Any = None,
    image_size: int | tuple[int, int] | None = None,
    color_mode: str | None = None,
    interpolation: str = "bilinear",
    resize: str = "stretch",
    data_dir: Any = None,
    **batching: Unpack[Batching],
) -> Batches:
    """A split of a TFDS data set as `Batches`.

    Data prepared as `array_record` is read in any order, with full shuffle, exact resume, `split`
    and `balance`. Other data (TFRecord, `tfds.ImageFolder`) is a stream: each example still comes
    once an epoch, to one worker, even with fewer files than workers, but the shuffle is by file and
    within a buffer, and a resumed run reads again the examples that it skips.

    One process of a host downloads and prepares missing data while the others wait, as
    `array_record` if that package is installed. `on_error="skip"` leaves out images that cannot be
    decoded; a damaged record file ends the run.

    Args:
        name_or_builder: A name such as `"cifar10"`, or a `tfds.core.DatasetBuilder`.
        split: Such as `"train"`, `"train[:80%]"` or `"train+test"`.
        features: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, as feature names, or dicts or tuples
            of names. None for the data set's own inputs and targets.
        image_size: `(height, width)` of all images, or one integer for both; None if they already
            have one size. Images are decoded as by `from_directory`.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`; None for the images' own mode.
        interpolation: How images are resized, as in `from_directory`.
        resize: How an image gets the aspect ratio of `image_size`, as in `from_directory`.
        data_dir: The folder of the data; None for TFDS's default.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    train = kmg.data.from_tfds("cifar10", "train", replica_batch_size=64)
    ```
    """
    require_known(batching)
    builder = find_builder(name_or_builder, data_dir)
    prepare(builder, is_own=builder is name_or_builder)
    require_split(builder, split)
    decoding = {"interpolation": interpolation, "resize": resize}
    chosen = Features(builder.info, features, image_size, color_mode, **decoding)
    source: Source | Stream
    in_any_order = import_tfds().core.FileFormat.with_random_access()
    if builder.info.available_file_formats() & in_any_order:
        source = TfdsRecords(builder, split, chosen)
    else:
        source = TfdsStream(builder, split, chosen)
    return Batches(source, **batching)


def require_split(builder: Any, split: Any) -> None:
    cause: Exception | None = None
    try:
        if isinstance(split, str) and builder.info.splits[split]:
            return
    except (KeyError, ValueError) as error:
        cause = error
    raise value_error(
        f"{builder.name} has no such split.",
        f"Expected one of {', '.join(builder.info.splits)}, or parts of them.",
        'Check the spelling; parts are written as "train[:80%]" or "train+test".',
        split=split,
    ) from cause
