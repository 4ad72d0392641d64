"""Flows give the pixels that `ImageDataGenerator` gives."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.data import from_flow
from keras_multigpu.data.pipeline.order import draw_seeds
from keras_multigpu.data.sources.flows import UNMOVED
from keras_multigpu.keras_internals.flow_internals import drawn_transform

cv2 = pytest.importorskip("cv2")
photographs = pytest.importorskip("skimage.data")
Generator = tf.keras.preprocessing.image.ImageDataGenerator  # noqa: TID251

# Keras 3.15 calls SciPy's `affine_transform` by a name that SciPy is going to remove.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Please import `affine_transform` from the `scipy.ndimage` namespace:DeprecationWarning"
)

# scikit-image's photographs, with unequal sides so that swapped axes show.
PHOTOS = np.stack(
    [
        cv2.resize(getattr(photographs, name)(), (160, 128), interpolation=cv2.INTER_AREA)
        for name in ("astronaut", "coffee", "chelsea")
    ]
).astype(np.float32)

ONE_PARAMETER = [
    {"theta": -120.0},
    {"tx": 11.7},
    {"ty": -7.0},
    {"shear": 12.0},
    {"zx": 0.7},
    {"zx": 1.9, "zy": 2.3},
    {"flip_horizontal": 1},
]
COLORS = [
    {"channel_shift_intensity": -80.0},
    {"brightness": 1.7},
]
COMBINATIONS = [
    {"theta": 38.0, "tx": 25.6, "ty": -16.2, "zx": 0.8, "zy": 1.2, "flip_horizontal": 1},
    {"theta": -9.0, "shear": 8.0, "tx": 3.3, "flip_vertical": 1, "brightness": 1.3},
    {"zx": 1.5, "zy": 1.5, "channel_shift_intensity": 25.0, "brightness": 0.6},
]


def changed(generator, images, parameters):
    source = from_flow(generator.flow(images)).reading().source
    both = {**UNMOVED, **parameters}
    return np.stack([source.change_image(image.copy(), both) for image in images])


def expected(generator, images, parameters):
    every = {**UNMOVED, **parameters}
    return np.stack(
        [generator.standardize(generator.apply_transform(image.copy(), every)) for image in images]
    )


def assert_close(actual, wanted):
    """The bound that the documentation promises for each image."""
    for one, other in zip(actual, wanted, strict=True):
        difference = np.abs(one - other)
        assert difference.mean() <= 1
        assert np.percentile(difference, 99) <= 3


@pytest.mark.parametrize("fill_mode", ["nearest", "constant", "reflect", "wrap"])
@pytest.mark.parametrize("parameters", ONE_PARAMETER + COMBINATIONS, ids=str)
def test_pixels_are_those_of_the_generator(parameters, fill_mode):
    generator = Generator(fill_mode=fill_mode, cval=90.5)
    assert_close(changed(generator, PHOTOS, parameters), expected(generator, PHOTOS, parameters))


def in_place(image):
    image /= 3
    return image


SMALL = np.stack([cv2.resize(photo, (16, 12)) for photo in PHOTOS])
ALPHA = np.concatenate([PHOTOS, PHOTOS[..., :1]], axis=-1)
MOVED = {"theta": 21.0, "tx": 4.4, "flip_horizontal": 1}
CHANGES = [
    *((images, {}, color) for color in COLORS for images in (ALPHA[..., :1], PHOTOS, ALPHA)),
    (PHOTOS, {"samplewise_center": True, "samplewise_std_normalization": True}, MOVED),
    (PHOTOS, {"featurewise_center": True, "featurewise_std_normalization": True}, MOVED),
    (PHOTOS, {"preprocessing_function": in_place, "rescale": 0.5}, MOVED),
    (PHOTOS, {"rescale": 1 / 255, "interpolation_order": 0}, MOVED),
    (SMALL, {"zca_whitening": True, "featurewise_center": True}, {"flip_vertical": 1}),
]


@pytest.mark.parametrize(("images", "arguments", "parameters"), CHANGES, ids=str)
def test_colors_and_standardized_pixels_are_those_of_the_generator(images, arguments, parameters):
    """Exactly, unless OpenCV moves the image."""
    generator = Generator(**arguments)
    generator.fit(images)
    found, wanted = (each(generator, images, parameters) for each in (changed, expected))
    if parameters is MOVED and "interpolation_order" not in arguments:
        scale = np.ptp(expected(generator, images, {})) / 255
        assert_close(found / scale, wanted / scale)
    else:
        np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_the_dtype_comes_from_the_flow(dtype):
    generator = Generator(dtype=dtype, rotation_range=10, rescale=1 / 255)
    (x, _) = next(iter(from_flow(generator.flow(PHOTOS, np.arange(3))).epoch(0)))
    assert x.dtype == dtype


def drawn(generator, shape=(200, 100, 3), count=300):
    seeds = draw_seeds(5, 0, np.arange(count), np.zeros(count, int))
    every = [drawn_transform(generator, shape, one) for one in seeds]
    return {name: np.array([one[name] for one in every]) for name in every[0]}


@pytest.mark.parametrize(
    ("arguments", "name", "low", "high"),
    [
        ({"rotation_range": 40}, "theta", -40, 40),
        ({"shear_range": 0.3}, "shear", -0.3, 0.3),
        ({"zoom_range": 0.2}, "zx", 0.8, 1.2),
        ({"height_shift_range": 0.1}, "tx", -20, 20),
        ({"width_shift_range": 12.5}, "ty", -12.5, 12.5),
        ({"channel_shift_range": 30}, "channel_shift_intensity", -30, 30),
        ({"brightness_range": (0.2, 1.5)}, "brightness", 0.2, 1.5),
    ],
)
def test_parameters_are_drawn_from_the_ranges_of_the_generator(arguments, name, low, high):
    """By Keras's own method, from the seeds of each image; other parameters are not drawn."""
    found = drawn(Generator(**arguments))
    values = found.pop(name)
    assert low <= values.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < values.max() <= high
    for other, still in UNMOVED.items():
        if other not in (name, "zy"):
            assert (found[other] == still).all()


def test_half_of_the_images_are_flipped():
    found = drawn(Generator(horizontal_flip=True, vertical_flip=True), count=2000)
    assert abs(found["flip_horizontal"].mean() - 0.5) < 0.05
    assert abs((found["flip_horizontal"] * found["flip_vertical"]).mean() - 0.25) < 0.05
