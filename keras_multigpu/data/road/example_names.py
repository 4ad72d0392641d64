"""Which example stands at a place of an epoch, for messages."""

from collections.abc import Callable

import numpy as np

from keras_multigpu.data.road.plan import Plan
from keras_multigpu.data.road.source import Source
from keras_multigpu.data.road.source import Stream


def example_name(
    source: Source | Stream, plan: Callable[[], Plan], epoch: int, position: int
) -> str | None:
    """The name of an example; None where nobody knows what comes when.

    Args:
        plan: Makes their order, where there is one.
    """
    if not isinstance(source, Source):
        return None
    examples, _ = plan().order.examples(epoch, np.array([position]))
    return source.example_name(int(examples[0]))
