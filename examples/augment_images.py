"""Augment images with layers of this package, of Keras and of keras-cv, chained.

    python examples/augment_images.py                  # all GPUs, or one CPU
    python examples/augment_images.py --replicas 2     # two GPUs, or a CPU split in two

The photographs are those of scikit-image: pip install keras-cv scikit-image matplotlib
"""

import argparse

import keras
import numpy as np

import keras_multigpu as kmg

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
ROWS, COLUMNS, SIDE = 10, 15, 32

# In the photograph of a cup of coffee: corners of cup and spoon, middle and radii of the saucer.
CUP, SPOON = (173, 18, 408, 308), (326, 67, 425, 327)
SAUCER_X, SAUCER_Y, SAUCER_WIDTH, SAUCER_HEIGHT = 278, 227, 202, 162


def load_pieces():
    """Each photograph cut into 150 pieces, labelled with its number."""
    from PIL import Image, ImageOps
    from skimage import data

    images = []
    for photo in PHOTOS:
        image = Image.fromarray(getattr(data, photo)())
        pixels = np.array(ImageOps.fit(image, (COLUMNS * SIDE, ROWS * SIDE)))
        pieces = pixels.reshape(ROWS, SIDE, COLUMNS, SIDE, 3).swapaxes(1, 2)
        images.append(pieces.reshape(-1, SIDE, SIDE, 3))
    return np.concatenate(images), np.repeat(np.arange(len(PHOTOS)), ROWS * COLUMNS)


def load_coffee():
    """A cup of coffee, with boxes around cup and spoon and a mask of the saucer."""
    from skimage import data

    image = data.coffee()[::2, ::2]
    rows, columns = 2 * np.mgrid[: image.shape[0], : image.shape[1]]
    away = np.hypot((columns - SAUCER_X) / SAUCER_WIDTH, (rows - SAUCER_Y) / SAUCER_HEIGHT)
    return {
        "images": image,
        "bounding_boxes": {
            "boxes": np.array([CUP, SPOON], "float32") / 2,
            "labels": np.array([0, 1]),
        },
        "segmentation_masks": (away < 1).astype("int32")[..., None],
    }


def build_augmentation():
    """A layer of each package, as one layer."""
    try:
        import keras_cv
    except ImportError as error:
        raise ImportError("This example needs keras-cv: pip install keras-cv") from error

    # --8<-- [start:layers]
    return kmg.augmentation.Sequence(
        [
            kmg.augmentation.RandomGeometry(flip="horizontal", rotation=0.1, zoom=0.2),
            kmg.augmentation.RandomColor(brightness=0.1, contrast=0.2),
            keras.layers.RandomSharpness(0.5),
            keras_cv.layers.GridMask(ratio_factor=(0.2, 0.4)),
        ]
    )
    # --8<-- [end:layers]


def build_model(*first_layers):
    """A small convnet, after layers that augment or not."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), *first_layers])
    model.add(keras.layers.Rescaling(1 / 255))
    for filters in (16, 32, 64):
        model.add(keras.layers.Conv2D(filters, 3, strides=2, activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(len(PHOTOS), activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def draw_targets(picture):
    """Draw how boxes and masks follow an image."""
    # --8<-- [start:targets]
    follows = kmg.augmentation.Sequence(
        [
            kmg.augmentation.RandomGeometry(flip="horizontal", rotation=0.1, zoom=0.2),
            kmg.augmentation.RandomColor(brightness=0.1, contrast=0.2),
        ],
        bounding_box_format="xyxy",
        segmentation_masks=True,
    )
    kmg.augmentation.gallery(follows, load_coffee(), picture)
    # --8<-- [end:targets]


def replay(augmentation, images):
    """Do the same to the same images again; returns whether it was the same."""
    # --8<-- [start:replay]
    seeds = np.arange(2 * len(images), dtype="int32").reshape(-1, 2)
    drawn = augmentation.draw(seeds, images.shape[1:])
    print("drawn by", *drawn, sep="\n    ")
    once, again = augmentation.apply(images, drawn), augmentation.apply(images, drawn)
    print("the same again:", np.array_equal(once, again))
    # --8<-- [end:replay]


def main(epochs=10, replicas=None):
    """Train with augmentation in both places; returns the better accuracy on new pieces."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    augmentation = build_augmentation()
    images, labels = load_pieces()

    # --8<-- [start:gallery]
    kmg.augmentation.gallery(augmentation, load_coffee()["images"], "augmented.png")
    # --8<-- [end:gallery]
    draw_targets("augmented_targets.png")
    replay(augmentation, images[:4])

    # --8<-- [start:pipeline]
    pieces = kmg.data.from_arrays(images, labels, global_batch_size=32)
    train, validation = pieces.split(0.2)
    model = kmg.distribute(build_model(), strategy)
    model.fit(train.with_(augment=augmentation), epochs=epochs, verbose=0)
    in_pipeline = model.evaluate(validation, verbose=0, return_dict=True)["accuracy"]
    # --8<-- [end:pipeline]

    # --8<-- [start:model]
    model = kmg.distribute(build_model(*augmentation.layers[:2]), strategy)
    model.fit(train, epochs=epochs, verbose=0)
    in_model = model.evaluate(validation, verbose=0, return_dict=True)["accuracy"]
    # --8<-- [end:model]

    print(f"New pieces that are right: {in_pipeline:.0%} with augmentation in the pipeline,")
    print(f"{in_model:.0%} in the model. See augmented.png and augmented_targets.png.")
    return max(in_pipeline, in_model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
