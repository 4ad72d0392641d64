"""The gate between tf.data's threads and Python: at Python's end nobody is behind it."""

import threading
import time
import types

import pytest
from processes_left import PATIENCE

from keras_multigpu.data.road import loader
from keras_multigpu.data.road.loader import Gate


def test_the_gate_waits_for_threads_that_are_still_in_python():
    """Also behind the gate, where TensorFlow makes the text of an error: an end there hangs."""
    gate = Gate()
    inside, gone = threading.Event(), []

    def call():
        with gate:
            inside.set()
        time.sleep(0.3)
        gone.append(True)

    threading.Thread(target=call).start()
    assert inside.wait(PATIENCE)
    gate.close()
    assert gone == [True]
    with pytest.raises(RuntimeError, match="Python is ending"), gate:
        pass


def test_the_gate_waits_until_nobody_comes_any_more(monkeypatch):
    """A pipeline goes on for a while, and its calls are turned away."""
    gate, turns, refused = Gate(), iter(range(20)), []

    def call():
        try:
            with gate:
                pass
        except RuntimeError:
            refused.append(True)

    def somebody_comes():
        other = threading.Thread(target=call)
        other.start()
        other.join()

    def sleep(seconds):
        """In every other of its waits, ten times."""
        if next(turns, 0) % 2:
            somebody_comes()

    somebody_comes()
    assert not refused
    clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(loader, "time", clock)
    gate.close(PATIENCE)
    assert len(refused) == 10


def test_the_gate_does_not_wait_for_ever():
    """A thread that never leaves Python must not keep the process."""
    gate = Gate()
    inside, stop = threading.Event(), threading.Event()

    def call():
        with gate:
            inside.set()
            stop.wait()

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(PATIENCE)
    gate.close(patience=0.1)
    assert thread.is_alive()
    stop.set()
    thread.join()
