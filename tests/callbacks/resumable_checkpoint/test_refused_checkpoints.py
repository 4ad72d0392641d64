"""`ResumableCheckpoint` refuses what does not belong to its run, and loses nothing."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.interrupted_runs import X, Y, batches, checkpoint_in, fit, network, values_of

import keras_multigpu as kmg
from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder
from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    fit(network(1), batches(), [keras.callbacks.TerminateOnNaN()], checkpoint_in(folder), epochs=1)
    return folder


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"model": lambda: network(1, units=5)}, r"another model: .*units was 4 and is 5"),
        ({"model": lambda: network(1, loss="mae")}, "another model: loss was .* and is 'mae'"),
        (
            {"model": lambda: network(1, optimizer="rms")},
            r"another model: optimizers\[0\] was 'SGD' and is 'RMSprop'",
        ),
        (
            {"data": lambda: batches(global_batch_size=8)},
            "data have changed .*global_batch_size was 4",
        ),
        ({"data": lambda: batches(seed=8)}, "data have changed .*data.seed was 7 and is 8"),
        ({"data": lambda: batches().take(21)}, "data have changed .*examples was 22 and is 21"),
        ({"data": lambda: (X, Y)}, "data have changed .*kind was 'Batches' and is 'ndarray'"),
        ({"class_weight": {0: 2.0}}, r"data.class_weight was None and is \{'0': 2.0, '1': 1.0\}"),
        ({"steps_per_epoch": 5}, "data have changed .*steps_per_epoch was 6"),
        ({"initial_epoch": 2}, "begin with an epoch after .*at most 1.*initial_epoch=2"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("x")]}, "A `BackupAndRestore` came with"),
        ({"callbacks": [ResumableCheckpoint("y")]}, "There is more than one `ResumableCheckpoint`"),
    ],
)
def test_what_does_not_belong_together_is_refused(begun, change, phrase):
    """An error names it before the first step, and the checkpoints are unchanged."""
    change = dict(change)
    model = change.pop("model", lambda: network(1))()
    data = change.pop("data", batches)()
    callbacks = change.pop("callbacks", [])
    if isinstance(data, tuple):
        data, change["y"] = data
    files = sorted(begun.glob("*.kmg"))
    before = values_of(model) if model.built else {}
    with pytest.raises(ValueError, match=phrase):
        fit(model, data, callbacks, checkpoint_in(begun), **change)
    assert sorted(begun.glob("*.kmg")) == files
    after = values_of(model)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.slow
def test_what_may_change_is_logged_and_applied(begun, caplog):
    """A rate, a clip, a cache. The state itself comes from the checkpoint."""
    shutil.copytree(begun, other := begun.with_name("other"))
    model = network(1, optimizer="clipped")
    fit(model, batches(cache="memory"), [], checkpoint_in(other), epochs=1)
    assert float(model.optimizer.learning_rate) == np.float32(0.005)
    assert "its clipnorm was None and is 1.0; its learning_rate was 0.0199" in caplog.text
    # The new values are in later checkpoints.
    fit(network(1, optimizer="clipped"), batches(), [], checkpoint_in(other), epochs=2)
    assert caplog.text.count("The new values are used") == 2


def test_callbacks_that_come_or_go_are_named(begun, caplog):
    stop = keras.callbacks.EarlyStopping("loss")
    fit(network(1), batches(), [stop], checkpoint_in(begun), epochs=1)
    assert "EarlyStopping is new since the checkpoint was saved" in caplog.text


def test_a_replica_batch_size_that_means_another_size_is_refused(tmp_path):
    data = batches(global_batch_size=None, replica_batch_size=2)
    fit(network(1), data, [], checkpoint_in(tmp_path), epochs=1)
    with pytest.raises(ValueError, match="the number of replicas, use `global_batch_size="):
        fit(network(2), data, [], checkpoint_in(tmp_path), epochs=1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_shuffle_without_a_seed_is_named(tmp_path, caplog, wrapped):
    tf.random.set_seed(None)  # A seed of the whole program would do.
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22).batch(4)
    data = kmg.data.from_dataset(data) if wrapped else data
    fit(network(1), data, [], checkpoint_in(tmp_path), epochs=1)
    assert caplog.text.count("The dataset shuffles without a seed") == 1


def test_a_run_ends_if_its_folder_is_moved(tmp_path):
    """It resumes once the folder is back. Copying the folder while training does no harm."""

    def copied(batch, logs):
        if batch == 1:
            shutil.copytree(tmp_path / "run", tmp_path / "backup")
            with pytest.raises(ValueError, match="Another run keeps its checkpoints"):
                CheckpointFolder(tmp_path / "run", 2).open()
        if batch == 3:
            (tmp_path / "run").rename(tmp_path / "away")

    moving = keras.callbacks.LambdaCallback(on_train_batch_end=copied)
    with pytest.raises(FileNotFoundError, match="cannot be written: No such file.*/run'"):
        fit(network(1), batches(), [moving], checkpoint_in(tmp_path / "run"))
    (tmp_path / "away").rename(tmp_path / "run")
    checkpoint = checkpoint_in(tmp_path / "run")
    fit(network(1), batches(), [], checkpoint, epochs=1)
    assert checkpoint.resumed_from.name == "checkpoint-000003.kmg"


def test_an_archive_that_is_not_a_run_is_refused(tmp_path):
    with (tmp_path / "checkpoint-000001.kmg").open("wb") as file:
        Encoded({"run": {}}).write_to(file)
    with pytest.raises(ValueError, match="not the checkpoint of a run: it has no 'callbacks'"):
        fit(network(1), batches(), [], checkpoint_in(tmp_path))


def test_a_state_that_cannot_be_saved_is_named(tmp_path):
    class Odd(keras.callbacks.Callback):
        state = {"model": object()}

    with pytest.raises(TypeError, match=r"\['Odd'\]\['own'\]\['model'\] is a object"):
        fit(network(1), batches(), [Odd()], checkpoint_in(tmp_path))
