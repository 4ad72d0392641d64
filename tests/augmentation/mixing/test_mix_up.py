"""MixUp: blends of neighbours, checked by hand and against SciPy."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers.layer_checks import pictures, seeds_for

from keras_multigpu.augmentation import Mix

IMAGES = np.array([0.0, 100, 200, 50], "float32")[:, None, None, None] * np.ones((4, 2, 3, 1))
LABELS = np.array([0, 1, 2, 0], "int32")


def mixed(share, **data):
    data = {"images": IMAGES, "labels": LABELS, **data}
    result = Mix(cut_mix=None, num_classes=3).apply(data, {"share": tf.constant(share, tf.float32)})
    return tf.nest.map_structure(np.asarray, result)


def test_pixels_and_labels_are_blended_by_their_shares():
    """Row 0 keeps a quarter of itself, row 1 half, row 2 all, row 3 nothing."""
    result = mixed([0.25, 0.5, 1, 0])
    assert result["images"][:, 0, 0, 0].tolist() == [75, 50, 200, 200]
    np.testing.assert_array_equal(result["images"], result["images"][:, :1, :1] + 0 * IMAGES)
    expected = [[0.25, 0.75, 0], [0.5, 0.5, 0], [0, 0, 1], [0, 0, 1]]
    assert result["labels"].tolist() == expected
    assert result["labels"].dtype == result["images"].dtype == "float32"


def test_a_row_alone_is_not_mixed():
    images = pictures((1, 3, 3, 3))
    result = mixed([0.3], images=images, labels=LABELS[1:2])
    np.testing.assert_array_equal(result["images"], images)
    assert result["labels"].tolist() == [[0, 1, 0]]
    alone = mixed([0.3], images=images[0], labels=np.int32(2))
    np.testing.assert_array_equal(alone["images"], images[0])
    assert alone["labels"].tolist() == [0, 0, 1]


def test_bytes_are_rounded_and_half_precision_keeps_labels_exact():
    data = {"images": IMAGES.astype("uint8"), "labels": LABELS}
    drawn = {"share": tf.constant([0.999, 0.5, 1, 0.3])}
    result = Mix(cut_mix=None, num_classes=3, dtype="uint8").apply(data, drawn)
    assert result["images"].dtype == tf.uint8
    assert result["images"].numpy()[:, 0, 0, 0].tolist() == [0, 50, 200, 155]
    result = Mix(cut_mix=None, num_classes=3, dtype="mixed_float16").apply(data, drawn)
    assert (result["images"].dtype, result["labels"].dtype) == (tf.float16, tf.float32)
    assert result["labels"].numpy()[0].tolist() == pytest.approx([0.999, 0.001, 0], abs=1e-7)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 3.0, 40.0])
def test_shares_have_the_distribution_of_the_paper(alpha):
    """A Kolmogorov-Smirnov test against SciPy's Beta; half of the shares are below one half."""
    drawn = Mix(alpha, None).draw(seeds_for(20000), (8, 8, 3))["share"].numpy().astype("float64")
    assert drawn.dtype == "float64" and (drawn >= 0).all() and (drawn <= 1).all()
    # Float32 rounds shares close to one to one, so the upper half is mirrored.
    lower = 2 * scipy.stats.beta(alpha, alpha).cdf(drawn[drawn < 0.5])
    assert scipy.stats.kstest(lower, "uniform").pvalue > 0.01
    upper = 2 * scipy.stats.beta(alpha, alpha).cdf((1 - drawn)[drawn >= 0.5])
    assert scipy.stats.ks_2samp(lower[lower > 0.6], upper[upper > 0.6]).pvalue > 0.01
    assert (drawn < 0.5).mean() == pytest.approx(0.5, abs=0.015)


def test_numbers_to_predict_are_blended_too():
    labels = np.array([1, 3, 5, 7], "float32")
    drawn = {"share": tf.constant([0.25, 0.5, 1, 0])}
    result = Mix(cut_mix=None).apply({"images": IMAGES, "labels": labels}, drawn)
    assert result["labels"].numpy().tolist() == [2.5, 2, 5, 5]
