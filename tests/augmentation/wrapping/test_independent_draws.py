"""Draws depend on seed, epoch and example in a pipeline, and on seed and replica in a model."""

import keras
import numpy as np
import pytest

import keras_multigpu as kmg
from keras_multigpu.augmentation import AugmentationLayer, Sequence
from keras_multigpu.augmentation.random_numbers import Draws

COUNT = 12
IMAGES = np.full((COUNT, 4, 6, 3), 100, np.float32)
IMAGES[:, :, :3] = 50
NUMBERS = np.arange(COUNT)


class Brighter(AugmentationLayer):
    """Adds a number to each image."""

    def draw(self, seeds, shape):
        return {"added": Draws(seeds).uniform(0.0, 9.0)}

    def change_images(self, images, drawn):
        return images + drawn["added"][:, None, None, None]


def mixed_layers(seed=None):
    """A layer of this package and one of Keras, each with continuous draws.

    Layers of keras-cv have large graphs; `test_keras_cv_layer.py` tests each of them.
    """
    return Sequence([Brighter(), keras.layers.RandomContrast(0.5)], seed=seed)


def by_number(dataset):
    return {int(n): image for x, y in dataset for n, image in zip(y, x.numpy(), strict=True)}


def batches(size, seed=1):
    return kmg.data.from_arrays(
        IMAGES, NUMBERS, global_batch_size=size, seed=seed, shuffle=True, augment=mixed_layers()
    )


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for number, image in found.items():
        np.testing.assert_allclose(image, expected[number], rtol=1e-5)


@pytest.fixture(scope="module")
def first_epoch():
    return by_number(batches(COUNT).epoch(0))


@pytest.mark.slow
def test_examples_are_augmented_differently(first_epoch):
    assert len({image.tobytes() for image in first_epoch.values()}) == COUNT


@pytest.mark.slow
def test_batch_and_replica_do_not_matter(first_epoch):
    require_equal(by_number(batches(5).epoch(0)), first_epoch)
    shards = [by_number(batches(COUNT).epoch(0, shard=(replica, 4))) for replica in range(4)]
    require_equal(dict(pair for shard in shards for pair in shard.items()), first_epoch)


@pytest.mark.slow
def test_seed_and_epoch_matter(first_epoch):
    several = batches(COUNT)
    others = by_number(several.epoch(1)), by_number(batches(COUNT, seed=2).epoch(0))
    for found in others:
        assert all(np.any(found[number] != first_epoch[number]) for number in range(COUNT))
    require_equal(by_number(several.epoch(1)), others[0])


class AlwaysAugmented(keras.Model):
    """Returns augmented images."""

    def __init__(self):
        super().__init__()
        self.scaling = Sequence([keras.layers.Normalization(mean=50.0, variance=4.0)])
        self.augmentation = mixed_layers(seed=5)

    def call(self, x):
        # The mean and the variance come from the engine, not through the scope with the seeds.
        return self.augmentation(self.scaling(x) * 2 + 50, training=True)


@pytest.mark.slow
def test_replicas_draw_differently_in_a_model(replicas=4):
    strategy = kmg.strategy("mirrored", devices=[f"CPU:{number}" for number in range(replicas)])
    first, again = (
        kmg.distribute(AlwaysAugmented(), strategy).predict(IMAGES, batch_size=8, verbose=0)
        for _ in range(2)
    )
    assert len({image.tobytes() for image in first}) == COUNT
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_less(first, 160)
    np.testing.assert_array_less(20, first)


def trained(replicas):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4, 6, 3)),
            mixed_layers(seed=5),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    devices = [f"CPU:{number}" for number in range(replicas)]
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=devices))
    model.compile("sgd", "mse")
    # The last batch has one example, so the second replica has none.
    model.fit(IMAGES[:9], NUMBERS[:9].astype("float32"), batch_size=8, epochs=1, verbose=0)
    return model


@pytest.fixture(scope="module")
def on_two_replicas():
    return trained(2)


@pytest.mark.slow
def test_a_training_replays(on_two_replicas):
    for one, other in zip(on_two_replicas.get_weights(), trained(2).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
