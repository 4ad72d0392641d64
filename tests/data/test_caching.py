"""Examples are decoded once, with a cache in memory or in a folder."""

import logging
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from numbered_examples import Numbers, fill, numbers_of

from keras_multigpu.data import Batches, from_arrays
from keras_multigpu.data.caching import filling


@pytest.fixture(params=["memory", "folder"])
def where(request, tmp_path):
    return "memory" if request.param == "memory" else tmp_path / "cache"


def noise(x, seeds):
    drawn = tf.abs(tf.cast(seeds[:, 0], tf.float32)) / 2.0**31
    return tf.cast(x, tf.float32) + drawn[:, None, None, None]


@pytest.mark.parametrize("augment", [None, noise])
def test_a_cache_changes_nothing_and_each_example_is_decoded_once(where, augment):
    """Whatever the order and the draws of an epoch; copies share the cache."""
    source = Numbers(10)
    settings = {"global_batch_size": 4, "augment": augment}
    plain, kept = Batches(Numbers(10), **settings), Batches(source, **settings, cache=where)
    copies = [(one, one.evaluation(), one.with_(seed=5)) for one in (plain, kept)]
    for number, epoch in ((0, 0), (0, 1), (1, 0), (2, 0)):
        wanted, found = (copy[number].epoch(epoch) for copy in copies)
        assert found.element_spec == wanted.element_spec
        for batches in zip(found, wanted, strict=True):
            for one, other in zip(*batches, strict=True):
                np.testing.assert_array_equal(one, other)
    assert sorted(source.read_ones) == list(range(10))


def test_a_part_decodes_only_its_own_examples(where):
    source = Numbers(100)
    part = Batches(source, global_batch_size=4, cache=where, shuffle=False).take(10)
    assert numbers_of(part.epoch(0)) == list(range(10))
    assert sorted(source.read_ones) == list(range(10))
    # A part of a part, and the whole, add what is missing.
    halves = [numbers_of(half.epoch(0)) for half in part.split(0.5)]
    assert sorted(halves[0] + halves[1]) == list(range(10))
    assert len(source.read_ones) == 10
    whole = Batches(source, global_batch_size=7, cache=where)
    assert sorted(numbers_of(whole.epoch(0))) == list(range(100))
    assert sorted(source.read_ones) == list(range(100))


# Damage.


def test_damaged_examples_are_reported_in_every_epoch(where):
    source = Numbers(10, damaged=[3, 7])
    batches = Batches(source, global_batch_size=4, cache=where, on_error="skip")
    for epoch in range(2):
        with pytest.warns(UserWarning, match=f"Epoch {epoch + 1} skipped 2 damaged examples"):
            assert sorted(numbers_of(batches.epoch(epoch))) == [0, 1, 2, 4, 5, 6, 8, 9]
    assert {tuple(entry) for entry in batches.quarantine} == {
        ("example 3 of numbers", "torn in two"),
        ("example 7 of numbers", "torn in two"),
    }
    assert len(source.read_ones) == 10


def test_a_damaged_example_raises_when_it_is_used(where):
    source = Numbers(10, damaged=[3])
    batches = Batches(source, global_batch_size=1, cache=where, shuffle=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="example 3 of numbers cannot be read"):
        numbers_of(batches.epoch(0))
    assert numbers_of(batches.epoch(0, start=4)) == [4, 5, 6, 7, 8, 9]
    assert len(source.read_ones) == 10


@pytest.mark.slow
def test_examples_read_before_an_error_stay_cached(where="memory"):
    class Interrupted(Numbers):
        def read_one(self, index, seed):
            if index == 900 and not self.repaired:
                raise RuntimeError("the disk is gone")
            return super().read_one(index, seed)

    source = Interrupted(1000)
    source.repaired = False
    batches = Batches(source, global_batch_size=10, cache=where)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        batches.epoch(0)
    source.repaired = True
    source.read_ones.clear()
    assert len(set(numbers_of(batches.epoch(0)))) == 256
    assert 100 <= len(source.read_ones) <= 600


def test_texts_are_cached_in_memory_only(tmp_path):
    texts = np.array(["text 0", "text 1", "text 2"])
    batches = from_arrays(texts, global_batch_size=2, cache="memory", shuffle=False)
    assert [x.numpy().tolist() for x in batches.epoch(0)] == [[b"text 0", b"text 1"], [b"text 2"]]
    with pytest.raises(ValueError, match=r"hold text\. .*cache=\"memory\".* Received"):
        from_arrays(texts, cache=tmp_path)


def test_too_little_memory_is_refused():
    source = Numbers(10)
    source.spec = (tf.TensorSpec((2**40,), tf.float32), None, None)
    with pytest.raises(MemoryError, match=r"take 40 TiB, and .* of memory are available\. .* 90%"):
        fill(source, "memory")
    assert source.read_ones == []


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("is_long", [True, False])
def test_only_long_work_shows_its_progress(capsys, caplog, monkeypatch, terminal, is_long):
    monkeypatch.setattr(filling, "QUIET_SECONDS", 0 if is_long else 60)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        fill(Numbers(100), "memory")
    lines = [
        "Caching 100 examples of numbers in memory (800 bytes).",
        "Cached 100 examples in 0 s.",
    ]
    assert caplog.messages == lines * is_long
    assert ("100/100" in capsys.readouterr().out) == (terminal and is_long)


def test_after_an_error_no_further_piece_is_read():
    class Failing(Numbers):
        def read_one(self, index, seed):
            if index == 0:
                raise RuntimeError("the disk is gone")
            time.sleep(0.001)  # Reading all of the others would take many seconds.
            return super().read_one(index, seed)

    source = Failing(50_000)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        fill(source, "memory")
    assert len(source.read_ones) < 25_000
