"""Validation accuracy with this package's augmentation, with that of Keras, and with none.

    python tests/benchmarks/quality_of_augmentation.py [--write]

A small network learns handwritten digits, those that scikit-learn ships, from 100 images, and is
judged by the other 1,697. Then it learns which of ten photographs a tile of 32x32 pixels is from.
The augmentation is part of the model in all cases, and draws from the same ranges. For each seed,
all start with the same weights and have the same images.
"""

import statistics

import keras
import numpy as np
from keras import layers
from photographs import originals
from report import main

from keras_multigpu import augmentation

SEEDS = (3, 4, 5)
"""Sizes, epochs and ranges were chosen with two other seeds, 0 and 1."""

BATCH = 25
LAST = 5
"""How many of the last measurements are averaged."""

DIGIT, DIGITS = 16, 100
"""The side of a digit, and how many there are to learn from."""

GEOMETRY = {"rotation": 0.03, "translation": 0.06, "zoom": 0.1, "shear": 0.1}
COLOR = {"brightness": 0.1, "contrast": 0.2}
"""Digits are not mirrored: a mirrored 2 is not a 2."""

BLACK = {"fill_mode": "constant", "fill_value": 0.0}
RANGE = {"value_range": (0, 255)}
SIDE, TILE = 384, 32
"""The shorter side of a photograph, and the side of the tiles that it is cut into."""

TILES_TO_LEARN, TILES_TO_JUDGE = 10, 120
"""Of each photograph."""


def six_layers():
    return layers.Pipeline(
        [
            layers.RandomRotation(GEOMETRY["rotation"], **BLACK),
            layers.RandomTranslation(GEOMETRY["translation"], GEOMETRY["translation"], **BLACK),
            layers.RandomZoom(GEOMETRY["zoom"], **BLACK),
            layers.RandomShear(GEOMETRY["shear"], GEOMETRY["shear"], **BLACK),
            layers.RandomBrightness(COLOR["brightness"], **RANGE),
            layers.RandomContrast(COLOR["contrast"], **RANGE),
        ]
    )


def fused():
    geometry = augmentation.RandomGeometry(**GEOMETRY, **BLACK)
    return augmentation.Sequence([geometry, augmentation.RandomColor(**COLOR)])


def four_layers():
    """What `recipe("standard")` does."""
    turned = layers.RandomRotation(0.15), layers.RandomTranslation(0.1, 0.1)
    contrast = layers.RandomContrast(0.1, **RANGE)
    return layers.Pipeline([layers.RandomFlip("horizontal"), *turned, contrast])


def digits(seed):
    """Training and validation data, `uint8` images of 16x16."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = data.images[..., None].astype(np.float32) * (255 / 16)
    images = keras.ops.image.resize(images, (DIGIT, DIGIT), interpolation="bicubic")
    images = np.clip(np.round(images), 0, 255).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(images))
    return [(images[part], data.target[part]) for part in np.split(order, [DIGITS])]


def tiles(seed):
    """Training and validation data: tiles, which do not overlap, and of which photograph."""
    import skimage.data

    found = originals() | {
        "hubble_deep_field": skimage.data.hubble_deep_field(),
        "motorcycle": skimage.data.stereo_motorcycle()[0],
    }
    random, parts = np.random.default_rng(seed), []
    for name in sorted(found):
        cut = tiles_of(found[name])
        parts.append(cut[random.permutation(len(cut))[: TILES_TO_LEARN + TILES_TO_JUDGE]])
    return [
        (each.reshape(-1, *each.shape[2:]), np.repeat(np.arange(len(each)), each.shape[1]))
        for each in np.split(np.stack(parts), [TILES_TO_LEARN], axis=1)
    ]


def tiles_of(photograph):
    """All tiles of a photograph, `uint8[n, 32, 32, 3]`."""
    from PIL import Image

    rows, columns = photograph.shape[:2]
    scale = SIDE / min(rows, columns)
    down, across = (round(length * scale) // TILE for length in (rows, columns))
    size = (round(columns * scale), round(rows * scale))
    image = np.asarray(Image.fromarray(photograph).resize(size, Image.Resampling.BICUBIC))
    grid = image[: down * TILE, : across * TILE].reshape(down, TILE, across, TILE, 3)
    return grid.swapaxes(1, 2).reshape(-1, TILE, TILE, 3)


# The data, the widths of the network, the epochs, those between two measurements, and what is
# compared.
COMPARED = {
    "digits": (
        (digits, (32, 64), 200, 5),
        {
            "none": layers.Identity,
            "Keras, six layers": six_layers,
            "RandomGeometry, RandomColor": fused,
        },
    ),
    "photographs": (
        (tiles, (16, 32, 64), 100, 10),
        {
            "none": layers.Identity,
            "Keras, four layers": four_layers,
            'recipe("standard")': lambda: augmentation.recipe("standard"),
        },
    ),
}


def network(shape, widths):
    """A small convolutional network, without the augmentation."""
    parts = [keras.Input(shape), layers.Rescaling(1 / 255)]
    for filters in widths:
        parts += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        parts.append(layers.MaxPooling2D())
    last = [layers.Flatten(), layers.Dropout(0.3), layers.Dense(10, activation="softmax")]
    return keras.Sequential([*parts, *last])


def accuracy(data, widths, epochs, every, make, seed):
    """Of the last measurements."""
    keras.utils.set_random_seed(seed)
    training, validation = data(seed)
    shape = training[0].shape[1:]
    # Before the augmentation, whose draws would change the first weights.
    inside = network(shape, widths)
    model = keras.Sequential([keras.Input(shape), make(), inside])
    steps = epochs * -(-len(training[0]) // BATCH)
    rate = keras.optimizers.schedules.CosineDecay(3e-3, steps)
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    judged = {"validation_data": validation, "validation_batch_size": 800}
    history = model.fit(
        *training, BATCH, epochs, verbose=0, validation_freq=every, **judged
    ).history
    return statistics.mean(history["val_accuracy"][-LAST:])


def qualities(rounds):
    for name, (settings, ways) in COMPARED.items():
        for way, make in ways.items():
            found = [accuracy(*settings, make, seed) for seed in SEEDS]
            mean, low, high = statistics.mean(found), min(found), max(found)
            yield name, way, f"{mean:.1%} ({low:.1%}–{high:.1%})"


TABLES = {"augmentation quality": ("data | augmentation | accuracy (range of seeds)", qualities)}

if __name__ == "__main__":
    main(__doc__, TABLES)
