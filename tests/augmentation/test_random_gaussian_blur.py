"""`RandomGaussianBlur`: its pixels against Keras and SciPy, and a strength for each image."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import SHAPES, check_layer, check_saved_model, drawn_for, pictures
from scipy import ndimage

from keras_multigpu.augmentation.random_gaussian_blur import RandomGaussianBlur

SIGMAS = np.float32([[0.5, 0.5], [1.5, 0.3], [0, 0], [0, 0.8]])


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("kernel_size", [3, 7, 23])
def test_each_image_is_blurred_as_by_keras(kernel_size, on_host):
    """Keras with the strength of one image after another, also where the kernel is larger."""
    images = pictures((4, 9, 12, 3))
    result = RandomGaussianBlur(kernel_size=kernel_size).apply(
        images, {"sigma": tf.constant(SIGMAS)}, on_host
    )
    theirs = keras.layers.RandomGaussianBlur(kernel_size=kernel_size)
    for image, sigma, ours in zip(images, SIGMAS, result, strict=True):
        drawn = {"should_apply_blur": np.array([True]), "blur_factor": sigma + 1e-6}
        expected = theirs.transform_images(image[None], drawn)[0]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("on_host", [True, False])
def test_it_is_a_gaussian(on_host):
    """SciPy's filter with the same radius and zeros beyond the border."""
    images = pictures((4, 9, 12, 3))
    result = RandomGaussianBlur(kernel_size=7).apply(
        images, {"sigma": tf.constant(SIGMAS)}, on_host
    )
    for image, (along_rows, along_columns), ours in zip(images, SIGMAS, result, strict=True):
        sigma = (along_columns + 1e-6, along_rows + 1e-6, 0)
        expected = ndimage.gaussian_filter(image, sigma, mode="constant", radius=(3, 3, 0))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("on_host", [True, False])
def test_no_deviation_changes_nothing(on_host):
    """Images that are not to be blurred keep every pixel."""
    images = pictures((3, 8, 8, 3))
    layer = RandomGaussianBlur(0.0)
    drawn = drawn_for(layer, images.shape)
    assert not drawn["sigma"].numpy().any()
    np.testing.assert_array_equal(layer.apply(images, drawn, on_host), images)


def test_draws_cover_their_ranges():
    """A share of the images as asked for, with both strengths of every image its own."""
    layer = RandomGaussianBlur(0.5, sigma=(0.4, 2.0))
    sigma = drawn_for(layer, (4000, 8, 8, 3))["sigma"].numpy()
    blurred = sigma[sigma[:, 0] > 0]
    assert 0.47 < len(blurred) / len(sigma) < 0.53
    assert 0.4 <= blurred.min() < 0.41 and 1.99 < blurred.max() <= 2
    assert len(np.unique(blurred)) > 0.99 * blurred.size
    assert abs(np.corrcoef(blurred.T)[0, 1]) < 0.06
    single = drawn_for(RandomGaussianBlur(), (4000, 8, 8, 3))["sigma"].numpy()
    assert 0 <= single.min() < 0.01 and 0.99 < single.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [({}, SHAPES), ({"factor": 0.5, "kernel_size": 5, "sigma": (1.0, 2.0)}, SHAPES[:1])],
)
@pytest.mark.slow
def test_it_keeps_the_promises_of_a_layer(arguments, shapes):
    """Configuration, shapes, types, replay, pipeline, XLA."""
    check_layer(RandomGaussianBlur(**arguments), shapes=shapes, host_tolerance=1e-5)


@pytest.mark.slow
def test_it_is_saved_in_a_model(tmp_path):
    """A functional model with it comes back from a file."""
    check_saved_model(RandomGaussianBlur(sigma=(0.5, 1), seed=3), tmp_path)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("factor", -1),
        ("kernel_size", 4),
        ("kernel_size", 3.0),
        ("kernel_size", (3, 5)),
        ("sigma", -1),
        ("value_range", (0, 0)),
    ],
)
def test_bad_arguments_are_refused(argument, value):
    """The message names the argument, what was expected and what came."""
    with pytest.raises(ValueError, match=f"(?s)`{argument}`.*Expected.*Received: {argument}="):
        RandomGaussianBlur(**{argument: value})
