"""`MixUpOrCutMix`: one of the two for each image."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import pictures, seeds_for

from keras_multigpu.augmentation.mixing.mixing import CutMix, MixUp, MixUpOrCutMix

SHAPE = (32, 32, 3)


def drawn(**arguments):
    """Shares, and how much of the image the box covers, of 4000 images."""
    found = MixUpOrCutMix(**arguments).draw(seeds_for(4000), SHAPE)
    left, top, right, bottom = found["box"].numpy().T
    return found["share"].numpy(), (right - left) * (bottom - top) / 32**2


def test_each_image_is_mixed_in_one_way():
    share, covered = drawn()
    blended, pasted = share < 1, covered > 0
    assert not (blended & pasted).any()
    assert blended.mean() == pytest.approx(0.5, abs=0.03)
    assert pasted.mean() == pytest.approx(0.5, abs=0.03)


def test_the_probability_chooses_whether_images_are_mixed():
    share, covered = drawn(probability=0.4)
    assert (share < 1).mean() == pytest.approx(0.2, abs=0.03)
    assert (covered > 0).mean() == pytest.approx(0.2, abs=0.03)
    share, covered = drawn(probability=0)
    assert (share == 1).all() and (covered == 0).all()


def test_each_way_gives_what_its_own_layer_gives():
    images, labels = pictures((6, 5, 4, 3)), np.eye(6, dtype="float32")
    data = {"images": images, "labels": labels}
    share = np.array([0.3, 0.8, 1, 1, 1, 1], "float32")
    box = np.array([[0] * 4, [0] * 4, [1, 1, 3, 4], [0, 0, 4, 1], [0] * 4, [0] * 4], "int32")
    both = MixUpOrCutMix().apply(data, {"share": tf.constant(share), "box": tf.constant(box)})
    blended = MixUp().apply(data, {"share": tf.constant(share)})
    pasted = CutMix().apply(data, {"box": tf.constant(box)})
    for kind in data:
        np.testing.assert_array_equal(both[kind][:2], blended[kind][:2])
        np.testing.assert_array_equal(both[kind][2:4], pasted[kind][2:4])
        np.testing.assert_array_equal(both[kind][4:], data[kind][4:])
