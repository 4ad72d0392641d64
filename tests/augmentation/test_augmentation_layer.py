"""`AugmentationLayer`: what layers inherit, tested with a layer as users would write it.

It is a row of `test_all_layers.py`, too.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.augmentation import Draws


@keras.saving.register_keras_serializable("tests")
class Shifted(kmg.augmentation.AugmentationLayer):
    """Adds a number to each image, and moves boxes and masks by one pixel to the right."""

    def draw(self, seeds, shape):
        return {"level": Draws(seeds).uniform(1.0, 50.0)}

    def change_images(self, images, drawn):
        return images + drawn["level"][:, None, None, None]

    def change_boxes(self, boxes, drawn, shape):
        return boxes + [1.0, 0.0, 1.0, 0.0]

    def change_masks(self, masks, drawn):
        return tf.roll(masks, 1, axis=2)


IMAGES = np.full((4, 5, 6, 3), 100, np.uint8)
BOXES = {
    "boxes": np.array([[[1, 1, 3, 3], [5, 0, 6, 2]]] * 4, np.float32),
    "labels": np.ones((4, 2)),
}


def levels(images):
    images = np.asarray(images, np.float32)
    assert (images == images[:, :1, :1, :1]).all()
    return images[:, 0, 0, 0] - 100


def test_a_layer_can_ask_where_it_runs():
    """In a pipeline Python may run, in a model it may not; a later call is not in the pipeline."""
    asked = []

    class Asking(Shifted):
        def change_images(self, images, drawn):
            asked.append(self.on_host)
            return images

    layer = Asking()
    layer.augment_batch(tf.constant(IMAGES), None, None, tf.zeros([4, 2], tf.int32), training=True)
    layer(IMAGES)
    assert asked == [True, False]


def test_known_draws_are_applied():
    drawn = {"level": tf.constant([1.0, 2.0, 3.0, 4.0])}
    np.testing.assert_array_equal(levels(Shifted().apply(IMAGES, drawn)), [1, 2, 3, 4])


def test_inputs_keep_their_precision_in_mixed_precision():
    """float16 cannot hold 255.4: the draw is added before anything is rounded."""
    images = np.full((1, 2, 2, 1), 255.4, np.float32)
    layer = Shifted(dtype="mixed_float16")
    result = layer.apply(images, {"level": tf.constant([-255.0])})
    np.testing.assert_allclose(result, 0.4, atol=1e-3)
    assert layer(images).dtype == "float16"


def test_targets_follow_and_other_keys_pass():
    masks = np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6, 1)
    data = {
        "images": IMAGES,
        "labels": np.arange(4),
        "bounding_boxes": BOXES,
        "segmentation_masks": masks,
        "file": np.array(["a", "b", "c", "d"]),
    }
    changed = Shifted(bounding_box_format="xyxy")(data)
    np.testing.assert_array_equal(changed["labels"], np.arange(4))
    np.testing.assert_array_equal(changed["segmentation_masks"], np.roll(masks, 1, axis=2))
    np.testing.assert_array_equal(changed["file"].numpy(), [b"a", b"b", b"c", b"d"])
    # The second box has left the image.
    boxes = changed["bounding_boxes"]
    np.testing.assert_array_equal(boxes["boxes"][0, 0], [2, 1, 4, 3])
    np.testing.assert_array_equal(boxes["labels"][0], [1, -1])


def test_boxes_come_back_in_the_format_they_had():
    """Relative boxes with width and height, moved by one pixel of six."""
    boxes = {"boxes": np.array([[[0.5, 0.2, 1 / 3, 0.4]]]), "labels": np.ones((1, 1))}
    layer = Shifted(bounding_box_format="rel_xywh")
    moved = layer({"images": IMAGES[:1], "bounding_boxes": boxes})["bounding_boxes"]["boxes"]
    np.testing.assert_allclose(moved[0, 0], [4 / 6, 0.2, 1 / 3, 0.4], rtol=1e-5)


def test_boxes_may_have_classes_in_place_of_labels():
    boxes = {"boxes": BOXES["boxes"], "classes": BOXES["labels"], "confidence": np.ones((4, 2))}
    data = {"images": IMAGES, "bounding_boxes": boxes}
    changed = Shifted(bounding_box_format="xyxy")(data)["bounding_boxes"]
    assert set(changed) == {"boxes", "classes", "confidence"}
    np.testing.assert_array_equal(changed["classes"][0], [1, -1])


def test_masks_need_no_channels():
    masks = np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6)
    changed = Shifted()({"images": IMAGES, "segmentation_masks": masks})
    np.testing.assert_array_equal(changed["segmentation_masks"], np.roll(masks, 1, axis=2))
    one = Shifted()({"images": IMAGES[0], "segmentation_masks": masks[0]})
    np.testing.assert_array_equal(one["segmentation_masks"], np.roll(masks[0], 1, axis=1))


def test_masks_of_another_size_are_refused_in_a_graph():
    data = {"images": IMAGES, "segmentation_masks": np.zeros((4, 5, 5, 1), np.uint8)}
    specs = {
        "images": tf.TensorSpec([None, None, None, 3], tf.uint8),
        "segmentation_masks": tf.TensorSpec([None, None, None, 1], tf.uint8),
    }
    change = tf.function(Shifted(), input_signature=[specs], autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mask has another size"):
        change(data)


def test_a_custom_layer_names_its_arguments_in_settings():
    class Stronger(Shifted):
        settings = ("strength",)

        def __init__(self, strength, **kwargs):
            super().__init__(**kwargs)
            self.strength = strength

    config = Stronger(3, seed=7).get_config()
    assert (config["strength"], config["seed"]) == (3, 7)


SEEDS = tf.constant([[1, 2], [3, 4], [1, 2], [5, 6]])
LABELS = tf.constant([1, 2, 3, 4])
MASKS = tf.constant(np.arange(120, dtype=np.uint8).reshape(4, 5, 6, 1))
PLAIN = tf.nest.map_structure(tf.constant, BOXES)


def in_pipeline(x, y=None, weight=None, training=True):
    names = {path[-1] for path, _ in keras.tree.flatten_with_path((x, y))}
    layer = Shifted(bounding_box_format="xyxy" if "boxes" in names else None)
    return layer.augment_batch(x, y, weight, SEEDS, training=training)


def test_batches_of_a_pipeline_are_changed_by_their_seeds_alone():
    weight, other = tf.constant([1.0, 0.5, 1, 2]), tf.ones([4, 3])
    (vector, x), y, w = in_pipeline((other, tf.constant(IMAGES)), LABELS, weight)
    changes = levels(x)
    assert changes[0] == changes[2] and len(np.unique(changes)) == 3
    assert vector is other and y is LABELS and w is weight
    x, y, w = in_pipeline(tf.constant(IMAGES), training=False)
    np.testing.assert_array_equal(levels(x), 0)
    assert y is None and w is None


@pytest.mark.parametrize(
    "y",
    [
        LABELS,
        tf.zeros([4, 10]),
        tf.zeros([4, 7, 5]),
        MASKS,
        MASKS[..., 0],
        (LABELS, MASKS[..., 0]),
        {"class": LABELS, "mask": MASKS},
        PLAIN,
        (LABELS, PLAIN),
        {"bounding_boxes": PLAIN, "labels": LABELS},
        [{"a": (LABELS, PLAIN), "b": MASKS}],
    ],
    ids=str,
)
def test_targets_are_recognized_by_names_and_shapes(y):
    """Masks and boxes move by a pixel, in any structure; whatever else there is stays."""
    _, found, _ = in_pipeline(tf.constant(IMAGES), y)
    tf.nest.assert_same_structure(found, y)
    for path, leaf in keras.tree.flatten_with_path(y):
        changed = dict(keras.tree.flatten_with_path(found))[path]
        if leaf.shape[1:3] == (5, 6):
            leaf = tf.roll(leaf, 1, axis=2)
        elif path and path[-1] == "boxes":
            leaf = tf.minimum(leaf + [1.0, 0, 1, 0], 6)
        elif leaf.shape == (4, 2):  # Labels of boxes, of which the second has left the image.
            leaf = tf.constant([[1.0, -1]] * 4)
        np.testing.assert_array_equal(changed, leaf)


@pytest.mark.parametrize("y", [None, LABELS], ids=["alone", "with labels"])
def test_targets_among_the_inputs_follow(y):
    """A dictionary as keras-cv's layers take it; images are found by their name."""
    x = {"bounding_boxes": PLAIN, "segmentation_masks": MASKS, "depth": tf.ones([4, 5, 6, 1])}
    changed, found, _ = in_pipeline({**x, "images": tf.constant(IMAGES)}, y)
    assert changed["depth"] is x["depth"] and found is y
    assert (levels(changed["images"]) > 0).all()
    np.testing.assert_array_equal(changed["segmentation_masks"], tf.roll(MASKS, 1, axis=2))
    np.testing.assert_array_equal(changed["bounding_boxes"]["boxes"][0, 0], [2, 1, 4, 3])


def test_replicas_of_a_plain_strategy_draw_differently():
    """Even in a user's own loop, where nothing else makes replicas differ."""
    strategy = kmg.strategy(devices=2)
    with strategy.scope():
        layer = Shifted(seed=1)

    @tf.function
    def draw():
        return strategy.run(lambda: layer(IMAGES))

    first, second = (levels(images) for images in strategy.experimental_local_results(draw()))
    assert len(np.unique([*first, *second])) == 8
