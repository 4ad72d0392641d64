"""Out-of-memory errors: known, predicted, and real ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE

from keras_multigpu.callbacks import batch_size_finder
from keras_multigpu.callbacks.batch_size_finder import HostMemory, is_out_of_memory


def test_errors_for_lack_of_memory_are_known():
    operation = tf.errors
    assert is_out_of_memory(operation.ResourceExhaustedError(None, None, "OOM"))
    assert is_out_of_memory(operation.InternalError(None, None, "Dst tensor is not initialized."))
    assert is_out_of_memory(operation.UnknownError(None, None, "CUDA_ERROR_OUT_OF_MEMORY: out"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(operation.InvalidArgumentError(None, None, "Incompatible shapes"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_memory_of_larger_batches_is_predicted_on_cpus(monkeypatch):
    """With 1000 bytes an example, 90% of 100 kB hold 90 examples."""
    monkeypatch.setattr(batch_size_finder, "resident_bytes", lambda: 5_000)
    monkeypatch.setattr(batch_size_finder, "peak_bytes", lambda: 13_000)
    monkeypatch.setattr(batch_size_finder, "available_bytes", lambda: 100_000)
    memory = HostMemory(["/device:CPU:0"])
    assert not memory.is_too_small(10**9)
    memory.learn(8)
    assert [memory.is_too_small(size) for size in (90, 91)] == [False, True]
    gpu = HostMemory(["/device:GPU:0"])
    gpu.learn(8)
    assert not gpu.is_too_small(10**9)


def test_the_system_says_what_memory_there_is():
    now, most = batch_size_finder.resident_bytes(), batch_size_finder.peak_bytes()
    assert 10**7 < now <= most * 1.01
    assert batch_size_finder.available_bytes() > 10**6


@pytest.mark.in_test_all("other tests raise the errors of TensorFlow")
def test_the_search_survives_running_out_of_memory():
    """In a process that may use 1000 MB more, 7 to 15 rows of 64 MB fit.

    On CPUs TensorFlow keeps the memory of the smaller sizes, so half may have to do.
    """
    program = Path(__file__).with_name("limited_memory_process.py")
    ended = subprocess.run(
        [sys.executable, str(program), "1000"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert 7 <= found["largest"] <= 15, found
    assert found["unchanged"]
