"""The gate between tf.data's threads and Python, which lets nothing through at shutdown."""

import gc
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE

from keras_multigpu.data import from_arrays
from keras_multigpu.data.pipeline import loader
from keras_multigpu.data.pipeline.damage import Quarantine
from keras_multigpu.data.pipeline.loader import Ending, Gate, submit, through_gate


def test_the_gate_waits_for_threads_that_are_still_in_python():
    """Even past the gate, where TensorFlow turns errors into text: ending there would hang."""
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
    with pytest.raises(Ending, match="no longer needed"), gate:
        pass


def test_the_gate_forgets_threads_that_have_ended():
    gate = Gate()

    def call():
        with gate:
            pass

    threads = [threading.Thread(target=call) for _ in range(600)]
    for thread in threads:
        thread.start()
        thread.join(PATIENCE)
    assert len(gate._threads) < 300


def test_the_gate_waits_until_calls_stop(monkeypatch):
    """A pipeline keeps calling for a while, and is refused."""
    gate, turns, refused = Gate(), iter(range(20)), []

    def call():
        try:
            with gate:
                pass
        except Ending:
            refused.append(True)

    def somebody_comes():
        other = threading.Thread(target=call)
        other.start()
        other.join(PATIENCE)

    def sleep(seconds):
        if next(turns, 0) % 2:
            somebody_comes()

    somebody_comes()
    assert not refused
    clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(loader, "time", clock)
    gate.close(PATIENCE)
    assert len(refused) == 10


def test_the_gate_does_not_wait_forever():
    gate = Gate()
    inside, stop = threading.Event(), threading.Event()

    def call():
        with gate:
            inside.set()
            stop.wait(PATIENCE)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(PATIENCE)
    gate.close(patience=0.1)
    assert thread.is_alive()
    stop.set()
    thread.join(PATIENCE)


def test_elements_end_silently_when_python_shuts_down():
    """At the gate, or in an executor, which closes earlier; neither counts as a failure."""
    pool, quarantine = ThreadPoolExecutor(1), Quarantine()
    pool.shutdown()

    def elements():
        yield 1
        yield submit(pool, int)

    assert list(through_gate(elements(), quarantine)) == [1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "GATE", Gate())
        loader.GATE.close()
        assert list(through_gate(iter([1, 2]), quarantine)) == []
    assert quarantine.failure_in(RuntimeError("generator raised StopIteration")) is None


def test_reading_after_the_dataset_is_gone_prints_nothing(capfd):
    """An iterator may be dropped early. A caller still waiting for it gets an error."""
    dataset = from_arrays(np.arange(8), global_batch_size=4).epoch(0)
    variant, spec = tf.data.experimental.to_variant(dataset), dataset.element_spec
    del dataset
    gc.collect()
    with pytest.raises(tf.errors.OpError, match="no longer needed"):
        next(iter(tf.data.experimental.from_variant(variant, spec)))
    assert "Traceback" not in capfd.readouterr().err
