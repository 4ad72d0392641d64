"""`kmg.cluster.local` runs a notebook's function on workers of this machine."""

import functools
import sys
import threading

import keras
import pytest

import keras_multigpu as kmg
from keras_multigpu.processes import functions

CELL = """
import keras
import keras_multigpu as kmg

@keras.saving.register_keras_serializable()
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

UNITS = 3

def train(scale):
    print("replicas:", kmg.strategy().num_replicas_in_sync)
    model = keras.Sequential([keras.Input((2,)), Twice(), keras.layers.Dense(UNITS)])
    return model, scale
"""


@pytest.fixture
def cell(monkeypatch):
    """The names that a cell defines in a notebook, whose `__main__` is not a file."""
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    known = dict(keras.saving.get_custom_objects())
    exec(compile(CELL, "<cell>", "exec"), vars(main))
    yield main
    keras.saving.get_custom_objects().clear()
    keras.saving.get_custom_objects().update(known)


@pytest.mark.slow
def test_a_function_of_a_cell_runs_on_two_workers(cell, capsys):
    """What it uses goes along, even a layer registered with Keras, and its value comes back."""
    model, scale = kmg.cluster.local(functools.partial(cell.train, 4), 2)
    assert scale == 4
    assert [type(layer) for layer in model.layers] == [cell.Twice, keras.layers.Dense]
    assert model.output_shape == (None, 3)
    lines = capsys.readouterr().out.splitlines()
    assert {"[worker 0] replicas: 2", "[worker 1] replicas: 2"} <= set(lines)


def test_a_function_that_cannot_be_pickled_is_refused(monkeypatch):
    lock = threading.Lock()
    with pytest.raises(ValueError, match="`fn` cannot be copied to another process.*lock.*inside"):
        kmg.cluster.local(lambda: lock)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match="cannot be imported by another process") as error:
        functions.function_request("fn", lambda: 0, "so it is")
    assert error.value.__notes__ == ["`pip install cloudpickle` lets it be copied instead."]
    with pytest.raises(ValueError, match="`num_workers` is not a positive integer"):
        kmg.cluster.local(print, 0)
