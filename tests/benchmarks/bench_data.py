"""Images per second of the data pipeline, beside its peers.

    python tests/benchmarks/bench_data.py [--write]

1,600 JPEGs are made in a temporary folder. All readers take turns in one process: each reads the
folder once in every round, after one round to warm up (the generators, which are slow, read 224
images). A ratio is the median of the rounds' ratios; rates are medians, too. The clock runs from
making an iterator to its last batch.
"""

import contextlib
import io
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf
from photographs import write_photographs
from report import in_turn, main, spread, verdict

import keras_multigpu as kmg

SIZE, BATCH = (224, 224), 32
EACH = 200
"""Photographs in each of the eight classes."""

FLIP = {"rescale": 1 / 255, "horizontal_flip": True}
WARP = FLIP | {
    "rotation_range": 20,
    "width_shift_range": 0.1,
    "height_shift_range": 0.1,
    "zoom_range": 0.1,
}
KERAS, DECODING = "image_dataset_from_directory", "TensorFlow, decoding only"
TARGETS = (  # What the project promises: its rate as a multiple of a peer's.
    ("from_directory", KERAS, 1.3),
    ("from_directory", DECODING, 0.85),
    ('from_directory, resize="random_crop"', DECODING, 1.0),
    ('from_directory, cache="memory"', KERAS, 8.0),
    ("from_directory, cache=folder", KERAS, 8.0),
    ("from_flow, warp", "ImageDataGenerator, warp", 6.0),
    ("from_flow, flip", "ImageDataGenerator, flip", 1.8),
)


class Contender(NamedTuple):
    """What gives the batches of a round, and how many images it reads in a round."""

    name: str
    reader: object
    images: int


def decoding(files):
    """TensorFlow reading and decoding the files, without resizing or batching them."""

    def decode(path):
        # Each image counts as a batch of one.
        return tf.io.decode_jpeg(tf.io.read_file(path), 3)[None]

    dataset = tf.data.Dataset.from_tensor_slices([str(file) for file in files])
    return dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)


def generator(folder, parameters):
    with contextlib.redirect_stdout(io.StringIO()):
        images = tf.keras.preprocessing.image  # noqa: TID251, `keras` itself has no generators.
        return images.ImageDataGenerator(**parameters).flow_from_directory(
            str(folder), target_size=SIZE, batch_size=BATCH, class_mode="sparse", seed=0
        )


def contenders(folder, cache):
    files = sorted(folder.glob("*/*.jpg"))
    stock = keras.utils.image_dataset_from_directory(
        folder, image_size=SIZE, batch_size=BATCH, verbose=False
    )
    decoded = decoding(files)
    found = {KERAS: lambda number: stock, DECODING: lambda number: decoded}
    for told, options in {
        "": {},
        ', resize="random_crop"': {"resize": "random_crop"},
        ', cache="memory"': {"cache": "memory"},
        ", cache=folder": {"cache": cache},
    }.items():
        sizes = {"image_size": SIZE, "global_batch_size": BATCH, "verbose": False}
        found[f"from_directory{told}"] = kmg.data.from_directory(folder, **sizes, **options).epoch
    for told, parameters in (("warp", WARP), ("flip", FLIP)):
        itself = generator(folder, parameters)
        found[f"ImageDataGenerator, {told}"] = lambda number, flow=itself: flow  # Endless.
        flow = kmg.data.from_flow(generator(folder, parameters), global_batch_size=BATCH)
        found[f"from_flow, {told}"] = flow.epoch
    return [
        Contender(name, reader, 7 * BATCH if "Generator" in name else len(files))
        for name, reader in found.items()
    ]


def read(contender, number):
    """Seconds per image."""
    batches = contender.reader(number)
    start = time.perf_counter()
    iterator, count = iter(batches), 0
    while count < contender.images:
        batch = next(iterator)
        count += (batch[0] if isinstance(batch, tuple | list) else batch).shape[0]
    return (time.perf_counter() - start) / count


def speeds(rounds):
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        write_photographs(Path(folder), EACH)
        readings = {}
        for contender in in_turn(contenders(Path(folder), Path(cache)), rounds + 1):
            own = readings.setdefault(contender.name, [])
            own.append(read(contender, len(own)))
    rates = {name: f"{1 / statistics.median(own[1:]):,.0f}" for name, own in readings.items()}
    for mine, theirs, target in TARGETS:
        pairs = list(zip(readings[theirs], readings[mine], strict=True))[1:]
        ratios = [other / own for other, own in pairs]
        met = f"{target:.2f} {verdict(ratios, at_least=target)}"
        yield mine, rates[mine], f"{theirs}: {rates[theirs]}", spread(ratios), met


TABLES = {"data": ("reader | images/s | peer: images/s | ratio (range) | target", speeds)}
PACKAGES = ("opencv-python-headless", "pillow")

if __name__ == "__main__":
    main(__doc__, TABLES, 7, ", ".join(f"{name} {version(name)}" for name in PACKAGES) + ".")
