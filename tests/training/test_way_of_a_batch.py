"""Which files of the package a batch passes, once its step is made: each is one more to know."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import replicas_of
from helpers.small_image_files import write_images

import keras_multigpu as kmg
from keras_multigpu.data.pipeline import loader

PACKAGE = Path(kmg.__file__).parent
STEADY = {
    "keras_internals/optimizer_internals.py",
    "training/feed/feed.py",
    "training/loops.py",
    "training/replica_group.py",
    "training/replication.py",
    "training/shares.py",
    "training/steps/steps_of_model.py",
    "training/variables/adjusted_schedule.py",
    "training/variables/placement.py",
    "training/workers.py",
}


class NotedStep(keras.callbacks.Callback):
    """Notes the files of the package that Python enters in the third step."""

    def __init__(self):
        super().__init__()
        self.steps, self.files = 0, set()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        sys.setprofile(self.note if self.steps == 2 else None)

    def note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE).as_posix())


def test_a_batch_passes_few_files():
    model = kmg.distribute(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), replicas_of(2)
    )
    model.compile("adam", "mse")
    x, noted = np.ones((16, 2), "float32"), NotedStep()
    model.fit(x, x[:, :1], 4, verbose=0, callbacks=[noted])
    assert noted.files == STEADY


# Between a file and a batch, in the threads that read.
READING = {
    "batch_sizes.py",
    "data/addresses.py",
    "data/decoding/backends.py",
    "data/decoding/decoder.py",
    "data/decoding/header.py",
    "data/files/image_files.py",
    "data/pipeline/loader.py",
    "data/pipeline/order.py",
}


@pytest.mark.slow
def test_a_batch_of_files_passes_few_files(tmp_path, monkeypatch):
    """Images of a folder, on two replicas: from the file to the weights."""
    # More than are read ahead of the third step: the epoch's end passes others.
    write_images(tmp_path, [f"{number % 2}/{number:03}.png" for number in range(160)])
    images = kmg.data.from_directory(
        tmp_path, image_size=4, global_batch_size=4, augment=keras.layers.Rescaling(1 / 255)
    )
    layers = [keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = kmg.distribute(keras.Sequential(layers), replicas_of(2))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    noted = NotedStep()
    # Its threads start anew, and with a profiler.
    pool = ThreadPoolExecutor(4, initializer=sys.setprofile, initargs=(noted.note,))
    monkeypatch.setattr(loader, "_READING", pool)
    model.fit(images, steps_per_epoch=3, verbose=0, callbacks=[noted])
    pool.shutdown()
    assert noted.files == STEADY | READING
    assert len(noted.files) <= 18
