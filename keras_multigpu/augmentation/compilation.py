"""Compiles single operations where that pays.

On a CPU, XLA does in one pass what takes TensorFlow a dozen passes over all pixels: operations of
augmentation become two to ten times as fast.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# As an argument it would pass through every method that a layer overrides to reach one `if`. Each
# thread has its own value, so a pipeline does not disturb a model.
_on_host = contextvars.ContextVar("_on_host", default=False)


@contextlib.contextmanager
def place_on_host(value: bool) -> Iterator[None]:
    """Say whether what is traced or run in this context is part of a pipeline on the CPU."""
    token = _on_host.set(value)
    try:
        yield
    finally:
        _on_host.reset(token)


def is_on_host() -> bool:
    return _on_host.get()


def fuse(
    function: Callable[..., tf.Tensor],
    tensors: Sequence[tf.Tensor | None],
    *settings: Any,
    sizes: Iterable[Any] = (),
) -> tf.Tensor:
    """Call a function, compiled by XLA where that pays.

    Args:
        function: A module's function, which takes the tensors and then the settings.
        tensors: The images, and other tensors whose first axis counts images; or None.
        settings: Values that can be hashed.
        sizes: Sizes of the result that differ from those of the images.
    """
    if not pays_to_compile((*tensors[0].shape[1:], *sizes)):  # type: ignore[union-attr]
        return function(*tensors, *settings)
    specs = tuple(
        None if one is None else tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tensors
    )
    return compile_function(function, specs, settings)(*(one for one in tensors if one is not None))


def pays_to_compile(sizes: Iterable[Any]) -> bool:
    """Whether XLA should compile a change of images, even in a model that it does not compile."""
    # Every size is compiled separately, so sizes must be known; outside a graph each call could
    # bring another. A different number of images, as in the last batch, is rare.
    if tf.executing_eagerly() or not all(isinstance(size, int) for size in sizes):
        return False
    # The input pipeline runs on the CPU. For a GPU, XLA may lack a compiler, and passes are short.
    return is_on_host() or not tf.config.get_visible_devices("GPU")


# Settings that differ in every call, as in a search, must not fill the memory.
@functools.lru_cache(maxsize=256)
def compile_function(
    function: Callable[..., tf.Tensor],
    specs: tuple[tf.TensorSpec | None, ...],
    settings: tuple[Any, ...],
) -> Callable[..., tf.Tensor]:
    """Compile a function with some settings; call the result with the tensors that are not None."""

    def call(*present: tf.Tensor) -> tf.Tensor:
        remaining = iter(present)
        tensors = [None if spec is None else next(remaining) for spec in specs]
        return function(*tensors, *settings)

    # Outside the graph that is being traced, because later graphs use it too. Traced at once,
    # because TensorFlow warns of functions that are traced for many settings.
    with tf.init_scope():
        return tf.function(
            call,
            input_signature=[spec for spec in specs if spec is not None],
            jit_compile=True,
            autograph=False,
        ).get_concrete_function()
