"""When it pays to compile a few operations on their own."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def pays_to_compile(sizes: Iterable[Any], on_host: bool) -> bool:
    """Whether XLA should compile a change of images, even in a model that it does not compile.

    On a CPU it fuses what TensorFlow does in a dozen passes over all pixels. With a graphics card
    it may lack a compiler of its own, and there the passes are short. Each new size is compiled
    anew, so sizes must be known; another number of images, as in a last batch, comes seldom.

    Args:
        sizes: Heights, widths and channels, integers where they are known.
        on_host: Whether this is a pipeline on the CPU.
    """
    known = all(isinstance(size, int) for size in sizes)
    return known and (on_host or not tf.config.get_visible_devices("GPU"))
