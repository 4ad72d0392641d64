"""A real training to be killed: run it again with the same arguments, and it goes on.

    python killed_training.py FOLDER --epochs 40 [--background] [--pause write:5]

It prints `fit` when it begins, a line for each step, and leaves `result.npz` and `history.json`.
"""

import argparse
import io
import json
import os
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

from interrupted_runs import batches
from interrupted_runs import keras_callbacks
from interrupted_runs import network
from interrupted_runs import values_of

from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.callbacks.resumable_checkpoint import folder as checkpoint_files


def say(line):
    """One line for the process that watches this one."""
    print(line, flush=True)


class Steps(keras.callbacks.Callback):
    """Prints a line for each step."""

    def on_train_batch_end(self, batch, logs=None):
        say(f"step {self.model.training_run.epoch} {batch}")


def pause_in(stage, save):
    """Stop for a minute in the middle of a save, where a kill would do most harm."""
    saves = []

    def waits(here):
        if here == stage and len(saves) == save:
            say(f"in {stage}")
            time.sleep(60)

    replace, fsync = os.replace, os.fsync

    def write_through(file, content):
        saves.append(file)
        content.write_to(whole := io.BytesIO())
        parts = whole.getbuffer()
        file.write(parts[: len(parts) // 2])
        file.flush()
        waits("write")
        file.write(parts[len(parts) // 2 :])
        file.flush()
        waits("sync")
        fsync(file.fileno())

    def replace_slowly(source, target):
        waits("rename")
        replace(source, target)
        waits("prune")

    checkpoint_files.write_through = write_through
    os.replace = replace_slowly


def main(folder, epochs, background, pause):
    """Train, and write what came of it."""
    if pause:
        stage, save = pause.split(":")
        pause_in(stage, int(save))
    # To optimise graphs that run a few times takes as long as all the rest.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    folder.mkdir(exist_ok=True)
    model = network()
    checkpoint = ResumableCheckpoint(folder / "checkpoints", every_steps=3, background=background)
    callbacks = [Steps(), checkpoint, *keras_callbacks(folder, patience=1000)]
    say("fit")
    history = model.fit(
        batches(), validation_data=batches(), epochs=epochs, callbacks=callbacks, verbose=0
    )
    np.savez(folder / "result.npz", **values_of(model))
    (folder / "history.json").write_text(json.dumps(history.history))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--pause")
    main(**vars(parser.parse_args()))
