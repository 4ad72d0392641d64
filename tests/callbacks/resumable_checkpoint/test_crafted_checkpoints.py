"""A crafted checkpoint is refused by name before anything changes, or restores what was saved."""

import re

import keras
import numpy as np
import pytest
from helpers.interrupted_runs import (
    assert_same_values,
    batches,
    checkpoint_in,
    close_files,
    fit,
    network,
    values_of,
)

from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded, decode
from keras_multigpu.callbacks.resumable_checkpoint.states import restore_states, states_of


def keeping(folder):
    """Callbacks of Keras with state."""
    return [
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(str(folder / "model.keras"), "loss", save_freq=100),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of one epoch, and the content of its checkpoint."""
    folder = tmp_path_factory.mktemp("begun")
    model = network(1)
    fit(model, batches(), keeping(folder), checkpoint_in(folder, keep=1), epochs=1)
    (path,) = folder.glob("*.kmg")
    with path.open("rb") as file:
        return folder, decode(file)


def changed(tree, place, value):
    """A copy with another value in one place."""
    if not place:
        return value
    name, *inner = place
    if isinstance(tree, dict):
        return {**tree, name: changed(tree.get(name), inner, value)}
    return type(tree)([*tree[:name], changed(tree[name], inner, value), *tree[name + 1 :]])


def resumed(tree, folder, *more):
    """Resume from a tree; returns the text of the error, after which nothing has changed."""
    folder.mkdir()
    with (folder / "checkpoint-000001.kmg").open("wb") as file:
        Encoded(tree).write_to(file)
    model = network(1)
    before, callbacks = values_of(model), [*keeping(folder), *more]
    try:
        fit(model, batches(), callbacks, checkpoint_in(folder), epochs=2)
    except ValueError as error:
        assert ". Expected " in str(error)
        assert_same_values(before, values_of(model))
        return str(error)
    finally:
        close_files([each for each in callbacks if getattr(each, "csv_file", None)])
    return None


@pytest.mark.parametrize(
    ("place", "value", "phrase"),
    [
        (("run", "step"), 7, "its 'run.step' cannot be 7"),
        (("run", "micro_batches"), 2**39, "its 'run.micro_batches' cannot be 549755813888"),
        (("run", "epoch"), -1, "its 'run.epoch' cannot be -1"),
        (("run", "epoch"), 2**70, "its 'run.epoch' cannot be 11805916"),
        (("run", "global_batch_size"), "text", "its 'run.global_batch_size' cannot be 'text'"),
        (("run",), [[]], "its 'run' cannot be "),
        ((), None, "it has no 'run'"),
        (("run", "logs"), 7, "is not the checkpoint of a run: "),
        (("rates",), [], "its 'rates' are not those of its optimizers"),
        (("random", "python"), (3, (1, 2), None), "is not the checkpoint of a run: "),
        (("made", "layers"), np.zeros(2), "is not the checkpoint of a run: |is of another model"),
        (("model", "weights/0"), (), "is not the checkpoint of a run: "),
        (("model", "weights/0"), np.zeros(2), "is of another model: .*kernel is float32 of shape"),
    ],
)
def test_an_odd_entry_is_named(begun, tmp_path, place, value, phrase):
    assert re.search(phrase, resumed(changed(begun[1], place, value), tmp_path / "run"))


def test_only_what_was_saved_is_restored(tmp_path):
    """No other attribute: the path of another callback would be a file to overwrite."""
    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "mine.keras"))
    odd = {"filepath": "/etc/passwd", "_current_epoch": 7, "save_weights_only": True}
    other = keras.callbacks.EarlyStopping("loss")
    restore_states(
        [saved, other],
        {
            "ModelCheckpoint": {"public": {"best": 0.5, **odd}, "counters": odd, "own": odd},
            "EarlyStopping": {"public": {**odd, "wait": 3}, "counters": odd, "own": odd},
        },
    )
    assert (saved.filepath, saved.best, saved._current_epoch) == (
        str(tmp_path / "mine.keras"),
        0.5,
        7,
    )
    assert not saved.save_weights_only and not hasattr(saved, "state")
    assert other.wait == 3 and not hasattr(other, "filepath") and not hasattr(other, "state")


def test_a_callback_that_rejects_its_state_is_named(begun, tmp_path):
    """Only the callback knows what its state must be. The model is unchanged."""

    class Counting(keras.callbacks.Callback):
        @property
        def state(self):
            return {"seen": 0}

        @state.setter
        def state(self, state):
            self.seen = state["seen"]

    tree = changed(begun[1], ("callbacks", "Counting"), {"own": {"lost": 1}})
    phrase = "Counting rejects its state: KeyError: 'seen'"
    assert phrase in resumed(tree, tmp_path / "run", Counting())


def test_a_state_that_is_not_a_dict_is_left_alone():
    class Machine(keras.callbacks.Callback):
        state = "running"

    restore_states([machine := Machine()], {"Machine": {"own": {"a": 1}}})
    assert machine.state == "running" and states_of([machine]) == {}


def test_other_versions_and_cores_are_logged_in_one_line(begun, tmp_path, caplog):
    tree = changed(begun[1], ("made_with", "TensorFlow"), "2.0.0")
    tree = changed(tree, ("made_with", "cores"), 99)
    assert resumed(tree, tmp_path / "run") is None
    (line,) = [line for line in caplog.messages if "was saved with" in line]
    assert "was saved with TensorFlow 2.0.0 and 99 cores, this is TensorFlow 2." in line
    assert begun[1]["made_with"].keys() == {
        "Keras",
        "TensorFlow",
        "Python",
        "keras_multigpu",
        "cores",
    }
