"""What wrapped layers of Keras and keras-cv promise, and how tests check it."""

import keras
import numpy as np
import tensorflow as tf

HEIGHT, WIDTH = 32, 48


def pictures(count):
    """Dark images with a bright rectangle, its mask of sevens, and its box."""
    images = np.full((count, HEIGHT, WIDTH, 3), 20, np.float32)
    images[:, 12:20, 18:28] = 200
    masks = np.where(images[..., :1] > 100, 7, 0).astype(np.int32)
    boxes = np.tile(np.array([[18, 12, 28, 20]], np.float32), (count, 1, 1))
    return images, masks, boxes


def bright(images):
    """Which pixels belong to the rectangle, wherever it is now."""
    return images[..., 0] > (images.min() + images.max()) / 2


def changed_alone_and_together(layer, data):
    """Three examples as a layer changes them in a pipeline; each has its own draws."""

    @tf.function(autograph=False)
    def run(data, seeds):
        return layer.apply(data, layer.draw(seeds, (HEIGHT, WIDTH, 3)), on_host=True)

    data = keras.tree.map_structure(tf.convert_to_tensor, data)
    seeds = tf.stack([tf.range(3) * 7919 + 3, tf.range(3) + 11], axis=1)
    specs = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), data
    )
    graph = run.get_concrete_function(specs, tf.TensorSpec((None, 2), tf.int32))
    together = graph(*keras.tree.flatten(data), seeds)
    alone = graph(*(leaf[1:] for leaf in keras.tree.flatten(data)), seeds[1:])
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_array_equal(one[1:], other), together, alone
    )
    changed = keras.tree.map_structure(np.array, together)
    assert changed["images"].dtype == np.float32
    assert changed["labels"].tolist() == [0, 1, 2]
    assert layer.changed_shape((HEIGHT, WIDTH, 3)) == changed["images"].shape[1:]
    return changed
