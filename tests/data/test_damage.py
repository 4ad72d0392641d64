"""Damaged images are named with their cause, or skipped with `on_error="skip"`."""

import errno
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.picture_files import encoded, picture

import keras_multigpu as kmg
from keras_multigpu.data import from_files
from keras_multigpu.data.pipeline.damage import DamagedExample, Quarantine
from keras_multigpu.training.loops import with_gaps

JPEG = encoded(picture(), "JPEG", quality=90)
PNG = encoded(picture())


def denied(path):
    """Make an unreadable file; for root, a link to one that the kernel protects."""
    path.write_bytes(JPEG)
    path.chmod(0)
    if os.access(path, os.R_OK):
        path.unlink()
        path.symlink_to(unreadable_even_by_root())


def unreadable_even_by_root():
    for name in ("/proc/self/mem", "/proc/1/mem", "/proc/kcore", "/proc/kmsg", "/proc/1/environ"):
        try:
            os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError:
            return name
        except OSError:
            continue
    pytest.skip("This user may read everything.")


DAMAGES = {
    "truncated": (
        lambda path: path.write_bytes(JPEG[:500]),
        "it is truncated: its end is missing after 500 bytes",
    ),
    "folder": (Path.mkdir, "it is a directory"),
    "missing": (lambda path: None, "it does not exist, or not any more"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "it does not exist, or not any more"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "pipe": (os.mkfifo, "it is not a regular file"),
    "denied": (denied, "permission to read it is denied"),
}


def well(tmp_path):
    """Six intact images."""
    paths = [tmp_path / f"{number}.jpg" for number in range(6)]
    for path in paths:
        path.write_bytes(JPEG)
    return paths


def batches_of(paths, **settings):
    """Batches whose labels are the positions of the files in the list."""
    labels = np.arange(len(paths), dtype=np.float32) + 0.5
    settings = {"shuffle": False, "global_batch_size": 3, "image_size": (30, 40), **settings}
    return from_files([str(path) for path in paths], labels, task="regression", **settings)


@pytest.fixture(params=DAMAGES)
def damaged(request, tmp_path):
    """A damaged file and its cause."""
    damage, cause = DAMAGES[request.param]
    damage(tmp_path / "bad.jpg")
    return tmp_path / "bad.jpg", cause


def test_a_damaged_file_is_named_or_left_out_and_listed(damaged, tmp_path):
    """The other examples of its batch stay in order, and there is one warning."""
    bad, cause = damaged
    paths = well(tmp_path)
    paths.insert(4, bad)
    with pytest.raises(Exception, match=re.escape(f"{bad} cannot be read: {cause}.")) as error:
        list(batches_of(paths).epoch(0))
    assert 'or pass on_error="skip" to train without it.' in str(error.value)
    batches = batches_of(paths, on_error="skip")
    with pytest.warns(UserWarning, match="Epoch 1 skipped 1 damaged example: ") as warned:
        labels = [y.numpy().tolist() for _, y in batches.epoch(0)]
    assert labels == [[0.5, 1.5, 2.5], [3.5, 5.5], [6.5]]
    assert batches.quarantine == [(str(bad), cause)]
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="Epoch 1 skipped 1 damaged example: "):
        list(batches.epoch(0, start=3))
    with pytest.warns(UserWarning, match="Epoch 1 skipped 1 damaged example: "):
        prediction = [*batches.reading("prediction").epoch(0)]
    # It keeps its row there.
    rows = [weight.numpy().tolist() for _, _, weight in prediction]
    assert rows == [[1, 1, 1], [1, 0, 1], [1]]


@pytest.mark.parametrize("name", ["a\0b.jpg", "a\ud800.jpg"], ids=["zero byte", "surrogate"])
def test_impossible_paths_are_damage(name, tmp_path):
    """For an image, with and without a cache, and for a mask."""
    paths = well(tmp_path)[:3]
    bad = f"{tmp_path}/{name}"
    shown = f"{tmp_path}/{ascii(name)[1:-1]}"
    for settings in ({}, {"cache": tmp_path / "cache"}):
        batches = batches_of([*paths, bad], on_error="skip", **settings)
        with pytest.warns(UserWarning, match="skipped 1 damaged example"):
            assert sum(len(y) for _, y in batches.epoch(0)) == 3
        ((damaged, cause),) = batches.quarantine
        assert damaged == batches.file_paths[3] == bad
        assert cause.startswith("no file can have this path: ")
    with pytest.raises(Exception, match=re.escape(f"{shown} cannot be read: no file can have ")):
        list(batches_of([*paths, bad]).epoch(0))
    masks = [*map(str, paths[:2]), bad]
    masks = from_files([str(path) for path in paths], masks, task="mask", on_error="skip")
    with pytest.warns(UserWarning, match=re.escape(f"its mask {shown}: no file can have ")):
        list(masks.epoch(0))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("kind", ["files", "items"])
def test_what_the_machine_cannot_read_now_is_not_skipped(number, kind, tmp_path, monkeypatch):
    """It says nothing about the example, which may be intact."""
    paths = [str(path) for path in well(tmp_path)]

    class Items:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 2:
                raise OSError(number, os.strerror(number))
            return np.ones(3)

    if kind == "files":
        opened = os.open

        def fails(path, *arguments, **more):
            if path == paths[2]:
                raise OSError(number, os.strerror(number))
            return opened(path, *arguments, **more)

        monkeypatch.setattr(os, "open", fails)
        batches = batches_of(paths, on_error="skip")
    else:
        batches = kmg.data.from_source(Items(), global_batch_size=2, on_error="skip")
    with pytest.raises(tf.errors.OpError, match=f"not be read: {os.strerror(number)}") as error:
        list(batches.epoch(0))
    assert batches.quarantine == []
    assert isinstance(batches.reading().failure_in(error.value), OSError)


def test_the_failure_that_ended_reading_is_found_among_several():
    """Failures before or after it are not mistaken for it."""
    quarantine = Quarantine()
    damaged = [quarantine.failed(DamagedExample("it is empty", name)) for name in "abc"]
    error = RuntimeError(f"{{{{node read_batch}}}} DamagedExample: {damaged[1]}\nTraceback ...")
    assert quarantine.failure_in(error) is damaged[1]
    assert quarantine.failure_in(RuntimeError("Out of memory")) is None
    # One text within the other.
    short, long = (quarantine.failed(ValueError(text)) for text in ("no item", "no item b"))
    assert quarantine.failure_in(RuntimeError(f"ValueError: {long}")) is long
    assert quarantine.failure_in(RuntimeError(f"ValueError: {short}")) is short


def linear_model(strategy=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model = kmg.distribute(model, strategy) if strategy else model
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@pytest.mark.slow
def test_predictions_can_be_assigned_to_their_files(tmp_path):
    images = [picture(8, 8) // (1 + number) for number in range(11)]
    for number, image in enumerate(images):
        (tmp_path / f"{number:02}.png").write_bytes(encoded(image))
    for number in (1, 4, 5, 10):
        (tmp_path / f"{number:02}.png").write_bytes(PNG[:100])
    paths = sorted(tmp_path.iterdir())
    weights = np.arange(11.0)
    batches = batches_of(
        paths, sample_weight=weights, on_error="skip", global_batch_size=2, image_size=(8, 8)
    )
    ours = linear_model(kmg.strategy(devices=2))
    with pytest.warns(UserWarning, match="skipped 4 damaged examples"):
        predictions = ours.predict(batches, verbose=0)[:, 0]
    rows = dict(zip(map(Path, batches.file_paths), predictions, strict=True))
    expected = linear_model().predict(np.stack(images), verbose=0)[:, 0]
    expected[[1, 4, 5, 10]] = np.nan
    np.testing.assert_allclose([rows[path] for path in paths], expected, rtol=2e-5)


def test_predictions_that_cannot_be_nan_are_refused():
    flags = tf.constant([1.0, 0.0])
    with pytest.raises(ValueError, match="cannot be NaN.*Received: predictions="):
        with_gaps({"class": tf.constant([1, 2])}, flags)
    np.testing.assert_array_equal(with_gaps(tf.constant([1.0, 2.0]), flags), [1, np.nan])
