"""The pixels of flows are those of `ImageDataGenerator`."""

import numpy as np
import pytest
import tensorflow as tf
from unmoved import IDENTITY

from keras_multigpu.data.flows.parameters import matrices
from keras_multigpu.data.from_flow import from_flow

cv2 = pytest.importorskip("cv2")
photographs = pytest.importorskip("skimage.data")
Generator = tf.keras.preprocessing.image.ImageDataGenerator  # noqa: TID251

# Keras 3.15 calls SciPy's `affine_transform` by a name that SciPy is going to remove.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Please import `affine_transform` from the `scipy.ndimage` namespace:DeprecationWarning"
)

# scikit-image's photographs at a size with unequal sides, which shows where they are mixed up.
PHOTOS = np.stack(
    [
        cv2.resize(getattr(photographs, name)(), (160, 128), interpolation=cv2.INTER_AREA)
        for name in ("astronaut", "coffee", "chelsea")
    ]
).astype(np.float32)

ONE_PARAMETER = [
    {"theta": 17.3},
    {"theta": -120.0},
    {"tx": 11.7},
    {"tx": -30.0},
    {"ty": 20.3},
    {"ty": -7.0},
    {"shear": 12.0},
    {"zx": 0.7},
    {"zy": 1.4},
    {"zx": 1.9, "zy": 2.3},
    {"flip_horizontal": 1},
    {"flip_vertical": 1},
]
COLORS = [
    {"channel_shift_intensity": 31.6},
    {"channel_shift_intensity": -80.0},
    {"brightness": 0.4},
    {"brightness": 1.7},
]
COMBINATIONS = [
    {"theta": 38.0, "tx": 25.6, "ty": -16.2, "zx": 0.8, "zy": 1.2, "flip_horizontal": 1},
    {"theta": -9.0, "shear": 8.0, "tx": 3.3, "flip_vertical": 1, "brightness": 1.3},
    {"zx": 1.5, "zy": 1.5, "channel_shift_intensity": 25.0, "brightness": 0.6},
]


def changed(generator, images, parameters, **flow_arguments):
    """Images as the source of a flow changes them, for given parameters."""
    source = from_flow(generator.flow(images, **flow_arguments))._source
    source.parameters.moves = True
    every = {**IDENTITY, **parameters}
    drawn = {name: np.full(len(images), float(value)) for name, value in every.items()}
    places = matrices(drawn, *images.shape[1:3])
    result = np.empty(images.shape, np.float32)
    for row in range(len(images)):
        source.change(source.load(row), places[row], every, result[row])
    return result


def expected(generator, images, parameters):
    """The same with `ImageDataGenerator`'s own methods."""
    every = {**IDENTITY, **parameters}
    return np.stack(
        [generator.standardize(generator.apply_transform(image.copy(), every)) for image in images]
    )


def assert_close(actual, wanted):
    """The bound that the documentation promises, for each image."""
    for one, other in zip(actual, wanted, strict=True):
        difference = np.abs(one - other)
        assert difference.mean() <= 1
        assert np.percentile(difference, 99) <= 3


@pytest.mark.parametrize("fill_mode", ["nearest", "constant", "reflect", "wrap"])
@pytest.mark.parametrize("parameters", ONE_PARAMETER + COMBINATIONS, ids=str)
def test_pixels_equal_the_generators(parameters, fill_mode):
    generator = Generator(fill_mode=fill_mode, cval=90.5)
    assert_close(changed(generator, PHOTOS, parameters), expected(generator, PHOTOS, parameters))


@pytest.mark.skipif(
    int(cv2.__version__.split(".")[0]) < 5, reason="OpenCV 4 rounds positions to 1/32 of a pixel."
)
@pytest.mark.parametrize("fill_mode", ["nearest", "constant", "reflect", "wrap"])
@pytest.mark.parametrize("parameters", ONE_PARAMETER, ids=str)
def test_moved_pixels_are_exact(parameters, fill_mode):
    """OpenCV 5 interpolates float images in floats: nothing like the bound is needed."""
    generator = Generator(fill_mode=fill_mode, cval=-20)
    actual = changed(generator, PHOTOS, parameters)
    difference = np.abs(actual - expected(generator, PHOTOS, parameters))
    # At the border of what lies outside, rounding may decide between the image and `cval`.
    assert np.percentile(difference, 99.9) < 0.05


@pytest.mark.parametrize("parameters", COLORS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_colors_equal_the_generators(parameters, channels):
    images = np.concatenate([PHOTOS, PHOTOS[..., :1]], axis=-1)[..., :channels]
    generator = Generator()
    np.testing.assert_allclose(
        changed(generator, images, parameters), expected(generator, images, parameters), atol=1e-3
    )


@pytest.mark.parametrize("brightness", [0.5, 1.5])
def test_brightness_of_images_outside_of_8_bits(brightness):
    """Keras scales such images to 0 to 255 and back."""
    images = PHOTOS * 2 - 100
    generator = Generator()
    np.testing.assert_allclose(
        changed(generator, images, {"brightness": brightness}),
        expected(generator, images, {"brightness": brightness}),
        # One of 255 levels, where rounding decides.
        atol=4,
    )


def doubled(image):
    """A function of a user's."""
    return image * 2 - 10


def in_place(image):
    """Another, which changes its argument."""
    image /= 3
    return image


@pytest.mark.parametrize(
    "arguments",
    [
        {"rescale": 1 / 255},
        {"samplewise_center": True},
        {"samplewise_center": True, "samplewise_std_normalization": True, "rescale": 1 / 255},
        {"featurewise_center": True},
        {"featurewise_center": True, "featurewise_std_normalization": True},
        {"preprocessing_function": doubled},
        {"preprocessing_function": in_place, "rescale": 0.5},
    ],
    ids=str,
)
def test_standardized_pixels_equal_the_generators(arguments):
    generator = Generator(**arguments)
    generator.fit(PHOTOS)
    scale = np.ptp(expected(generator, PHOTOS, {})) / 255
    parameters = {"theta": 21.0, "tx": 4.4, "flip_horizontal": 1}
    actual = changed(generator, PHOTOS, parameters)
    assert_close(actual / scale, expected(generator, PHOTOS, parameters) / scale)


def test_whitened_pixels_equal_the_generators():
    images = np.stack([cv2.resize(photo, (16, 12)) for photo in PHOTOS])
    generator = Generator(zca_whitening=True, featurewise_center=True)
    generator.fit(images)
    np.testing.assert_allclose(
        changed(generator, images, {"flip_vertical": 1}),
        expected(generator, images, {"flip_vertical": 1}),
        atol=1e-3,
    )


def test_double_precision_is_kept():
    generator = Generator(dtype="float64", rotation_range=10, rescale=1 / 255)
    (x, _) = next(iter(from_flow(generator.flow(PHOTOS, np.arange(3))).epoch(0)))
    assert x.dtype == tf.float64
