"""Images per second of the augmentation layers, beside those of Keras and keras-cv.

    python tests/benchmarks/bench_augmentation.py [augmentation|...] [--write]

A batch of 64 parts of photographs, 224x224x3, goes through each layer in a compiled function, as in
a model, and in the map of a dataset, as `Batches` does it. The layers of a comparison take turns in
one process, after two rounds to warm up; a reading is a few batches in a row. A ratio is the median
of the rounds' ratios; rates are medians, too.
"""

import functools
import os
import statistics
import time
from collections import deque
from functools import partial
from importlib.metadata import version

import keras
import numpy as np
import tensorflow as tf
from photographs import originals
from report import in_turn, main, spread, verdict

from keras_multigpu import augmentation

BATCH, SIZE, CLASSES = 64, 224, 10
CORES = len(os.sched_getaffinity(0))
SECONDS = 0.4
"""How long a reading of the fastest layers takes at least."""

FUSED_TARGET, POLICY_TARGET, SAME_TARGET = 2.5, 6.0, 1.0
"""What the project promises: its rate as a multiple of the peer's."""

# The ranges by the names of this package's arguments.
GEOMETRY = {"flip": "horizontal", "rotation": 0.05, "translation": 0.1, "zoom": 0.1}
COLOR = {"brightness": 0.2, "contrast": 0.2}
OPS, MAGNITUDE = 2, 0.5
"""How many operations RandAugment applies to an image, and how strongly."""

RANGE = {"value_range": (0, 255)}
PEERS = {
    "flip": lambda layers, value: layers.RandomFlip(value),
    "rotation": lambda layers, value: layers.RandomRotation(value),
    "translation": lambda layers, value: layers.RandomTranslation(value, value),
    "zoom": lambda layers, value: layers.RandomZoom(value),
    "brightness": lambda layers, value: layers.RandomBrightness(value, **RANGE),
    "contrast": lambda layers, value: layers.RandomContrast(factor=value, **RANGE),
}
"""A layer of `keras.layers` or `keras_cv.layers` for each argument."""


def fused():
    """Geometry and colour in two passes."""
    layers = [augmentation.RandomGeometry(**GEOMETRY), augmentation.RandomColor(**COLOR)]
    return augmentation.Sequence(layers)


def stack(layers, around):
    """The same in six layers, one after another."""
    return around([PEERS[name](layers, value) for name, value in (GEOMETRY | COLOR).items()])


def cv_stack():
    import keras_cv

    return stack(keras_cv.layers, keras_cv.layers.Augmenter)


def cv_rand_augment():
    """With the same number of operations for each image; by default it leaves out some."""
    import keras_cv

    return keras_cv.layers.RandAugment(augmentations_per_image=OPS, magnitude=MAGNITUDE, **RANGE)


def erasing(layers):
    # A probability as a pair, so that Keras does not draw the probability itself.
    return layers.RandomErasing(factor=(1.0, 1.0), scale=(0.02, 0.33))


COMPARED = {
    "geometry + color": (
        fused,
        {
            "keras, 6 layers": (
                partial(stack, keras.layers, keras.layers.Pipeline),
                FUSED_TARGET,
            ),
            "keras-cv, 6 layers": (cv_stack, FUSED_TARGET),
        },
    ),
    "RandAugment": (
        partial(augmentation.RandAugment, num_ops=OPS, magnitude=30 * MAGNITUDE),
        {
            "keras": (
                partial(keras.layers.RandAugment, num_ops=OPS, factor=MAGNITUDE),
                POLICY_TARGET,
            ),
            "keras-cv": (cv_rand_augment, SAME_TARGET),
        },
    ),
    "RandomErasing": (
        partial(erasing, augmentation),
        {"keras": (partial(erasing, keras.layers), SAME_TARGET)},
    ),
    "MixUp": (
        partial(augmentation.Mix, mix_up=0.2, cut_mix=None),
        {"keras": (keras.layers.MixUp, SAME_TARGET)},
    ),
    "CutMix": (
        partial(augmentation.Mix, mix_up=None),
        {"keras": (keras.layers.CutMix, SAME_TARGET)},
    ),
}
"""Our layer, and its peers with what is promised."""


def recipe(name):
    """A recipe as one layer."""
    made = augmentation.recipe(name)
    return made if hasattr(made, "augment_batch") else augmentation.Sequence(made)


ALONE = {
    "TrivialAugment": augmentation.TrivialAugment,
    **{
        f'recipe("{name}")': partial(recipe, name)
        for name in ("light", "standard", "strong", "imagenet")
    },
}
"""Layers without a namesake, and the recipes."""


# How a layer runs.


@functools.cache
def photographs():
    """Random crops of photographs, `uint8[64, 224, 224, 3]`."""
    random = np.random.default_rng(0)
    images = [image for image in originals().values() if min(image.shape[:2]) >= SIZE]
    parts = []
    for number in range(BATCH):
        image = images[number % len(images)]
        top, left = (random.integers(image.shape[axis] - SIZE + 1) for axis in (0, 1))
        parts.append(image[top : top + SIZE, left : left + SIZE])
    return np.stack(parts)


def batch(dtype, mixes):
    """The batch that all layers get, with labels for those that mix examples."""
    images = tf.constant(photographs(), dtype)
    labels = tf.one_hot(tf.range(BATCH) % CLASSES, CLASSES)
    return {"images": images, "labels": labels} if mixes else images


def in_model(layer, data):
    """The layer in a compiled function, as a model's training step calls it."""
    compiled = tf.function(lambda data: layer(data))

    def run(batches):
        for _ in range(batches):
            result = compiled(data)
        return result

    return run


def in_pipeline(layer, data):
    """The layer in a dataset of batches, with the options that `Batches` sets."""
    options = tf.data.Options()
    options.autotune.enabled = False
    # As `Batches` calls it.
    augment = getattr(layer, "augment_batch", None)
    augment = augment and tf.autograph.experimental.do_not_convert(augment)

    def change(step):
        if augment is None:
            return layer(data)
        seeds = tf.stack([tf.fill([BATCH], tf.cast(step, tf.int32)), tf.range(BATCH)], axis=1)
        if isinstance(data, dict):
            return augment(data["images"], data["labels"], None, seeds, True)[:2]
        return augment(data, None, None, seeds, True)[0]

    count = tf.Variable(0, dtype=tf.int64)
    steps = tf.data.Dataset.from_tensors(0).flat_map(lambda _: tf.data.Dataset.range(count))
    steps = steps.map(change, num_parallel_calls=CORES, deterministic=True).with_options(options)

    def run(batches):
        count.assign(batches)
        return deque(steps, maxlen=1)[0]

    return run


# The type: a model mostly gets floats, a pipeline what a decoder gives. And the fewest batches.
WAYS = {"model": (in_model, "float32", 4), "pipeline": (in_pipeline, "uint8", 2 * CORES)}


class Contender:
    """A layer that runs in one place, and its readings: seconds an image."""

    def __init__(self, name, make, way, data):
        self.name, self.readings = name, []
        place, _, least = WAYS[way]
        self._run = place(make(), data)
        require_change(name, self._run(1), data)
        start = time.perf_counter()
        self._run(least)
        taken = (time.perf_counter() - start) / least
        self._batches = max(least, round(SECONDS / taken))

    def read(self):
        start = time.perf_counter()
        self._run(self._batches)
        self.readings.append((time.perf_counter() - start) / self._batches / BATCH)


def require_change(name, result, data):
    flat, given = keras.tree.flatten(result)[0], keras.tree.flatten(data)[0]
    assert len(flat) == len(given), (name, flat.shape)
    if flat.shape == given.shape:  # It is no crop.
        changed = np.mean(np.asarray(flat, np.float32) != np.asarray(given, np.float32))
        assert changed > 0.02, f"{name} left the images as they were."


def raced(makers, way, mixes, rounds):
    """Time layers in turn."""
    data = batch(WAYS[way][1], mixes)
    found = [Contender(name, make, way, data) for name, make in makers.items()]
    for contender in in_turn(found, rounds):
        contender.read()
    return found


def ratios(own, other):
    """Our rate over a peer's in each round."""
    return [theirs / mine for theirs, mine in zip(other.readings, own.readings, strict=True)]


def beside_peers(rounds):
    for name, (ours, peers) in COMPARED.items():
        makers = {"ours": ours} | {peer: make for peer, (make, _) in peers.items()}
        races = [raced(makers, way, "Mix" in name, rounds) for way in WAYS]
        for place, (peer, (_, target)) in enumerate(peers.items(), 1):
            found = [ratios(race[0], race[place]) for race in races]
            verdicts = {verdict(each, at_least=target) for each in found}
            worst = next(word for word in ("missed", "within noise", "met") if word in verdicts)
            yield name, peer, *map(spread, found), f"{target:.1f} {worst}"


def without_peers(rounds):
    for name, make in ALONE.items():
        races = [raced({name: make}, way, False, rounds)[0] for way in WAYS]
        yield name, *(f"{1 / statistics.median(race.readings):,.0f}" for race in races)


RATIOS = "ratio in a model (range) | ratio in a pipeline (range)"
TABLES = {
    "augmentation": (f"layer | against | {RATIOS} | target", beside_peers),
    "augmentation alone": ("layer | images/s, model | images/s, pipeline", without_peers),
}

if __name__ == "__main__":
    # TensorFlow warns about many compiled functions, which are needed here.
    tf.get_logger().setLevel("ERROR")
    main(__doc__, TABLES, note=f"keras-cv {version('keras-cv')}.")
