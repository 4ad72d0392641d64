"""`Mix`: MixUp and CutMix by hand and against SciPy; partners, weights and labels of both."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers.layer_checks import pictures, seeds_for

from keras_multigpu.augmentation import Mix, Sequence

# CutMix: boxes of neighbours.

COUNTED = np.arange(4 * 4 * 5 * 3, dtype="float32").reshape(4, 4, 5, 3)
NUMBERS = np.array([0, 1, 2, 0], "int32")

# They cover four of twenty pixels, all, none and one.
BOXES = [[1, 0, 3, 2], [0, 0, 5, 4], [2, 2, 2, 2], [4, 3, 5, 4]]


def pasted(**data):
    data = {"images": COUNTED, "labels": NUMBERS, **data}
    result = Mix(None, num_classes=3).apply(
        data, {"box": tf.constant(BOXES[: len(data["images"])])}
    )
    return tf.nest.map_structure(np.asarray, result)


def by_slices(images):
    """The same with NumPy's slices."""
    expected = images.copy()
    for row, (left, top, right, bottom) in enumerate(BOXES):
        expected[row, top:bottom, left:right] = images[row ^ 1, top:bottom, left:right]
    return expected


def test_pixels_and_labels_are_mixed_by_the_boxes():
    """A fifth, all, nothing and a twentieth of the labels come from the partner."""
    result = pasted()
    np.testing.assert_array_equal(result["images"], by_slices(COUNTED))
    expected = [[0.8, 0.2, 0], [1, 0, 0], [0, 0, 1], [0.95, 0, 0.05]]
    np.testing.assert_allclose(result["labels"], expected, atol=1e-7)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "bool"])
def test_masks_get_the_same_box(dtype):
    masks = (COUNTED[..., :1] % 7).astype(dtype)
    result = Mix(None).apply(
        {"images": COUNTED, "segmentation_masks": {"one": masks}}, {"box": tf.constant(BOXES)}
    )
    found = result["segmentation_masks"]["one"].numpy()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, by_slices(masks))
    np.testing.assert_array_equal(result["images"], by_slices(COUNTED))


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_any_number_of_channels_are_mixed(channels):
    images = pictures((4, 4, 5, channels))
    np.testing.assert_array_equal(pasted(images=images)["images"], by_slices(images))


def test_boxes_are_those_of_the_paper():
    """Sides have the image's proportions, the area kept follows Beta, the centre is anywhere."""
    height, width = 1000, 2000
    left, top, right, bottom = (
        Mix(None, 0.7).draw(seeds_for(20000), (height, width, 3))["box"].numpy().T
    )
    assert ((left >= 0) & (left <= right) & (right <= width)).all()
    assert ((top >= 0) & (top <= bottom) & (bottom <= height)).all()
    whole = (left > 0) & (right < width) & (top > 0) & (bottom < height)
    across, down = (right - left) / width, (bottom - top) / height
    np.testing.assert_allclose(across[whole], down[whole], atol=0.002)
    # A box of side s lies within the image with probability (1 - s)^2, which the weights undo.
    side = across[whole]
    for limit in (0.2, 0.4, 0.6):
        share = (1 / (1 - side[side < limit]) ** 2).sum() / 20000
        expected = scipy.stats.beta(0.7, 0.7).sf(1 - limit**2)
        assert share == pytest.approx(expected, rel=0.1)
    centre = ((left + right) / 2 / width)[whole & (across < 0.1)]
    assert scipy.stats.kstest((centre - 0.05) / 0.9, "uniform").statistic < 0.08


# MixUp: blends of neighbours.

LEVELS = np.array([0.0, 100, 200, 50], "float32")[:, None, None, None] * np.ones((4, 2, 3, 1))


def blended(share, **data):
    data = {"images": LEVELS, "labels": NUMBERS, **data}
    result = Mix(cut_mix=None, num_classes=3).apply(data, {"share": tf.constant(share, tf.float32)})
    return tf.nest.map_structure(np.asarray, result)


def test_pixels_and_labels_are_blended_by_their_shares():
    """Row 0 keeps a quarter of itself, row 1 half, row 2 all, row 3 nothing."""
    result = blended([0.25, 0.5, 1, 0])
    assert result["images"][:, 0, 0, 0].tolist() == [75, 50, 200, 200]
    np.testing.assert_array_equal(result["images"], result["images"][:, :1, :1] + 0 * LEVELS)
    expected = [[0.25, 0.75, 0], [0.5, 0.5, 0], [0, 0, 1], [0, 0, 1]]
    assert result["labels"].tolist() == expected
    assert result["labels"].dtype == result["images"].dtype == "float32"


def test_a_row_alone_is_not_mixed():
    images = pictures((1, 3, 3, 3))
    result = blended([0.3], images=images, labels=NUMBERS[1:2])
    np.testing.assert_array_equal(result["images"], images)
    assert result["labels"].tolist() == [[0, 1, 0]]
    alone = blended([0.3], images=images[0], labels=np.int32(2))
    np.testing.assert_array_equal(alone["images"], images[0])
    assert alone["labels"].tolist() == [0, 0, 1]


def test_bytes_are_rounded_and_half_precision_keeps_labels_exact():
    data = {"images": LEVELS.astype("uint8"), "labels": NUMBERS}
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
    result = Mix(cut_mix=None).apply({"images": LEVELS, "labels": labels}, drawn)
    assert result["labels"].numpy().tolist() == [2.5, 2, 5, 5]


# Both.

IMAGES = pictures((4, 3, 5, 1))
LABELS = np.eye(3, dtype="float32")[[0, 1, 2, 0]]
SHARE = np.array([0.25, 0.5, 0.9, 0.6], "float32")
PARTNERS = [1, 0, 3, 2]


def mixed(layer=None, **data):
    data = {"images": IMAGES, "labels": LABELS, **data}
    result = (layer or Mix(cut_mix=None)).apply(
        data, {"share": tf.constant(SHARE[: len(data["images"])])}
    )
    return tf.nest.map_structure(np.asarray, result)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, []), (1, [0]), (2, [1, 0]), (3, [1, 0, 1]), (5, [1, 0, 3, 2, 3])],
)
def test_rows_are_mixed_with_their_neighbours(count, expected):
    """Whether or not their number is known: with a share of zero each becomes its partner."""
    numbers, layer = tf.range(float(count)), Mix(cut_mix=None)

    def partners(numbers):
        data = {"images": numbers[:, None, None, None], "labels": numbers}
        return layer.apply(data, {"share": tf.zeros_like(numbers)})["labels"]

    unknown = tf.function(partners, input_signature=[tf.TensorSpec([None])])
    assert partners(numbers).numpy().tolist() == unknown(numbers).numpy().tolist() == expected


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)], ids=str)
def test_a_weighted_mixture_costs_what_both_parts_cost(axes):
    """One label with one weight costs what the two weighted labels cost by their shares."""
    weights = np.array([0.5, 2, 1, 3], "float32")
    result = mixed(sample_weights=weights.reshape(-1, *axes))
    assert result["sample_weights"].shape == (4, *axes)
    found = result["sample_weights"].reshape(4)
    np.testing.assert_allclose(found, SHARE * weights + (1 - SHARE) * weights[PARTNERS])
    np.testing.assert_allclose(result["labels"].sum(1), 1, rtol=1e-6)
    log = np.log(np.random.default_rng(0).dirichlet(np.ones(3), 4))
    cost = -(LABELS * log).sum(1)
    other = -(LABELS[PARTNERS] * log).sum(1)
    expected = SHARE * weights * cost + (1 - SHARE) * weights[PARTNERS] * other
    np.testing.assert_allclose(-found * (result["labels"] * log).sum(1), expected, rtol=1e-6)


@pytest.mark.parametrize("layer", [Mix(cut_mix=None), Mix(None)], ids=["MixUp", "CutMix"])
def test_rows_of_weight_zero_stay_apart(layer):
    """Padding is neither mixed nor mixed into examples."""
    drawn = {"share": tf.fill([4], 0.5), "box": tf.constant([[0, 0, 4, 2]] * 4)}
    data = {"images": IMAGES, "labels": LABELS, "sample_weights": np.array([2.0, 1, 1, 0], "f4")}
    result = layer.apply(data, drawn)
    for kind, values in data.items():
        np.testing.assert_array_equal(result[kind][2:], values[2:])
    assert (result["images"][:2].numpy() != IMAGES[:2]).any((1, 2, 3)).all()
    nothing = layer.apply({**data, "sample_weights": np.zeros(4, "float32")}, drawn)
    np.testing.assert_array_equal(nothing["labels"], LABELS)
    assert nothing["sample_weights"].numpy().tolist() == [0, 0, 0, 0]


def test_integer_weights_are_blended_as_floats():
    result = mixed(sample_weights=np.array([1, 3, 1, 1]))
    assert result["sample_weights"].tolist() == [2.5, 2, 1, 1]


def test_one_weight_counts_for_all_labels():
    weights = np.array([1.0, 2, 1, 1], "f4")
    labels = {"a": LABELS, "b": np.arange(4, dtype="float32")}
    result = mixed(Mix(cut_mix=None), labels=labels, sample_weights=weights)
    for name, label in labels.items():
        alone = mixed(Mix(cut_mix=None), labels=label, sample_weights=weights)
        np.testing.assert_array_equal(result["labels"][name], alone["labels"])
    with pytest.raises(ValueError, match="a sample weight of its own.*one for all labels"):
        mixed(Mix(cut_mix=None), labels=labels, sample_weights=(weights, weights))


def test_labels_masks_and_weights_are_mixed_in_a_pipeline():
    y = {"label": tf.constant(LABELS), "picture": tf.cast(IMAGES > 128, tf.uint8)}
    weight = tf.constant([1.0, 3, 1, 0])
    seeds = tf.reshape(tf.range(8), (4, 2))
    x, found, weights = Mix(None).augment_batch(tf.constant(IMAGES), y, weight, seeds, True)
    box = Mix(None).draw(seeds, (3, 5, 1))["box"].numpy()
    own = 1 - (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) / 15
    own[2:] = 1
    np.testing.assert_allclose(weights, own * [1, 3, 1, 0] + (1 - own) * [3, 1, 0, 1], rtol=1e-6)
    share = own[0] / (own[0] + 3 * (1 - own[0]))
    np.testing.assert_allclose(found["label"][0], [share, 1 - share, 0], rtol=1e-6)
    np.testing.assert_array_equal(found["picture"], x > 128)


def test_class_numbers_come_in_any_integer_form():
    expected = np.eye(2)[[0, 1, 1, 0]]
    numbers = np.array([0, 1, 1, 0])
    layer = Mix(cut_mix=None, num_classes=2)
    for labels in (numbers, numbers[:, None], numbers.astype("bool"), expected.astype("uint8")):
        result = layer({"images": IMAGES, "labels": labels}, training=False)["labels"]
        assert result.dtype == tf.float32
        np.testing.assert_array_equal(result, expected)
    doubles = mixed(labels=LABELS.astype("float64"))["labels"]
    assert doubles.dtype == "float64"
    np.testing.assert_allclose(doubles, mixed()["labels"])


def test_labels_outside_the_classes_are_named():
    layer = Mix(cut_mix=None, num_classes=2)
    message = "(?s)Some labels are not classes.*Pass a larger.*lowest and the highest.*-7.*2"
    wrong = {"images": IMAGES, "labels": np.array([0, -7, 2, 0])}
    for call in (layer, tf.function(lambda data: layer(data), autograph=False)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            call(wrong)


def test_known_shapes_stay_known():
    """A static batch size survives, for models that need one."""
    data = {
        "images": tf.zeros([4, 3, 5, 1]),
        "labels": tf.zeros([4], tf.int32),
        "sample_weights": tf.ones([4]),
    }
    layer = Mix(None, num_classes=3)
    dataset = tf.data.Dataset.from_tensors(data).map(lambda data: layer(data))
    shapes = {kind: spec.shape for kind, spec in dataset.element_spec.items()}
    assert shapes == {"images": (4, 3, 5, 1), "labels": (4, 3), "sample_weights": (4,)}


def test_a_sequence_mixes_one_after_the_other():
    layer = Sequence([Mix(1.0, None, num_classes=3), Mix(None, num_classes=3)], seed=1)
    data = {"images": IMAGES, "labels": np.array([0, 1, 2, 0])}
    seeds = tf.reshape(tf.range(8), (4, 2))
    result = layer.apply(data, layer.draw(seeds, (3, 5, 1)))
    np.testing.assert_allclose(result["labels"].numpy().sum(1), 1, rtol=1e-6)
    assert (result["images"].numpy() != IMAGES).any()
    np.testing.assert_array_equal(layer.at_inference(data)["labels"], LABELS)


@pytest.mark.parametrize(
    "layer", [Mix(cut_mix=None, num_classes=3), Mix(None, num_classes=3)], ids=type
)
def test_at_inference_labels_become_one_hot_and_nothing_is_mixed(layer):
    """Validation needs one-hot labels, too; images may come without labels."""
    data = {"images": IMAGES, "labels": np.array([0, 1, 2, 0])}
    result = layer(data, training=False)
    np.testing.assert_array_equal(result["images"], IMAGES)
    np.testing.assert_array_equal(result["labels"], LABELS)
    np.testing.assert_array_equal(layer(IMAGES, training=False), IMAGES)


SHAPE = (32, 32, 3)


def drawn():
    """Shares, and how much of the image the box covers, of 4000 images."""
    found = Mix().draw(seeds_for(4000), SHAPE)
    left, top, right, bottom = found["box"].numpy().T
    return found["share"].numpy(), (right - left) * (bottom - top) / 32**2


def test_each_image_is_mixed_in_one_way():
    share, covered = drawn()
    blended, pasted = share < 1, covered > 0
    assert not (blended & pasted).any()
    assert blended.mean() == pytest.approx(0.5, abs=0.03)
    assert pasted.mean() == pytest.approx(0.5, abs=0.03)


def test_each_way_gives_what_its_own_layer_gives():
    images, labels = pictures((6, 5, 4, 3)), np.eye(6, dtype="float32")
    data = {"images": images, "labels": labels}
    share = np.array([0.3, 0.8, 1, 1, 1, 1], "float32")
    box = np.array([[0] * 4, [0] * 4, [1, 1, 3, 4], [0, 0, 4, 1], [0] * 4, [0] * 4], "int32")
    both = Mix().apply(data, {"share": tf.constant(share), "box": tf.constant(box)})
    blended = Mix(cut_mix=None).apply(data, {"share": tf.constant(share)})
    pasted = Mix(None).apply(data, {"box": tf.constant(box)})
    for kind in data:
        np.testing.assert_array_equal(both[kind][:2], blended[kind][:2])
        np.testing.assert_array_equal(both[kind][2:4], pasted[kind][2:4])
        np.testing.assert_array_equal(both[kind][4:], data[kind][4:])
