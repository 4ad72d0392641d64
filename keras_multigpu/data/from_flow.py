"""`ImageDataGenerator` flows, `PyDataset`s and generators as `Batches`."""

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import keras

from keras_multigpu.checks import require_positive_integer, type_error, value_error
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.settings import Batching, with_settings
from keras_multigpu.data.pipeline.source import Source, Stream
from keras_multigpu.data.sources.flows import FlowSource
from keras_multigpu.data.streams.python_batches import FlowStream, GeneratorStream, PyDatasetStream
from keras_multigpu.keras_internals.flow_internals import legacy_images

logger = logging.getLogger("keras_multigpu")

_OWN_METHODS = ("get_random_transform", "apply_transform", "random_transform", "standardize")


@with_settings
def from_flow(flow: Any, *, steps: int | None = None, **batching: Unpack[Batching]) -> Batches:
    """An `ImageDataGenerator` flow, a `PyDataset` or a generator as `Batches`.

    A flow keeps its files, labels and parameters, and unless you set others, its `shuffle`, `seed`
    and batch size, as the global one. Threads load and change its images in parallel. Random
    parameters come from the same ranges, and the same parameters give the same pixels; for
    `fill_mode="nearest"` and `"reflect"` OpenCV warps images ten times faster than SciPy
    (`pip install opencv-python-headless`). Draws depend on seed,
    epoch and image alone, and the order is that of all `Batches`. A flow that cannot be translated,
    such as one of a subclass with its own methods, is called as it is; a warning of the logger
    "keras_multigpu" says why.

    The batches of a `PyDataset` or a generator are split or joined to the batch size; each is read
    once an epoch. As many threads as its `workers` read a `PyDataset`, and `shuffle` shuffles the
    order of its batches. One thread reads a generator, in order.

    Args:
        flow: The result of `ImageDataGenerator.flow`, `.flow_from_directory` or
            `.flow_from_dataframe`; a `keras.utils.PyDataset`; or a function that returns a new
            iterator over batches `(x, y)` for every epoch. If the function has an argument
            `epoch`, it gets the epoch's number.
        steps: How many batches an epoch has, for generators and `PyDataset`s that do not end.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    generator = ImageDataGenerator(rotation_range=20, horizontal_flip=True, rescale=1 / 255)
    flow = generator.flow_from_directory("photos", target_size=(224, 224))
    model.fit(kmg.data.from_flow(flow), epochs=10)
    ```
    """
    if steps is not None:
        require_positive_integer("steps", steps)
    source, defaults = source_of(flow, steps)
    if batching.get("replica_batch_size") is not None:
        defaults.pop("global_batch_size")
    settings: dict[str, Any] = {**defaults, **batching}
    return Batches(source, **settings)


def source_of(flow: Any, steps: int | None) -> tuple[Source | Stream, Batching]:
    if isinstance(flow, legacy_images().Iterator):
        if steps is not None:
            raise value_error(
                "`steps` was given with a flow of images.",
                "Expected it for generators only: a flow knows its number of images.",
                "Leave it out; `take(n)` of the result gives fewer examples.",
                steps=steps,
                flow=type(flow).__name__,
            )
        require_fitted(getattr(flow, "image_data_generator", None))
        defaults = Batching(global_batch_size=int(flow.batch_size), shuffle=bool(flow.shuffle))
        if flow.seed is not None:
            defaults["seed"] = int(flow.seed)
        reason = why_untranslatable(flow)
        if reason is None:
            return FlowSource(flow), defaults
        logger.warning("This flow runs as ImageDataGenerator itself would: %s.", reason)
        return FlowStream(flow), defaults
    if isinstance(flow, keras.utils.PyDataset):
        dataset = PyDatasetStream(flow, steps)
        return dataset, Batching(global_batch_size=dataset.batch_size)
    require_factory(flow)
    generator = GeneratorStream(with_epoch(flow), steps)
    return generator, Batching(global_batch_size=generator.batch_size, shuffle=False)


def why_untranslatable(flow: Any) -> str | None:
    """Why a flow cannot be translated, as a clause; None if it can."""
    image = legacy_images()
    generator = getattr(flow, "image_data_generator", None)
    if type(flow).__module__ != image.Iterator.__module__ or type(flow) is image.Iterator:
        return f"its class {type(flow).__name__} is not one of Keras's own"
    if not isinstance(generator, image.ImageDataGenerator):
        return "it has no ImageDataGenerator"
    changed = [name for name in _OWN_METHODS if is_changed(generator, name)]
    if changed:
        return f"its generator has its own `{changed[0]}`"
    if flow.save_to_dir:
        return "`save_to_dir` asks for pictures of each batch"
    if generator.data_format != "channels_last" or flow.data_format != "channels_last":
        return "`data_format` is not channels_last"
    return None


def is_changed(generator: Any, name: str) -> bool:
    original = getattr(legacy_images().ImageDataGenerator, name)
    return name in vars(generator) or getattr(type(generator), name) is not original


def require_fitted(generator: Any) -> None:
    for name, statistic in (
        ("featurewise_center", "mean"),
        ("featurewise_std_normalization", "std"),
        ("zca_whitening", "zca_whitening_matrix"),
    ):
        if getattr(generator, name, False) and getattr(generator, statistic, None) is None:
            raise value_error(
                f"`{name}` needs statistics of the data, which the generator does not have.",
                "Expected a fitted generator; Keras would only warn, and skip this step.",
                "Call `generator.fit(x)` with some of the images first.",
                **{name: True},
            )


def require_factory(flow: Any) -> None:
    if isinstance(flow, Iterator):
        raise value_error(
            "This generator can be read only once.",
            "Expected something that can be read again in each epoch.",
            "Pass the function that makes it: `from_flow(make)`, not `from_flow(make())`.",
            flow=flow,
        )
    if not callable(flow):
        raise type_error(
            f"`flow` is a {type(flow).__name__}.",
            "Expected a flow of an ImageDataGenerator, a `keras.utils.PyDataset`, or a "
            "function that returns an iterator.",
            "Arrays belong to `from_arrays`, a `tf.data.Dataset` to `from_dataset`.",
            flow=type(flow).__name__,
        )


def with_epoch(factory: Callable[..., Any]) -> Callable[[int], Any]:
    """The factory with an argument for the epoch, which is dropped if it takes none."""
    try:
        # Some C functions have no signature.
        wants_epoch = "epoch" in inspect.signature(factory).parameters
    except ValueError:
        wants_epoch = False
    return (lambda epoch: factory(epoch=epoch)) if wants_epoch else (lambda epoch: factory())
