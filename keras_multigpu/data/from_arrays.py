"""Arrays in memory, or memory-mapped, as `Batches`."""

from typing import Any, Unpack

from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.settings import Batching, with_settings
from keras_multigpu.data.sources.array_source import ArraySource


@with_settings
def from_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, **batching: Unpack[Batching]
) -> Batches:
    """Arrays as `Batches`.

    From memory-mapped arrays (`numpy.load(path, mmap_mode="r")`), each batch reads only its own
    examples.

    Args:
        x: Inputs: an array, a tensor or a pandas table, or a dict, list or tuple of them, with the
            examples along the first axis.
        y: Targets, in the same forms.
        sample_weight: A weight for each example.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    train = kmg.data.from_arrays(images, labels, replica_batch_size=64)
    ```
    """
    return Batches(ArraySource(x, y, sample_weight), **batching)
