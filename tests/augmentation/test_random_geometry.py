"""`RandomGeometry`: each argument does what Keras's layer does, and all work in one step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import GEOMETRY
from scipy import ndimage

from keras_multigpu.augmentation import RandomGeometry

RANDOM = np.random.default_rng(1)
IMAGES = np.round(ndimage.gaussian_filter(RANDOM.uniform(0, 255, (4, 12, 17, 3)), (0, 1, 1, 0)))
IMAGES = IMAGES.astype(np.float32)
SHAPE = (12, 17, 3)
SEEDS = tf.constant(RANDOM.integers(0, 2**31, (2000, 2)), tf.int32)
FOUR = SEEDS[:4]
LAYERS = keras.layers
EVERYTHING = {**GEOMETRY, "crop": (8, 9), "size": (10, 7)}


def keras_pixels(layer, transformation, images=IMAGES):
    return layer.transform_images(tf.constant(images), transformation, training=True)


def keras_rotation(drawn, images=IMAGES, **settings):
    """`RandomRotation` by the angles that were drawn, through Keras's own transformation."""
    results = []
    for angle, image in zip(drawn["rotation"].numpy() / 360, images, strict=True):
        layer = LAYERS.RandomRotation((angle, angle), **settings)
        results.append(layer(image[None], training=True)[0])
    return tf.stack(results)


def keras_translation(drawn, images=IMAGES, **settings):
    pixels = tf.stack([drawn["width_translation"] * 17, drawn["height_translation"] * 12], axis=1)
    layer = LAYERS.RandomTranslation(0.1, 0.1, **settings)
    return keras_pixels(layer, {"translations": pixels}, images)


def keras_zoom(drawn, images=IMAGES, **settings):
    zooms = {name: 1 + drawn[name][:, None] for name in ("width_zoom", "height_zoom")}
    return keras_pixels(LAYERS.RandomZoom(0.1, **settings), zooms, images)


def keras_shear(drawn, images=IMAGES, **settings):
    factors = tf.stack([drawn["x_shear"], drawn["y_shear"]], axis=1)
    return keras_pixels(LAYERS.RandomShear(0.1, **settings), {"shear_factor": factors}, images)


@pytest.mark.parametrize("fill_mode", ["reflect", "constant", "wrap", "nearest"])
@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("rotation", keras_rotation),
        ("translation", keras_translation),
        ("zoom", keras_zoom),
        ("shear", keras_shear),
    ],
)
def test_each_argument_alone_equals_the_keras_layer(name, peer, fill_mode):
    settings = {"fill_mode": fill_mode, "fill_value": 9.0}
    layer = RandomGeometry(**{name: 0.3 if name != "zoom" else (0.3, 0.2)}, **settings)
    drawn = layer.draw(FOUR, SHAPE)
    expected = peer(drawn, **settings)
    np.testing.assert_allclose(layer.apply(IMAGES, drawn).numpy(), expected, atol=0.02)


@pytest.mark.parametrize(
    ("interpolation", "size"), [("bilinear", (12, 17)), ("bilinear", (1, 7)), ("nearest", (9, 1))]
)
@pytest.mark.parametrize("fill_mode", ["reflect", "constant", "wrap", "nearest"])
def test_graphs_have_the_pixels_of_keras_s_own_operation(fill_mode, interpolation, size):
    """Far beyond the image, too, and where the only pixel along an axis is its own mirror."""
    settings = {"fill_mode": fill_mode, "fill_value": 7.0, "interpolation": interpolation}
    layer = RandomGeometry(translation=1.0, rotation=1.0, zoom=0.9, shear=1.0, **settings)
    images = IMAGES[:, : size[0], : size[1]]
    drawn = layer.draw(FOUR, images.shape[1:])
    # Outside a graph TensorFlow's operation does the work.
    expected = layer.apply(images, drawn)
    compiled = tf.function(lambda: layer.apply(images, drawn), autograph=False)()
    np.testing.assert_allclose(compiled, expected, atol=0.02)


def test_nearest_interpolation_equals_the_keras_layer():
    """For zoom, where few positions lie halfway between two pixels."""
    layer = RandomGeometry(zoom=0.3, interpolation="nearest")
    drawn = layer.draw(FOUR, SHAPE)
    expected = keras_zoom(drawn, interpolation="nearest")
    np.testing.assert_array_equal(layer.apply(IMAGES, drawn), expected)


@pytest.mark.parametrize("flip", ["horizontal", "vertical", "horizontal_and_vertical"])
def test_flips_copy_pixels(flip):
    layer = RandomGeometry(flip=flip)
    drawn = layer.draw(SEEDS[:4], SHAPE)
    result = layer.apply(IMAGES, drawn).numpy()
    nothing = np.zeros(4, bool)
    horizontal = np.asarray(drawn.get("flip_horizontal", nothing))
    vertical = np.asarray(drawn.get("flip_vertical", nothing))
    for image, old, across, down in zip(result, IMAGES, horizontal, vertical, strict=True):
        old = old[:, ::-1] if across else old
        np.testing.assert_array_equal(image, old[::-1] if down else old)


def test_each_image_is_cropped_at_its_own_place():
    layer = RandomGeometry(flip="horizontal", crop=(5, 6))
    drawn = layer.draw(FOUR, SHAPE)
    result = layer.apply(IMAGES, drawn).numpy()
    places = drawn["crop_top"], drawn["crop_left"]
    places = [(int(top), int(left)) for top, left in zip(*places, strict=True)]
    assert len(set(places)) == 4
    for number, (top, left) in enumerate(places):
        old = IMAGES[number, :, ::-1] if drawn["flip_horizontal"][number] else IMAGES[number]
        np.testing.assert_array_equal(result[number], old[top : top + 5, left : left + 6])


def test_steps_are_applied_in_the_order_of_the_keras_stack():
    """On a smooth image, where interpolating five times differs little from once."""
    y, x = np.mgrid[:12, :17]
    smooth = np.float32(np.stack([x + 3 * y, 5 * x, 200 - 4 * y], axis=-1))[None].repeat(4, 0)
    settings = {"flip": "horizontal", "rotation": 0.1, "translation": 0.1}
    layer = RandomGeometry(**settings, zoom=((-0.3, 0), None), shear=0.1, fill_mode="nearest")
    drawn = layer.draw(FOUR, SHAPE)
    stack = tf.where(drawn["flip_horizontal"][:, None, None, None], smooth[:, :, ::-1], smooth)
    for step in (keras_rotation, keras_translation, keras_zoom, keras_shear):
        stack = step(drawn, stack, fill_mode="nearest")
    inner = layer.apply(smooth, drawn)[:, 4:8, 6:11]
    np.testing.assert_allclose(inner, stack[:, 4:8, 6:11], atol=1e-2)


def test_all_steps_together_read_pixels_once():
    """Against SciPy's interpolation through the product of the maps, with a crop to a size."""
    layer = RandomGeometry(**EVERYTHING)
    drawn = layer.draw(FOUR, SHAPE)
    result = layer.apply(IMAGES, drawn).numpy()
    matrices = layer.matrices(drawn, SHAPE, 4).numpy()
    y, x = np.mgrid[:10, :7]
    for image, old, matrix in zip(result, IMAGES, matrices, strict=True):
        columns, rows = np.einsum("ij,j...->i...", matrix, [x, y, np.ones_like(x)])
        for channel in range(3):
            expected = ndimage.map_coordinates(old[..., channel], [rows, columns], order=1)
            inside = (rows > 0) & (rows < 11) & (columns > 0) & (columns < 16)
            assert inside.sum() > 20
            np.testing.assert_allclose(image[inside, channel], expected[inside], atol=0.02)


def test_a_window_is_cut_out_and_resized():
    layer = RandomGeometry(crop_area=(0.3, 0.3), size=(8, 10), aspect_ratio=(1, 1))
    window = {"crop_top": 3.0, "crop_left": 4.0, "crop_height": 4.0, "crop_width": 5.0}
    drawn = {name: tf.fill([4], value) for name, value in window.items()}
    expected = tf.image.resize(IMAGES[:, 3:7, 4:9], (8, 10))
    np.testing.assert_allclose(
        layer.apply(IMAGES, drawn).numpy()[:, 1:-1, 1:-1], expected[:, 1:-1, 1:-1], atol=0.02
    )


def test_the_size_alone_resizes_the_whole_image():
    """In training and at inference, like `keras.layers.Resizing`; no border gets the fill value."""
    layer = RandomGeometry(size=(20, 9), fill_mode="constant")
    expected = LAYERS.Resizing(20, 9)(IMAGES)
    np.testing.assert_allclose(layer(IMAGES, training=True), expected, atol=0.02)
    np.testing.assert_allclose(layer(IMAGES, training=False), expected, atol=0.02)


def test_draws_lie_in_their_ranges_and_fill_them():
    layer = RandomGeometry(
        rotation=(-0.1, 0.2), translation=(0.1, (0, 0.3)), zoom=0.4, shear=((0.1, 0.2), 0.3)
    )
    drawn = {name: value.numpy() for name, value in layer.draw(SEEDS, SHAPE).items()}
    ranges = {
        "rotation": (-36, 72),
        "height_translation": (-0.1, 0.1),
        "width_translation": (0, 0.3),
        "height_zoom": (-0.4, 0.4),
        "y_shear": (-0.3, 0.3),
    }
    for name, (low, high) in ranges.items():
        shares = (drawn[name] - low) / (high - low)
        assert 0 <= shares.min() < 0.01 < 0.99 < shares.max() <= 1
        assert abs(shares.mean() - 0.5) < 0.03
        assert abs(shares.std() - 12**-0.5) < 0.02
    np.testing.assert_array_equal(drawn["width_zoom"], drawn["height_zoom"])
    sizes = np.abs(drawn["x_shear"])
    assert 0.1 <= sizes.min() < 0.102 < 0.198 < sizes.max() <= 0.2
    assert abs((drawn["x_shear"] > 0).mean() - 0.5) < 0.04
    np.testing.assert_array_equal(drawn["x_shear"] > 0, drawn["y_shear"] > 0)


def test_the_two_flips_are_drawn_independently():
    drawn = RandomGeometry(flip="horizontal_and_vertical").draw(SEEDS, SHAPE)
    across, down = np.asarray(drawn["flip_horizontal"]), np.asarray(drawn["flip_vertical"])
    assert abs(across.mean() - 0.5) < 0.04
    assert abs(down.mean() - 0.5) < 0.04
    assert abs((across & down).mean() - 0.25) < 0.04


def test_crops_reach_every_place_equally_often():
    drawn = RandomGeometry(crop=(10, 17)).draw(SEEDS, SHAPE)
    np.testing.assert_array_equal(drawn["crop_left"], np.zeros(2000))
    counts = np.bincount(drawn["crop_top"].numpy().astype(int))
    assert len(counts) == 3
    assert abs(counts / 2000 - 1 / 3).max() < 0.04


def test_windows_have_the_areas_and_aspect_ratios_asked_for():
    """And lie inside the image; the area and the logarithm of the aspect ratio are uniform."""
    layer = RandomGeometry(crop_area=(0.1, 0.4), aspect_ratio=(0.5, 2), size=(6, 6))
    drawn = {name: value.numpy() for name, value in layer.draw(SEEDS, (24, 24, 3)).items()}
    height, width = drawn["crop_height"], drawn["crop_width"]
    area, ratio = height * width / 24**2, width / height
    np.testing.assert_allclose([area.min(), area.max()], [0.1, 0.4], atol=0.002)
    np.testing.assert_allclose([ratio.min(), ratio.max()], [0.5, 2], atol=0.01)
    assert abs(area.mean() - 0.25) < 0.01
    assert abs(np.log(ratio).mean()) < 0.04
    assert (drawn["crop_top"] >= 0).all()
    assert (drawn["crop_top"] + height <= 24.001).all()
    assert (drawn["crop_left"] + width <= 24.001).all()


def test_an_aspect_ratio_of_one_does_not_distort():
    layer = RandomGeometry(crop_area=(0.5, 1), size=(6, 6))
    drawn = layer.draw(FOUR, SHAPE)
    np.testing.assert_allclose(drawn["crop_height"], drawn["crop_width"], rtol=1e-5)
    assert np.max(drawn["crop_height"]) <= 12.001
    drawn = RandomGeometry(crop_area=(1, 1)).draw(FOUR, SHAPE)
    np.testing.assert_allclose(drawn["crop_height"], [12] * 4, rtol=1e-5)
    np.testing.assert_allclose(drawn["crop_width"], [17] * 4, rtol=1e-5)


def test_images_smaller_than_the_crop_are_enlarged():
    """As in Keras: 12 rows and 6 columns from the middle, made 20 by 10."""
    layer = RandomGeometry(crop=(20, 10))
    drawn = layer.draw(FOUR, SHAPE)
    np.testing.assert_allclose(drawn["crop_height"], [12] * 4, rtol=1e-5)
    np.testing.assert_allclose(drawn["crop_left"], [5.5] * 4, rtol=1e-5)
    assert layer(IMAGES, training=True).shape == (4, 20, 10, 3)
    assert layer(IMAGES, training=False).shape == (4, 20, 10, 3)


def test_at_inference_images_come_from_the_middle():
    still = RandomGeometry(crop=(6, 7), rotation=0.5)(IMAGES, training=False)
    np.testing.assert_array_equal(still, IMAGES[:, 3:9, 5:12])
    layer = RandomGeometry(crop_area=(0.1, 1), size=(12, 12), flip="vertical")
    np.testing.assert_allclose(layer(IMAGES, training=False), IMAGES[:, :, 2:14], atol=1e-3)
    nothing = RandomGeometry(flip="horizontal", rotation=0.5, crop_area=(0.1, 0.2))
    np.testing.assert_array_equal(nothing(IMAGES, training=False), IMAGES)


@pytest.mark.parametrize("name", ["rotation", "translation", "zoom", "shear"])
def test_masks_are_filled_and_read_as_keras_does(name):
    masks = RANDOM.integers(0, 9, (4, 12, 17, 1)).astype(np.int32)
    layer = RandomGeometry(**{name: 0.2})
    drawn = layer.draw(FOUR, SHAPE)
    peer = globals()[f"keras_{name}"]
    expected = peer(drawn, masks.astype(np.float32), interpolation="nearest")
    changed = layer.apply({"images": IMAGES, "segmentation_masks": masks}, drawn)
    assert changed["segmentation_masks"].dtype == tf.int32
    # Halfway between two pixels, rounding may differ.
    assert (changed["segmentation_masks"] == tf.cast(expected, tf.int32)).numpy().mean() > 0.995


def test_boxes_still_hold_their_objects():
    images = np.zeros((4, 64, 64, 1), np.float32)
    images[:, 20:36, 24:44] = 1
    layer = RandomGeometry(
        bounding_box_format="xyxy",
        flip="horizontal",
        rotation=0.1,
        translation=0.1,
        zoom=0.1,
        fill_mode="constant",
        size=(48, 80),
    )
    boxes = {"boxes": np.float32([[[24, 20, 44, 36]]] * 4), "labels": np.ones((4, 1))}
    drawn = layer.draw(FOUR, (64, 64, 1))
    changed = layer.apply({"images": images, "bounding_boxes": boxes}, drawn)
    for image, box in zip(changed["images"], changed["bounding_boxes"]["boxes"], strict=True):
        rows, columns, _ = np.nonzero(image.numpy() > 0.3)
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(box[0], found, atol=1.6)


def test_boxes_of_flips_and_crops_are_exact():
    layer = RandomGeometry(bounding_box_format="xyxy", flip="horizontal", crop=(5, 6))
    drawn = {
        "flip_horizontal": tf.constant([True]),
        "crop_top": tf.constant([2.0]),
        "crop_left": tf.constant([4.0]),
    }
    boxes = {"boxes": np.float32([[[8, 3, 12, 5], [0, 0, 2, 2]]]), "labels": [[1.0, 2.0]]}
    changed = layer.apply({"images": IMAGES[:1], "bounding_boxes": boxes}, drawn)
    np.testing.assert_allclose(changed["bounding_boxes"]["boxes"][0, 0], [1, 1, 5, 3], atol=1e-5)
    np.testing.assert_array_equal(changed["bounding_boxes"]["labels"], [[1, -1]])


def test_only_the_label_marks_padding_as_in_keras():
    """Keras moves and clips padding like other boxes."""
    boxes = {"boxes": np.full((1, 1, 4), -1, np.float32), "labels": np.array([[-1]])}
    data = {"images": IMAGES[:1], "bounding_boxes": boxes}
    layer = RandomGeometry(bounding_box_format="xyxy", flip="horizontal")
    ours = layer.apply(data, {"flip_horizontal": tf.constant([True])})["bounding_boxes"]
    width = IMAGES.shape[2]
    assert ours["boxes"].numpy().tolist() == [[[width, 0, width, 0]]]
    assert ours["labels"].numpy().tolist() == [[-1]]
    keras.utils.set_random_seed(1)
    flip = keras.layers.RandomFlip("horizontal", bounding_box_format="xyxy")
    data = keras.tree.map_structure(tf.constant, data)
    of_keras = [flip(dict(data), training=True)["bounding_boxes"] for _ in range(16)]
    places = np.array([found["boxes"][0, 0] for found in of_keras])
    assert places.min() == 0 and places.max() > width - 1
    assert {int(found["labels"][0, 0]) for found in of_keras} == {-1}


def test_boxes_of_an_image_sheared_flat_are_finite():
    """Such a map has no inverse."""
    layer = RandomGeometry(bounding_box_format="xyxy", shear=1)
    boxes = {"boxes": np.float32([[[8, 3, 12, 5]]]), "labels": [[1.0]]}
    drawn = {name: tf.ones(1) for name in ("x_shear", "y_shear")}
    changed = layer.apply({"images": IMAGES[:1], "bounding_boxes": boxes}, drawn)
    assert np.isfinite(changed["bounding_boxes"]["boxes"]).all()


@pytest.mark.parametrize("channels", [1, 4])
def test_every_channel_is_moved_alike(channels):
    layer = RandomGeometry(rotation=0.2, size=(9, 9))
    drawn = layer.draw(FOUR, SHAPE)
    one = layer.apply(IMAGES[..., :1], drawn)
    result = layer.apply(IMAGES[..., :1].repeat(channels, -1), drawn)
    np.testing.assert_array_equal(result, np.repeat(one, channels, -1))


def test_without_arguments_nothing_changes():
    layer = RandomGeometry()
    assert layer.draw(FOUR, SHAPE) == {}
    np.testing.assert_array_equal(layer(IMAGES, training=True), IMAGES)
    matrices = layer.matrices({}, SHAPE, 2)
    np.testing.assert_array_equal(matrices, [[[1, 0, 0], [0, 1, 0]]] * 2)
