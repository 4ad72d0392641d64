"""The gate between tf.data's threads and Python: at Python's end nobody is behind it."""

import threading
import time

import pytest

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
    assert inside.wait(10)
    gate.close()
    assert gone == [True]
    with pytest.raises(RuntimeError, match="Python is ending"), gate:
        pass


def test_the_gate_waits_until_nobody_comes_any_more():
    """A pipeline goes on for a while, and its calls are turned away."""
    gate = Gate()
    with gate:
        pass
    refused = []

    def calls():
        for _ in range(10):
            try:
                with gate:
                    pass
            except RuntimeError:
                refused.append(True)
            time.sleep(0.02)

    others = threading.Thread(target=calls)
    others.start()
    gate.close()
    assert len(refused) >= 9
    others.join()


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
    assert inside.wait(10)
    start = time.monotonic()
    gate.close(patience=0.1)
    assert time.monotonic() - start < 5
    stop.set()
    thread.join()
