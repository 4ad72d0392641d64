"""Many epochs leak no memory."""

import ctypes
import gc
import sys

import pytest
import tensorflow as tf
from helpers.small_image_files import write_two_classes

import keras_multigpu as kmg

EPOCHS = 30


class Memory(ctypes.Structure):
    """The C library's memory statistics."""

    _fields_ = [  # noqa: RUF012 - the name is ctypes's.
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keepcost".split()
    ]


def growth(dataset):
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = Memory
    seen = []
    for epoch in range(EPOCHS + 10):
        for _ in dataset:
            pass
        if epoch in (9, EPOCHS + 9):
            gc.collect()
            seen.append((library.mallinfo2().used, len(gc.get_objects())))
    return [(after - before) / EPOCHS for before, after in zip(*seen, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc for the memory in use")
@pytest.mark.slow
def test_reading_image_files_leaks_no_memory(tmp_path):
    """Apart from about a kB that TensorFlow keeps for every iterator."""
    files = kmg.data.from_directory(
        write_two_classes(tmp_path),
        image_size=(8, 8),
        global_batch_size=8,
        verbose=False,
    )
    plain = tf.data.Dataset.range(4).map(lambda number: number + 1, num_parallel_calls=2)
    options = tf.data.Options()
    options.autotune.enabled = False
    bytes_of_plain, _ = growth(plain.prefetch(2).with_options(options))
    bytes_of_files, objects = growth(files.epoch(0))
    # An earlier leak was 26 kB an epoch. After the whole folder's tests, glibc's count varies by
    # 2 kB.
    assert bytes_of_files < bytes_of_plain + 4000
    assert objects < 0.2
