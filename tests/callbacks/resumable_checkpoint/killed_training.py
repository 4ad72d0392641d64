"""A real training to be killed: run it again with the same arguments, and it resumes."""

import json
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.everything_in_parts import divide_everything
from helpers.graph_optimizer import unoptimized_if_quick
from helpers.interrupted_runs import batches, keras_callbacks, network, values_of

import keras_multigpu as kmg
from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.keras_internals.variable_internals import storages_of
from keras_multigpu.training.replica_group import is_in_parts


class Steps(keras.callbacks.Callback):
    def __init__(self, say):
        super().__init__()
        self.say = say

    def on_train_batch_end(self, batch, logs=None):
        self.say(f"step {self.model.training_run.epoch} {batch}")


def pause_in_rename(save, say):
    """Stop for a minute before a checkpoint is renamed, where a kill would do most harm."""
    saves, replace = [], os.replace

    def replace_slowly(source, target):
        saves.append(target)
        if len(saves) == save:
            say("in rename")
            time.sleep(60)
        replace(source, target)

    os.replace = replace_slowly


def main(say, folder, epochs, pause=None, shard=None):
    """Train in a new process, and write what came of it to `result.npz` and `history.json`.

    Args:
        say: Is told `fit` when training begins, then of each step.
        folder: Where files go.
        epochs: How many.
        pause: The number of the save to stop in, so that it is killed there.
        shard: What the replicas divide, however small.
    """
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    unoptimized_if_quick()
    if pause:
        pause_in_rename(pause, say)
    folder.mkdir(exist_ok=True)
    model = network(normalized=True)
    if shard:
        divide_everything(pytest.MonkeyPatch())
        kmg.distribute(model, model.distribute_strategy, self_check=False, shard=shard)
        assert any(map(is_in_parts, storages_of(model.weights)))
    checkpoint = ResumableCheckpoint(folder / "checkpoints", every_steps=3)
    callbacks = [Steps(say), checkpoint, *keras_callbacks(folder, patience=1000)]
    say("fit")
    history = model.fit(
        batches(), validation_data=batches(), epochs=epochs, callbacks=callbacks, verbose=0
    )
    np.savez(folder / "result.npz", **values_of(model))
    (folder / "history.json").write_text(json.dumps(history.history))
