"""What a source of examples has to offer: `Source` in any order, `Stream` one after another."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.data.pipeline.damage import Damaged, DamagedExample, Quarantine

Example = tuple[Any, Any, Any]
"""`(x, y, sample_weight)`; `y` and `sample_weight` may be None."""


class Source(abc.ABC):
    """Examples that can be read in any order, by several threads concurrently.

    Attributes:
        name: What it is, in a few words: `"photos, 224x224"`.
        num_examples: How many examples there are.
        spec: `(x, y, sample_weight)` of one example, as `tf.TensorSpec`s with static shapes;
            None for what is missing.
        labels: The class of each example, where each has exactly one; otherwise None.
        class_names: The names of the classes, or None.
        draws: Whether `read` draws at random, so that what it reads must not be cached.
        has_files: Whether each example is one file, named by `example_name`.
    """

    name: str = "a source"
    num_examples: int
    spec: Example
    labels: np.ndarray | None = None
    class_names: list[str] | None = None
    draws: bool = False
    has_files: bool = False

    @abc.abstractmethod
    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        """Read some examples.

        Args:
            out: One array for each leaf of `spec` (in `keras.tree.flatten`'s order, without the
                missing ones), to be filled: row i is for the example `indices[i]`.
            indices: `int64[n]`, the examples.
            seeds: `int32[n, 2]`, for random draws: a function of seed, epoch and example.

        Returns:
            `(row, cause)` of each example that cannot be read. Its row may hold anything.
        """

    def prepare(self, rows: np.ndarray | None = None) -> None:  # noqa: B027 - most are ready.
        """Get ready to read these examples, or all; cheap when called again."""

    def still(self) -> "Source":
        """The same source without random draws, for evaluation."""
        return self

    def example_name(self, index: int) -> str:
        """How to name one example in a message: its file, if it has one."""
        return f"example {index} of {self.name}"

    def identity(self, exact: bool = False) -> dict[str, Any]:
        """What decides the examples, as plain values; not the place that they are read from.

        Args:
            exact: Whether any difference counts, for a cache: where the files are, when they were
                changed, and all content of large arrays.
        """
        if exact:
            raise NotImplementedError(f"What {self.name} reads is not known exactly.")
        return {"kind": type(self).__name__, "examples": self.num_examples}


class Stream(abc.ABC):
    """Examples that come one after another, without random access.

    Attributes:
        name: What it is, in a few words.
        num_examples: How many examples an epoch has; None if unknown.
        infinite: Whether an epoch never ends.
        class_names: The names of the classes, or None.
        draws: Whether `finish` draws at random, so that what it gives must not be cached.
        names_damage: Whether `finish` finds damaged examples and names them.
        memory: The cache of the stream, once there is one.
    """

    name: str = "a stream"
    num_examples: int | None = None
    infinite: bool = False
    class_names: list[str] | None = None
    draws: bool = False
    names_damage: bool = False
    memory: Any = None

    @abc.abstractmethod
    def examples(self, epoch: tf.Tensor, shuffle: bool, seed: int) -> tf.data.Dataset:
        """One epoch's single examples.

        They are `(x, y, sample_weight)`, where missing parts are None, or whatever `finish` makes
        that of. This is called once for all epochs, in a graph: `epoch` is a tensor.

        Args:
            epoch: The epoch, counted from zero; a scalar of type `int64`.
            shuffle: Whether to shuffle, as well as the stream can.
        """

    def identity(self) -> dict[str, Any]:
        """What decides the examples, as far as it is known before they are read."""
        return {"kind": type(self).__name__, "name": self.name, "examples": self.num_examples}

    def report_to(self, quarantine: Quarantine) -> None:  # noqa: B027 - most have nothing to say.
        """Remember errors of Python there from now on: TensorFlow hands on only their text."""

    def still(self) -> "Stream":
        """The same stream without random draws, for evaluation."""
        return self

    def finish(self, examples: Any, seeds: tf.Tensor) -> tuple[Example, tf.Tensor | None]:
        """Make `(x, y, sample_weight)` of some examples; here they already are.

        Decoding belongs here: it then runs in parallel, a worker does it for its own shard only,
        and nothing is decoded of what a resumed run skips.

        Args:
            examples: A batch of what `examples` gives.
            seeds: `int32[n, 2]`, for random draws: a function of seed, epoch and position.

        Returns:
            The batch, and `string[n, 2]`: the name of each example and why it cannot be read, an
            empty text if it can; None if all can.
        """
        return examples, None


def read_rows(count: int, read: Callable[[int], None]) -> Damaged:
    """Read examples row by row; the rows for which `read` has raised `DamagedExample`, and why."""
    damaged = []
    for row in range(count):
        try:
            read(row)
        except DamagedExample as damage:
            damaged.append((row, damage.cause))
    return damaged


def present(structure: Any) -> list[Any]:
    """The leaves of an example or its spec, without those that are missing."""
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def filled(spec: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `present`: the leaves in the structure of `spec`."""
    remaining = iter(leaves)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else next(remaining), spec)
