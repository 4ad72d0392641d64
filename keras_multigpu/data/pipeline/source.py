"""The interfaces of data: a `Source` is read in any order, a `Stream` from front to end."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.pipeline.damage import Damaged, DamagedExample, Quarantine

Example = tuple[Any, Any, Any]
"""`(x, y, sample_weight)`; `y` and `sample_weight` may be None."""


class Source(abc.ABC):
    """Examples that several threads can read in any order.

    Attributes:
        name: A short description, such as `"photos, 224x224"`.
        num_examples: The number of examples.
        spec: `(x, y, sample_weight)` of one example, as `tf.TensorSpec`s with static shapes;
            None for missing parts.
        labels: The class of each example if each has exactly one; otherwise None.
        class_names: The names of the classes, or None.
        draws: Whether `read` draws at random, so that examples must not be cached.
        has_files: Whether each example is a file, whose path is its `example_name`.
    """

    name: str = "a source"
    num_examples: int
    spec: Example
    labels: np.ndarray | None = None
    class_names: list[str] | None = None
    draws: bool = False
    has_files: bool = False

    def describe_as(self, source: "Source") -> None:
        """Take over the description of a source that this one reads."""
        self.name, self.spec, self.num_examples = source.name, source.spec, source.num_examples
        self.class_names, self.has_files = source.class_names, source.has_files

    @abc.abstractmethod
    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        """Read some examples.

        Args:
            out: An array to fill for each leaf of `spec`, in the order of `present`. Row i is for
                the example `indices[i]`.
            indices: `int64[n]`, the examples.
            seeds: `int32[n, 2]`, for random draws: a function of seed, epoch and example.

        Returns:
            `(row, cause)` of each example that cannot be read. Its row may hold anything.
        """

    def prepare(self, rows: np.ndarray | None = None) -> None:  # noqa: B027 - most are ready.
        """Prepare to read these examples, or all; cheap when called again."""

    def stages(self) -> dict[int, "Source"]:
        """The source from each of these epochs on, where examples change their size."""
        return {0: self}

    def without_draws(self) -> "Source":
        """The same source without random draws, for evaluation."""
        return self

    def example_name(self, index: int) -> str:
        """The name of an example in messages: its file, if it has one."""
        return f"example {index} of {self.name}"

    def identity(self, exact: bool = False) -> dict[str, Any]:
        """The facts that decide the examples, as plain values, without the folder of files.

        Args:
            exact: Whether to include everything that a cache must compare: the folder, the
                modification times, and all values of large arrays.
        """
        if exact:
            raise NotImplementedError(f"{self.name} has no exact identity.")
        return {"kind": type(self).__name__, "examples": self.num_examples}


class Stream(abc.ABC):
    """Examples without random access.

    Attributes:
        name: A short description.
        num_examples: The number of examples of an epoch; None if unknown.
        infinite: Whether an epoch never ends.
        class_names: The names of the classes, or None.
        draws: Whether `finish` draws at random.
        names_damage: Whether `finish` names damaged examples.
        memory: The stream's cache, once there is one.
    """

    name: str = "a stream"
    num_examples: int | None = None
    infinite: bool = False
    class_names: list[str] | None = None
    draws: bool = False
    names_damage: bool = False

    @abc.abstractmethod
    def examples(self, epoch: tf.Tensor, shuffle: bool, seed: int) -> tf.data.Dataset:
        """The single examples of one epoch, in the form that `finish` takes.

        This is called once for all epochs, in a graph.

        Args:
            epoch: The epoch, counted from zero; a scalar of type `int64`.
            shuffle: Whether to shuffle, as well as the stream can.
        """

    def identity(self) -> dict[str, Any]:
        """As `Source.identity`, as far as it is known before reading."""
        return {"kind": type(self).__name__, "name": self.name, "examples": self.num_examples}

    def report_to(self, quarantine: Quarantine) -> None:  # noqa: B027 - most raise none.
        """Remember Python errors there from now on."""

    def without_draws(self) -> "Stream":
        """The same stream without random draws, for evaluation."""
        return self

    def finish(self, examples: Any, seeds: tf.Tensor) -> tuple[Example, tf.Tensor | None]:
        """Convert a batch of examples to `(x, y, sample_weight)`; by default they are that.

        Decoding belongs here: it then runs in parallel, each worker decodes only its own shard,
        and a resumed run decodes nothing that it skips.

        Args:
            examples: A batch of the elements of `examples`.
            seeds: `int32[n, 2]`, for random draws: a function of seed, epoch and position.

        Returns:
            The batch, and `string[n, 2]`: the name of each example and the cause of its damage,
            empty if it is intact. None if all are intact.
        """
        return examples, None


def read_rows(count: int, read: Callable[[int], None]) -> Damaged:
    """Call `read(row)` for each row; `(row, cause)` for each `DamagedExample` that it raises."""
    damaged = []
    for row in range(count):
        try:
            read(row)
        except DamagedExample as damage:
            damaged.append((row, damage.cause))
    return damaged


def present(structure: Any) -> list[Any]:
    """The leaves of an example or its spec, without missing parts."""
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def unflatten(spec: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `present`: the leaves in the structure of `spec`."""
    remaining = iter(leaves)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else next(remaining), spec)


def three_parts(parts: Sequence[Any], what: str) -> Example:
    """Parts as `(x, y, sample_weight)`, with None for missing ones."""
    if not 1 <= len(parts) <= 3:
        raise value_error(
            f"{what} has {len(parts)} parts.",
            "Expected x, (x, y) or (x, y, sample_weight).",
            "Put several inputs into one tuple or dict.",
            parts=len(parts),
        )
    x, y, weight = (*parts, None, None)[:3]
    return x, y, weight
