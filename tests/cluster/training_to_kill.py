"""A training of several workers that tests kill. Started again, it continues.

    keras-multigpu launch --workers 2 training_to_kill.py FOLDER --epochs 4

Each worker prints its pid and a line for each step, and saves its weights.
"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
from helpers.graph_optimizer import unoptimized_if_quick

import keras_multigpu as kmg
from keras_multigpu.cluster.managers import find_cluster


class Steps(keras.callbacks.Callback):
    """Prints a line for each step."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {self.model.training_run.epoch} {batch}", flush=True)


def trained(folder, epochs, alike, steps=1):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.0 if alike else 0.5), keras.layers.Dense(1)]
    layers = [keras.Input((4,)), *layers]
    model = kmg.distribute(keras.Sequential(layers))
    model.compile("adam", "mse", steps_per_execution=steps)
    random = np.random.default_rng(0)
    x = random.normal(size=(43, 4)).astype("float32")
    data = kmg.data.from_arrays(x, x[:, :1], global_batch_size=5, seed=3)
    checkpoint = kmg.callbacks.ResumableCheckpoint(folder / "checkpoints", every_steps=4)
    model.fit(data, epochs=epochs, callbacks=[Steps(), checkpoint], verbose=0)
    return {variable.path: variable.numpy() for variable in model.variables}


def main(folder, epochs, alike, steps):
    print(f"pid {os.getpid()}", flush=True)
    unoptimized_if_quick()
    values = trained(folder, epochs, alike, steps)
    np.savez(folder / f"worker{find_cluster()[1].index}.npz", **values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int, default=1, help="Steps per execution.")
    parser.add_argument("--alike", action="store_true", help="Train without dropout.")
    main(**vars(parser.parse_args()))
