"""Which files of the package a batch passes, once its step is made: each is one more to know."""

import sys
from pathlib import Path

import keras
import numpy as np
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg

PACKAGE = Path(kmg.__file__).parent
# As the documentation's page on the journey of a batch has them.
STEADY = {
    "keras_internals/optimizer_internals.py",
    "training/feed/feed.py",
    "training/lengths.py",
    "training/loops.py",
    "training/replica_group.py",
    "training/replication.py",
    "training/run.py",
    "training/shares.py",
    "training/steps/steps_of_model.py",
    "training/variables/adjusted_schedule.py",
    "training/variables/placement.py",
}


class NotedStep(keras.callbacks.Callback):
    """Notes the files of the package that Python enters in the third step."""

    def on_train_begin(self, logs=None):
        self.steps, self.files = 0, set()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        sys.setprofile(self.note if self.steps == 2 else None)

    def note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE).as_posix())


def test_a_batch_passes_few_files():
    """Arrays, on two replicas."""
    model = kmg.distribute(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), replicas_of(2)
    )
    model.compile("adam", "mse")
    x, noted = np.ones((16, 2), "float32"), NotedStep()
    model.fit(x, x[:, :1], 4, verbose=0, callbacks=[noted])
    assert noted.files == STEADY
