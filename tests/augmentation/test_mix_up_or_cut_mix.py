"""`MixUpOrCutMix`: one of the two for each image."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import check_layer, pictures, seeds_for

from keras_multigpu.augmentation.cut_mix import CutMix
from keras_multigpu.augmentation.mix_up import MixUp
from keras_multigpu.augmentation.mix_up_or_cut_mix import MixUpOrCutMix

SHAPE = (32, 32, 3)


def drawn(**arguments):
    """Shares, and how much of the image the box covers, of 4000 images."""
    found = MixUpOrCutMix(**arguments).draw(seeds_for(4000), SHAPE)
    left, top, right, bottom = found["box"].numpy().T
    return found["share"].numpy(), (right - left) * (bottom - top) / 32**2


@pytest.mark.slow
def test_what_every_layer_promises():
    """Shapes, types, seeds, configuration, XLA, and both places of running."""
    check_layer(MixUpOrCutMix(), labels=True)
    check_layer(
        MixUpOrCutMix(0.3, 0.4, 0.2, probability=0.9, seed=1),
        shapes=((6, 5, 4, 3),),
        labels=True,
        xla=False,
    )


def test_each_image_is_mixed_in_one_way():
    """Half of them each; none in both ways."""
    share, covered = drawn()
    blended, pasted = share < 1, covered > 0
    assert not (blended & pasted).any()
    assert blended.mean() == pytest.approx(0.5, abs=0.03)
    assert pasted.mean() == pytest.approx(0.5, abs=0.03)


def test_probabilities():
    """How often an image is mixed, and how often by `CutMix`."""
    share, covered = drawn(probability=0.4, switch_probability=0.25)
    assert (share < 1).mean() == pytest.approx(0.3, abs=0.03)
    assert (covered > 0).mean() == pytest.approx(0.1, abs=0.02)
    share, covered = drawn(probability=0)
    assert (share == 1).all() and (covered == 0).all()
    assert (drawn(switch_probability=1)[0] == 1).all()
    assert (drawn(switch_probability=0)[1] == 0).all()


def test_both_ways_are_those_of_the_two_layers():
    """For the same draws the images and labels of `MixUp` and `CutMix`."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mix_up_alpha": 0}, "`mix_up_alpha` is not a positive number"),
        ({"cut_mix_alpha": None}, "`cut_mix_alpha` is not a positive number"),
        ({"switch_probability": 2}, "`switch_probability` is not a number in its range"),
        ({"probability": -0.1}, "`probability` is not a number in its range"),
        ({"num_classes": 0}, "`num_classes` is not a positive integer"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message):
    """They are refused by the constructor."""
    with pytest.raises(ValueError, match=message):
        MixUpOrCutMix(**arguments)


def test_masks_and_boxes_are_refused():
    """Blending masks has no meaning."""
    images = pictures((2, 4, 4, 3))
    for kind in ("segmentation_masks", "bounding_boxes"):
        with pytest.raises(ValueError, match=f"MixUpOrCutMix cannot change `{kind}`"):
            MixUpOrCutMix()({"images": images, kind: images})
