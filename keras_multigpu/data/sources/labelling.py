"""Makes targets of labels: a class, several classes, or numbers to predict."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_multigpu.checks import require_choice, shorten, value_error
from keras_multigpu.data.sources.targets import LABEL_MODES, ArrayTargets, of_classes

TASKS = ("classification", "multi_label", "regression", "mask")
SEPARATOR = "|"
"""Separates the class names in a text with several of them."""


def require_task(task: str, label_mode: str | None) -> None:
    require_choice("task", task, TASKS)
    require_choice("label_mode", label_mode, LABEL_MODES)
    if task != "classification" and label_mode != "int":
        raise value_error(
            f"`label_mode` was given with labels for {task!r}.",
            'Expected it only with task="classification".',
            label_mode=label_mode,
        )


def labels_as_array(
    labels: Any, paths: Sequence[str], what: str = "labels", *, may_be_empty: bool = False
) -> np.ndarray:
    """Labels as an array of numbers, or of objects that are all texts or all tuples of texts.

    Args:
        labels: A label for each file.
        paths: The files, to name one whose label is missing.
        what: What messages call them.
        may_be_empty: Whether an empty text is a label, that of an image without any class.
    """
    try:
        array = plain_array(labels)
    except (ValueError, TypeError, KeyError) as error:
        raise value_error(
            f"The {what} cannot be put into one array: {error}.",
            "Expected one kind: numbers, lists of equally many numbers, names, lists of names, or "
            "paths of masks.",
            **{what: shorten(labels, 100)},
        ) from error
    missing = missing_in(array, may_be_empty)
    if np.any(missing):
        row = int(np.argmax(missing))
        is_number = array.dtype != object and not np.isnan(array[row]).any()
        wrong = "infinite" if is_number else "missing"
        raise value_error(
            f"{int(np.sum(missing))} of {len(array)} {what} are {wrong}, the first that of "
            f"{paths[row]!r}.",
            "Expected one for each file.",
            row=row,
            found=array[row],
        )
    return array


def missing_in(labels: np.ndarray, may_be_empty: bool) -> np.ndarray:
    """Marks the labels that are NaN, infinite, None or an empty text."""
    if labels.dtype == object:
        names = [isinstance(label, str | tuple) for label in labels]
        empty = [label == "" and not may_be_empty for label in labels]
        return ~np.array(names, bool) | np.array(empty, bool)
    return ~np.isfinite(labels).reshape(len(labels), -1).any(axis=1)


def plain_array(labels: Any) -> np.ndarray:
    if not isinstance(labels, list | tuple):
        labels = np.asarray(labels)
        if labels.dtype.kind in "iubf":
            return labels
        labels = labels.tolist()
    first = labels[0] if len(labels) else 0
    names = isinstance(first, set | frozenset) or (
        isinstance(first, list | tuple)
        and all(isinstance(name, str) for label in labels for name in label)
    )
    if names or isinstance(first, str | os.PathLike):
        array = np.empty(len(labels), object)
        for row, label in enumerate(labels):
            # A missing label is reported later, so it stays as it is.
            path = os.fspath(label) if isinstance(label, os.PathLike) else label
            array[row] = tuple(label) if names else path
        return array
    array = np.asarray(labels)
    if array.dtype.kind not in "iubf":
        raise TypeError(f"they mix kinds, such as {first!r}")
    return array


def class_targets(
    labels: np.ndarray, label_mode: str, class_names: Sequence[str] | None
) -> ArrayTargets:
    """One class for each file; without `class_names`, names are numbered in sorted order."""
    names = None if class_names is None else [str(name) for name in class_names]
    if labels.dtype == object and all(isinstance(label, str) for label in labels):
        names = sorted(set(labels)) if names is None else names
        return of_classes(class_numbers(labels, names), label_mode, names)
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or labels.min() < 0:
        raise value_error(
            "Some labels are not class numbers.",
            "Expected the integers 0, 1, 2, ..., or a name for each file.",
            'For several classes pass task="multi_label", for numbers to predict "regression".',
            dtype=str(labels.dtype),
            first=labels[:5].tolist(),
        )
    if names is not None and labels.max() >= len(names):
        raise value_error(
            f"There is a class {labels.max()}, and {len(names)} class names.",
            "Expected a name for each number, counted from zero.",
            class_names=class_names,
        )
    return of_classes(labels, label_mode, names)


def mask_paths(labels: np.ndarray) -> list[str]:
    if labels.dtype != object or any(not isinstance(label, str) for label in labels):
        raise value_error(
            "Some labels are not paths.",
            'Expected the path of a mask for each file for task="mask".',
            first=labels[:5].tolist(),
        )
    return labels.tolist()


def value_targets(labels: np.ndarray, task: str, class_names: Sequence[str] | None) -> ArrayTargets:
    """Several labels (0 and 1, or names) or numbers to predict for each file, as `float32`."""
    names = None if class_names is None else [str(name) for name in class_names]
    if labels.dtype != object:
        if task == "multi_label" and (labels.ndim != 2 or not np.isin(labels, (0, 1)).all()):
            raise value_error(
                "The labels do not mark for each class whether an image has it.",
                "Expected a matrix of zeros and ones, or the names of each image's classes.",
                'For other numbers pass task="regression".',
                shape=labels.shape,
                first=labels[:2].tolist(),
            )
        values = labels.astype(np.float32)
        return ArrayTargets(values) if task == "regression" else class_columns(values, names)
    if task == "regression":
        raise value_error(
            "The labels are text.",
            'Expected numbers for task="regression".',
            first=labels[:3].tolist(),
        )
    sets = [
        tuple(filter(None, map(str.strip, label.split(SEPARATOR))))
        if isinstance(label, str)
        else label
        for label in labels
    ]
    names = sorted({name for label in sets for name in label}) if names is None else names
    matrix = np.zeros((len(sets), len(names)), np.float32)
    sizes = [len(label) for label in sets]
    flat = np.array([name for label in sets for name in label], object)
    matrix[np.repeat(np.arange(len(sets)), sizes), class_numbers(flat, names)] = 1
    return class_columns(matrix, names)


def class_columns(matrix: np.ndarray, names: list[str] | None) -> ArrayTargets:
    """A column for each class. If each row has exactly one class, classes can be balanced."""
    is_single = matrix.shape[1] > 1 and (matrix.sum(axis=1) == 1).all()
    return ArrayTargets(matrix, names, matrix.argmax(axis=1) if is_single else None)


def class_numbers(labels: np.ndarray, names: list[str]) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(names)}
    unknown = sorted({str(label) for label in labels} - numbers.keys())
    if unknown or len(numbers) < len(names):
        raise value_error(
            f"{len(unknown)} names among the labels are not classes: {unknown[:5]}."
            if unknown
            else "`class_names` has a name twice.",
            f"Expected some of {names[:20]}{' ...' * (len(names) > 20)}.",
            "Correct the labels, or give all classes as `class_names`.",
            class_names=names[:20],
        )
    return np.array([numbers[label] for label in labels], np.int32)
