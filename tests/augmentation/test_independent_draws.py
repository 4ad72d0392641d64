"""Draws in a model depend on its seed and the replica; `test_batches.py` tests pipelines."""

import keras
import numpy as np
import pytest

import keras_multigpu as kmg
from keras_multigpu.augmentation import AugmentationLayer, Draws, Sequence

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


@pytest.mark.slow
def test_a_training_replays():
    for one, other in zip(trained(2).get_weights(), trained(2).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
