"""`affine`: each map is Keras's, and maps join in the order of the changes."""

import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.geometry import affine

NUMBERS = tf.constant([0.3, -0.2])
OTHERS = tf.constant([0.1, 0.4])


def keras_entries(matrices):
    """Matrices as Keras writes them, with eight entries."""
    return np.pad(np.asarray(matrices).reshape(-1, 6), ((0, 0), (0, 2)))


def points(matrices, x, y):
    return np.asarray(matrices) @ np.float32([x, y, 1])


def test_identity_keeps_every_point():
    np.testing.assert_array_equal(points(affine.identity(2), 3, 5), [[3, 5], [3, 5]])


def test_flips_mirror_the_axes_they_are_asked_for():
    flips = affine.flip(tf.constant([True, False, True]), tf.constant([False, True, True]), 4, 6)
    np.testing.assert_array_equal(points(flips, 1, 0), [[4, 0], [1, 3], [4, 3]])


def test_a_quarter_turn_brings_the_right_side_to_the_top():
    turn = affine.rotation(tf.constant([90.0]), 3, 3)
    np.testing.assert_allclose(points(turn, 1, 0), [[2, 1]], atol=1e-6)


def test_translation_zoom_and_shear_have_keras_entries():
    """The matrices that the Keras layers build for the same numbers."""
    x, y = NUMBERS, OTHERS
    both = tf.stack([x, y], axis=1)
    np.testing.assert_allclose(
        keras_entries(affine.translation(x, y)), [[1, 0, -a, 0, 1, -b, 0, 0] for a, b in both]
    )
    shears = np.array([[1, a, 0, b, 1, 0, 0, 0] for a, b in both.numpy()])
    np.testing.assert_allclose(keras_entries(affine.shear(x, y)), shears)
    centre = points(affine.zoom(1 + x, 1 + y, 5, 7), 3, 2)
    np.testing.assert_allclose(centre, [[3, 2], [3, 2]], atol=1e-6)
    edge = points(affine.zoom(1 + x, 1 + y, 5, 7), 6, 4)
    np.testing.assert_allclose(edge, [[6.9, 4.2], [5.4, 4.8]], atol=1e-5)


def test_a_window_fills_the_result_border_to_border():
    """2 by 3 pixels from column 1 and row 4 on, as 4 by 3 pixels."""
    one = tf.ones(1)
    window = affine.window(1 * one, 4 * one, 2 * one, 3 * one, (4, 3))
    np.testing.assert_allclose(points(window, 0, 0), [[1, 3.75]])
    np.testing.assert_allclose(points(window, 2, 3), [[3, 5.25]])


def test_product_applies_the_first_change_first():
    flip = affine.flip(tf.constant([True]), tf.constant([False]), 4, 10)
    shift = affine.translation(tf.constant([2.0]), tf.constant([0.0]))
    # What stood in column 0 goes to column 9 and on to 11; or to 2 and then to 7.
    np.testing.assert_array_equal(points(affine.product(flip, shift), 11, 1), [[0, 1]])
    np.testing.assert_array_equal(points(affine.product(shift, flip), 7, 1), [[0, 1]])


def test_the_inverse_leads_back():
    some = affine.product(affine.rotation(100 * NUMBERS, 5, 7), affine.shear(OTHERS, NUMBERS))
    for both in ((some, affine.inverse(some)), (affine.inverse(some), some)):
        np.testing.assert_allclose(affine.product(*both), affine.identity(2), atol=1e-5)


def test_a_map_without_inverse_gives_zeros():
    flat = affine.shear(tf.ones(1), tf.ones(1))
    np.testing.assert_array_equal(affine.inverse(flat), np.zeros((1, 2, 3)))


def test_boxes_move_as_the_pixels_in_them():
    """A quarter turn of a 3 by 3 picture takes a lower left box to the lower right corner."""
    turn = affine.rotation(tf.constant([90.0]), 3, 3)
    box = tf.constant([[[0.0, 1.0, 1.0, 3.0]]])
    np.testing.assert_allclose(affine.moved_boxes(box, turn), [[[1, 2, 3, 3]]], atol=1e-5)
