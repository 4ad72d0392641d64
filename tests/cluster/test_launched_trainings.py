"""What is said last of a training under `keras-multigpu launch`, about what went wrong in it."""

import sys
from pathlib import Path

import pytest
from helpers.processes_left import as_users_start_it, ended_process

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import keras, numpy as np
import keras_multigpu as kmg

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if sys.argv[1] == "fails" and batch == 1 and not kmg.cluster.is_chief():
            raise ZeroDivisionError("a bug")

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
if sys.argv[1] == "fails":
    model = kmg.distribute(model)
model.compile("sgd", "mse")
model.fit(np.ones((8, 3)), np.ones((8, 1)), 2, verbose=0, callbacks=[Fails()])
"""


def launched(folder, what):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "keras_multigpu", "launch", "--workers", "2", str(script), what]
    return ended_process(words, env=as_users_start_it(Path(__file__).parents[2]), cwd=folder)


def test_the_worker_that_failed_first_is_the_last_that_is_shown(tmp_path):
    """Of the other one only the sentence that names it, without a traceback."""
    ended = launched(tmp_path, "fails")
    own, said = "keras-multigpu launch: worker 1 ", ended.stderr.splitlines()
    assert ended.returncode and said[0].startswith(own), ended.stderr
    assert said[-1] == "    ZeroDivisionError: a bug"
    others = [line for line in ended.stdout.splitlines() if line.startswith("[worker 0] ")]
    assert not any("Traceback" in line for line in others), ended.stdout


def test_workers_that_train_each_for_itself_are_told(tmp_path):
    ended = launched(tmp_path, "forgets")
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if "no model was distributed" in line]
    assert len(said) == 1 and said[0].startswith("[worker 0] "), ended.stdout
