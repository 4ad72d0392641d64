"""Names data that cannot belong to the model, before the first step.

Keras says that a data type is invalid, that None is not supported, or which layer in the middle of
the model got numbers that it cannot multiply. What Keras trains is let through.
"""

import numbers
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import shortened, value_error
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.training.shares import Batch, symbolic

PARTS = ("x", "y", "sample_weight")


def require_tensors(x: Any, y: Any = None, sample_weight: Any = None) -> None:
    """Raise a `ValueError` where arrays hold what cannot become a tensor for training."""
    for path, leaf in keras.tree.flatten_with_path((x, y, sample_weight)):
        if isinstance(leaf, str | bytes | numbers.Number):
            raise value_error(
                f"`{name_of(path[:1])}` holds single Python values.",
                "Expected an array; a list means several arrays.",
                "Wrap it in `np.array(...)`.",
                first=leaf,
            )
        for column in columns_of(leaf):
            refuse_objects(column.dtype, np.asarray(column[:1]), name_of(path))


def name_of(path: tuple[Any, ...]) -> str:
    """What a user calls a leaf of these: `x`, or `x['image']`."""
    part, *inside = path
    return PARTS[part] + "".join(f"[{step!r}]" for step in inside)


def columns_of(leaf: Any) -> list[Any]:
    """An array, or the columns of a table of pandas; nothing of what else `fit` takes."""
    if hasattr(leaf, "iloc"):
        return [leaf.iloc[:, i] for i in range(leaf.shape[1])] if leaf.ndim == 2 else [leaf]
    return [leaf] if isinstance(leaf, np.ndarray) else []


def refuse_objects(dtype: Any, first: np.ndarray, name: str) -> None:
    """Raise a `ValueError` where an array holds neither numbers nor text that TensorFlow takes."""
    values = first.reshape(-1).tolist()
    text = bool(values) and all(isinstance(each, str | bytes) for each in values)
    # Text as Python objects becomes a tensor of strings.
    if text and dtype != np.dtype("O"):
        refuse_text(name, shortened(values[0], 60))
    if first.dtype.kind == "O" and not text:
        raise value_error(
            f"`{name}` is an array of Python objects.",
            "Expected numbers, in one array.",
            f"Write `{name}.astype('float32')` where each is a number, `np.stack({name})` where "
            "all are arrays of one shape; pad those of several shapes, or pass a ragged tensor.",
            first=shortened(values[:1], 60),
        )


def refuse_text(name: str, came: Any) -> None:
    expected = "Expected numbers."
    fix = f"Write `{name}.astype('float32')`."
    if name.startswith("x"):
        expected = "Expected text as Python objects, for a layer that reads it, or numbers."
        fix = f"Write `{name}.astype(object)` for `TextVectorization` or `StringLookup`."
    elif name.startswith("y"):
        fix = "Number the classes, as `names, y = np.unique(y, return_inverse=True)` does."
    raise value_error(f"`{name}` holds text.", expected, fix, came=came)


def require_fitting_data(
    model: keras.Model, spec: Batch, method: str, validates: bool = False
) -> None:
    """Raise a `ValueError` where data of these specs cannot be taken by a method of the model.

    Args:
        method: "train_step", "test_step" or "predict_step"; the user's own may take anything.
        validates: Whether they come as `validation_data`.
    """
    if not overridden(model, method):
        require_batches(model, spec)
    own = overridden(model, "train_step", "test_step", "compute_loss")
    if own or method == "predict_step" or model.loss is None:
        return
    labels = keras.tree.flatten(spec[1])
    if labels == [None]:
        raise value_error(
            f"The batches{' of `validation_data`' * validates} have no labels.",
            "Expected some, which the loss compares the predictions with.",
            f"Pass {'`validation_data=(x, y)`' if validates else '`y`'}, or a dataset of pairs "
            '`(x, y)`; read files with `label_mode="int"`; or compile without a loss.',
            loss=model.loss,
        )
    if len(labels) == 1 and labels[0].dtype == tf.string:
        refuse_text("y", labels[0])


def require_batches(model: keras.Model, spec: Batch) -> None:
    """Raise a `ValueError` where inputs are single examples, or of a size that fails."""
    for wanted, leaf in inputs_of(model, spec[0]):
        shape = leaf.shape
        # Keras itself adds a last axis of length 1.
        if shape.rank == len(wanted.shape) - 1 and wanted.shape[-1] != 1:
            raise value_error(
                "The dataset's elements are single examples.",
                f"Expected batches of inputs of shape {tuple(wanted.shape)}.",
                "Pass `dataset.batch(32)`, or make the data with "
                "`kmg.data.from_dataset(dataset, global_batch_size=32)`.",
                shape=tuple(shape),
            )
        if shape.rank == len(wanted.shape) and not shape[1:].is_compatible_with(wanted.shape[1:]):
            refuse_sizes(model, spec, tuple(wanted.shape[1:]), tuple(shape[1:]))


def inputs_of(model: keras.Model, x: Any) -> Iterator[tuple[Any, Any]]:
    """Each input of the model, and the data for it; empty if unknown."""
    # Only a functional or Sequential model knows its inputs.
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    leaves = keras.tree.flatten(x)
    if isinstance(x, dict):
        named = {wanted.name: wanted for wanted in inputs}
        inputs = [named[name] for name in sorted(x)] if named.keys() == x.keys() else []
    if len(inputs) == len(leaves):
        pairs = zip(inputs, leaves, strict=True)
        yield from ((wanted, leaf) for wanted, leaf in pairs if leaf is not None)


def refuse_sizes(
    model: keras.Model, spec: Batch, wanted: tuple[Any, ...], came: tuple[Any, ...]
) -> None:
    try:
        # Convolutions take any size, and Keras trains them.
        model_internals.symbolic_call(model, symbolic(spec[0]))
    except (ValueError, tf.errors.OpError) as error:
        raise value_error(
            f"The model expects inputs of shape {wanted}, and the data has {came}.",
            "Expected inputs of the shape that its `Input` names.",
            "Read or resize them to it, as `image_size=` of the data or `keras.layers.Resizing` "
            "does, or make the model for theirs.",
            came=came,
            wanted=wanted,
        ) from error
    except Exception:  # What cannot run on shapes alone may well train.
        return


def require_axes(model: keras.Model, spec: Any, replicas: int) -> None:
    # Without a graph one replica takes what comes, as Keras does.
    if model.run_eagerly and replicas == 1:
        return
    for leaf in keras.tree.flatten(spec):
        if leaf is not None and leaf.shape.rank is None:
            raise value_error(
                "The dataset has tensors of unknown rank.",
                "Expected a known rank: `tf.numpy_function`, `tf.py_function` and "
                "`from_generator` with `output_types` lose it.",
                "Set it in a `map`, as `tf.ensure_shape(image, (224, 224, 3))` does for one "
                "image, or pass `output_signature` to `from_generator`.",
                spec=leaf,
            )
