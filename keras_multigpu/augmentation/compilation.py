"""Compiles a few operations on their own, where that pays.

On a CPU, XLA makes one pass of what TensorFlow does in a dozen passes over all pixels: two to ten
times as fast for what augmentation does.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# As an argument it would go through every method that a layer overrides, to reach one `if`. The
# value is that of the thread, so that layers of a model are not disturbed.
_on_host = contextvars.ContextVar("_on_host", default=False)


@contextlib.contextmanager
def placed_on_host(value: bool) -> Iterator[None]:
    """What is traced or run in here is part of a pipeline on the CPU, or is not."""
    token = _on_host.set(value)
    try:
        yield
    finally:
        _on_host.reset(token)


def is_on_host() -> bool:
    return _on_host.get()


def fused(
    function: Callable[..., tf.Tensor],
    tensors: Sequence[tf.Tensor | None],
    *settings: Any,
    sizes: Iterable[Any] = (),
) -> tf.Tensor:
    """What a function returns, compiled by XLA where that pays.

    Args:
        function: A function of a module, which takes the tensors and then the settings.
        tensors: Tensors whose first axis counts images, images first; or None.
        sizes: Sizes of the result that differ from those of the images.
    """
    if not pays_to_compile((*tensors[0].shape[1:], *sizes)):  # type: ignore[union-attr]
        return function(*tensors, *settings)
    specs = tuple(
        None if one is None else tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tensors
    )
    return compiled(function, specs, settings)(*(one for one in tensors if one is not None))


def pays_to_compile(sizes: Iterable[Any]) -> bool:
    """Whether XLA should compile a change of images, even in a model that it does not compile."""
    # Each new size is compiled anew, so sizes must be known; another number of images, as in a last
    # batch, comes seldom. Outside of a graph every call could bring another size.
    if tf.executing_eagerly() or not all(isinstance(size, int) for size in sizes):
        return False
    # The input pipeline runs on the CPU, whatever the machine has besides. For a graphics card XLA
    # may lack a compiler, and there the passes are short.
    return is_on_host() or not tf.config.get_visible_devices("GPU")


@functools.cache
def compiled(
    function: Callable[..., tf.Tensor],
    specs: tuple[tf.TensorSpec | None, ...],
    settings: tuple[Any, ...],
) -> Callable[..., tf.Tensor]:
    """A function with some settings, compiled; it is called with the tensors that are not None."""

    def call(*present: tf.Tensor) -> tf.Tensor:
        remaining = iter(present)
        tensors = [None if spec is None else next(remaining) for spec in specs]
        return function(*tensors, *settings)

    # Made for all graphs to come, not inside of the one that is being traced. And traced here and
    # now, since TensorFlow warns of functions that are traced for many settings.
    with tf.init_scope():
        return tf.function(
            call,
            input_signature=[spec for spec in specs if spec is not None],
            jit_compile=True,
            autograph=False,
        ).get_concrete_function()
