"""The handwritten digits that come with scikit-learn, in parts for training and validation."""

from typing import NamedTuple

import numpy as np

Part = tuple[np.ndarray, np.ndarray]
"""Images and labels."""


class Digits(NamedTuple):
    """1,797 images of 8x8 pixels."""

    training: Part
    validation: Part


def load_digits() -> Digits:
    """The digits, a fifth of each kind for validation, always the same ones."""
    from sklearn import datasets
    from sklearn import model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, x_new, y, y_new = model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Digits((x, y), (x_new, y_new))
