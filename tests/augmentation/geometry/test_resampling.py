"""`resampling` gives the pixels of TensorFlow's own operation, compiled or not."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import ndimage

from keras_multigpu.augmentation import compilation
from keras_multigpu.augmentation.compilation import place_on_host
from keras_multigpu.augmentation.geometry.resampling import (
    FILL_MODES,
    INTERPOLATIONS,
    read,
    resample_images,
)

RANDOM = np.random.default_rng(1)
IMAGES = tf.constant(RANDOM.uniform(0, 255, (6, 9, 13, 3)), tf.float32)


def some_matrices():
    """A flip, an exact half pixel, and maps that look far beyond the image."""
    matrices = RANDOM.uniform(-1.5, 1.5, (6, 2, 3))
    matrices[:, :, 2] = RANDOM.uniform(-30, 30, (6, 2))
    matrices[0] = [[-1, 0, 12], [0, 1, 0]]
    matrices[1] = [[2, 0, 0.5], [0, 0.5, -0.25]]
    return tf.constant(matrices, tf.float32)


MATRICES = some_matrices()


def in_a_graph(images, matrices, size, **settings):
    @tf.function(autograph=False)
    def change():
        return resample_images(images, matrices, size, **settings)

    return change()


def operation(images, size, interpolation, fill_mode, matrices=MATRICES):
    """The result of TensorFlow's operation, which Keras uses."""
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.pad(tf.reshape(matrices, (-1, 6)), ((0, 0), (0, 2))),
        output_shape=size,
        fill_value=7.0,
        interpolation=interpolation.upper(),
        fill_mode=fill_mode.upper(),
    )


@pytest.mark.parametrize("fill_mode", FILL_MODES)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_pixels_equal_those_of_tensorflows_operation(fill_mode, interpolation):
    expected = operation(IMAGES, (8, 17), interpolation, fill_mode)
    settings = {"interpolation": interpolation, "fill_mode": fill_mode, "fill_value": 7.0}
    result = in_a_graph(IMAGES, MATRICES, (8, 17), **settings)
    np.testing.assert_allclose(result, expected, atol=0.02)
    plain = read(IMAGES, MATRICES, (8, 17), interpolation, fill_mode, 7.0)
    np.testing.assert_allclose(plain, expected, atol=0.02)


@pytest.mark.parametrize("shape", [(1, 7), (9, 1)])
@pytest.mark.parametrize("fill_mode", FILL_MODES)
def test_images_of_one_row_or_column_are_resampled_alike(shape, fill_mode):
    """The only pixel along an axis is its own mirror image."""
    images = IMAGES[:, : shape[0], : shape[1], :1]
    expected = operation(images, (4, 5), "bilinear", fill_mode)
    result = read(images, MATRICES, (4, 5), "bilinear", fill_mode, 7.0)
    np.testing.assert_allclose(result, expected, atol=0.02)


def test_pixels_equal_scipys():
    image, matrix = IMAGES[3, ..., 0].numpy(), MATRICES[3].numpy()
    swap = matrix[::-1, [1, 0, 2]]
    expected = ndimage.affine_transform(image, swap[:, :2], swap[:, 2], order=1, mode="nearest")
    result = in_a_graph(IMAGES[3:4], MATRICES[3:4], (9, 13), fill_mode="nearest")
    np.testing.assert_allclose(result[0, ..., 0], expected, atol=0.02)


@pytest.mark.parametrize("on_host", [True, False])
def test_unknown_sizes_give_the_same_pixels(on_host):
    signature = tf.TensorSpec((None, None, None, 3)), tf.TensorSpec((None, 2, 3))

    @tf.function(input_signature=signature, autograph=False)
    def change(images, matrices):
        result = resample_images(images, matrices, tf.unstack(tf.shape(images)[1:3]))
        assert result.shape[3] == 3
        return result

    expected = resample_images(IMAGES, MATRICES, (9, 13))
    with place_on_host(on_host):
        result = change(IMAGES, MATRICES)
    np.testing.assert_allclose(result, expected, atol=0.02)


@pytest.mark.slow
def test_a_share_of_a_batch_gives_the_same_bits():
    """For any number of images, since each replica has a part of the batch."""
    whole = in_a_graph(IMAGES, MATRICES, (9, 13))
    parts = [in_a_graph(IMAGES[a:b], MATRICES[a:b], (9, 13)) for a, b in ((0, 1), (1, 6))]
    np.testing.assert_array_equal(tf.concat(parts, 0), whole)


def test_the_shape_of_the_result_is_static():
    @tf.function(input_signature=[tf.TensorSpec((None, 9, 13, 3)), tf.TensorSpec((None, 2, 3))])
    def change(images, matrices):
        result = resample_images(images, matrices, (4, 5))
        assert result.shape.as_list() == [None, 4, 5, 3]
        return result

    assert change(IMAGES[:2], MATRICES[:2]).shape == (2, 4, 5, 3)


def test_with_a_gpu_nothing_is_compiled(monkeypatch):
    """A compiler may be missing there; plain operations give the same pixels."""
    expected = in_a_graph(IMAGES, MATRICES, (9, 13))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a card"])
    monkeypatch.setattr(compilation, "compile_function", None)
    np.testing.assert_allclose(in_a_graph(IMAGES, MATRICES, (9, 13)), expected, atol=0.02)


def test_outside_a_graph_nothing_is_compiled(monkeypatch):
    """Every call may bring images of another size."""
    expected = in_a_graph(IMAGES, MATRICES, (9, 13))
    monkeypatch.setattr(compilation, "compile_function", None)
    np.testing.assert_allclose(resample_images(IMAGES, MATRICES, (9, 13)), expected, atol=0.02)


def test_an_empty_batch_stays_empty():
    assert resample_images(IMAGES[:0], MATRICES[:0], (4, 5)).shape == (0, 4, 5, 3)
