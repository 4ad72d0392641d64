"""The operations that move pixels, against Pillow, and boxes that move with them."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation.geometry.affine import move_boxes
from keras_multigpu.augmentation.geometry.resampling import resample_images
from keras_multigpu.augmentation.policies.operations import GEOMETRIC_OPERATIONS, geometric_matrices

Image = pytest.importorskip("PIL.Image")

PILLOW = {
    "rotate": lambda picture, size: picture.rotate(size, Image.Resampling.BILINEAR),
    "shear_x": lambda picture, size: sheared(picture, (1, size, 0, 0, 1, 0)),
    "shear_y": lambda picture, size: sheared(picture, (1, 0, 0, size, 1, 0)),
    "translate_x": lambda picture, size: sheared(picture, (1, 0, -size, 0, 1, 0)),
    "translate_y": lambda picture, size: sheared(picture, (1, 0, 0, 0, 1, -size)),
}


def sheared(picture, matrix):
    """A picture through an affine map, by Pillow."""
    return picture.transform(
        picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )


def smooth_picture():
    """A smooth picture of odd height and even width."""
    y, x = np.mgrid[:41, :30]
    waves = 128 + 100 * np.sin(x / 6)[..., None] * np.cos(y[..., None] / (4, 6, 8))
    return waves.astype("uint8")


@pytest.mark.parametrize("name", GEOMETRIC_OPERATIONS)
def test_each_operation_equals_pillows(name):
    """Moved pixels are within two levels of Pillow's, except borders, which are blended with black.

    Pillow does not blend a pixel that it reads beyond the middle of an outermost pixel.
    """
    picture = smooth_picture()
    sizes = {"rotate": (27, -135), "shear_x": (0.3, -0.9), "shear_y": (0.3, -0.9)}
    for size in sizes.get(name, (7, -3)):
        kind = tf.constant([GEOMETRIC_OPERATIONS.index(name)])
        matrices = geometric_matrices(kind, tf.constant([float(size)]), picture.shape)
        images = tf.constant(picture[None], tf.float32)
        result = resample_images(images, matrices, picture.shape[:2], fill_mode="constant")[
            0
        ].numpy()
        expected = np.asarray(PILLOW[name](Image.fromarray(picture), size), np.float32)
        outside = expected.max(-1) == 0
        around = np.pad(outside, 1, constant_values=True)
        border = np.lib.stride_tricks.sliding_window_view(around, (3, 3)).any((2, 3))
        assert (~border).mean() > 0.2
        assert np.abs(result - expected)[~border].max() <= 2
        # Well outside there is only the fill value.
        inner = np.lib.stride_tricks.sliding_window_view(np.pad(outside, 1), (3, 3)).all((2, 3))
        assert not result[inner].any()


def test_any_other_number_moves_nothing():
    matrices = geometric_matrices(tf.constant([-1, 5]), tf.constant([30.0, 2.0]), (9, 8, 3))
    np.testing.assert_array_equal(matrices, [[[1, 0, 0], [0, 1, 0]]] * 2)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    (
        ("translate_x", 3.0, (5, 1, 9, 7)),
        ("translate_y", -1.0, (2, 0, 6, 6)),
        ("rotate", 90.0, (1, 4, 7, 8)),
        ("shear_x", 0.5, (-1.5, 1, 5.5, 7)),
    ),
)
def test_boxes_move_with_pixels(name, size, expected):
    kind = tf.constant([GEOMETRIC_OPERATIONS.index(name)])
    matrices = geometric_matrices(kind, tf.constant([size]), (10, 10, 3))
    box = tf.constant([[[2.0, 1.0, 6.0, 7.0]]])
    np.testing.assert_allclose(move_boxes(box, matrices)[0, 0], expected, atol=1e-5)
