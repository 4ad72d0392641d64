"""`BatchSizeFinder` finds the largest size that fits, and leaves no trace of its search."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit
from helpers.rows_in_python import zeros_after

import keras_multigpu as kmg
from keras_multigpu.callbacks import batch_size_finder
from keras_multigpu.callbacks.batch_size_finder import (
    BatchSizeFinder,
    HostMemory,
    is_out_of_memory,
    largest_size,
)
from keras_multigpu.callbacks.trials import resize_batch
from keras_multigpu.training.watching.probe import Probe

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(90, 3)).astype("float32")
Y = RANDOM.integers(0, 2, 90)


def network(replicas=None, *first, **compiled):
    """A small model; of plain Keras, for a fake run, for None."""
    model = keras.Sequential([keras.Input((3,)), *first, keras.layers.Dense(2)])
    model = model if replicas is None else on_replicas(model, replicas)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **compiled)
    return model


def search(*callbacks, model=None, **arguments):
    """The history of a fake run in batches of six, on two replicas with so much memory."""
    given = {"x": X, "y": Y, "batch_size": 6, "epochs": 0, "replicas": 2, **arguments}
    return fake_fit(model or network(), *callbacks, **given).history


def search_for_real(model, finder, x=X, y=Y, **arguments):
    data = kmg.data.from_arrays(x, y, global_batch_size=8, shuffle=False)
    model.fit(data, epochs=0, callbacks=[finder], verbose=0, **arguments)
    return finder


def sizes(finder):
    return [(one.replica_batch_size, one.fits) for one in finder.tries]


class Hungry(keras.layers.Layer):
    """Runs out of memory if a replica's rows `fail`."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def call(self, x):
        def check(rows):
            if self.fails(rows):
                raise MemoryError("not enough")

        return x + zeros_after(check, x)


@pytest.mark.parametrize(
    ("largest", "minimum", "maximum", "slack", "found"),
    [
        (11, 1, None, 0.0, (11, 12)),
        (11, 1, 8, 0.0, (8, None)),
        (11, 1, 11, 0.0, (11, None)),
        (11, 3, 100, 0.0, (11, 12)),
        (1, 1, None, 0.0, (1, 2)),
        (0, 1, None, 0.0, (None, 1)),
        (64, 64, 64, 0.0, (64, None)),
        (1000, 1, None, 0.0, (1000, 1001)),
        # A size that does not fit can take ten seconds, while TensorFlow waits for memory.
        (1000, 1, None, 0.05, (992, 1024)),
    ],
)
def test_the_largest_size_is_found_by_doubling_and_halving(largest, minimum, maximum, slack, found):
    """In at most two tries for each binary digit, and never above `maximum`."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    assert largest_size(fits, minimum, maximum, slack) == found
    assert len(tried) == len(set(tried)) <= 2 * max(largest, 1).bit_length() + 2
    assert maximum is None or max(tried) <= maximum


def test_the_limit_of_a_replica_is_found(capsys, monkeypatch):
    """13 rows fit on each replica."""
    monkeypatch.setattr("keras_multigpu.callbacks.batch_size_finder.MARGIN", 0.0)
    finder = BatchSizeFinder(None)
    search(finder, memory=13)
    expected = [(1, True), (2, True), (4, True), (8, True), (16, False), (12, True)]
    expected += [(14, False), (13, True)]
    assert sizes(finder) == expected
    assert finder.largest_replica_batch_size == finder.best_replica_batch_size == 13
    assert capsys.readouterr().out == (
        "BatchSizeFinder: 13 examples fit on each replica and 14 do not; nothing is changed.\n"
    )
    assert all((one.seconds is not None) == one.fits for one in finder.tries)
    assert {one.peak_bytes for one in finder.tries} == {None}


def test_a_margin_is_left_where_memory_is_the_limit(capsys):
    """A tenth of 13 is more than one example, so 11 are used."""
    search(finder := BatchSizeFinder(None), memory=13)
    assert (finder.largest_replica_batch_size, finder.best_replica_batch_size) == (13, 11)
    assert (
        "13 examples fit on each replica and 14 do not, 11 with a margin" in capsys.readouterr().out
    )


def test_no_margin_is_left_where_maximum_or_the_data_are_the_limit(capsys):
    """90 examples on two replicas are 45 for each."""
    search(finder := BatchSizeFinder(None))
    assert finder.best_replica_batch_size == 45
    assert "45 examples fit on each replica, the most that the number of ex" in (
        capsys.readouterr().out
    )
    search(finder := BatchSizeFinder(None, maximum=7))
    assert finder.best_replica_batch_size == 7
    assert sizes(finder) == [(1, True), (2, True), (4, True), (7, True)]
    assert "the most that `maximum` allows" in capsys.readouterr().out


@pytest.mark.usefixtures("python_sees_rows")
def test_one_replica_that_fails_is_enough():
    """The first batch has 4 small rows for one replica, and 4 large ones for the other."""
    model = network(2, Hungry(lambda rows: len(rows) > 3 and (rows > 99.0).any()))
    x = X[:40].copy()
    x[4:] = 100.0
    finder = search_for_real(model, BatchSizeFinder(None, verbose=0), x, Y[:40])
    assert finder.largest_replica_batch_size == 3


def test_eager_steps_are_tried_eagerly():
    """`run_eagerly=True` needs no graph."""
    model = network(1, Hungry(lambda rows: len(rows) > 5), run_eagerly=True)
    finder = search_for_real(model, BatchSizeFinder(None, verbose=0))
    assert finder.largest_replica_batch_size == 5


def test_batches_of_any_tensors_are_resized():
    """Ragged and sparse rows are repeated, and scalars are shared."""
    ragged = tf.ragged.constant([[1], [2, 3], [4, 5, 6]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [3, 4]])
    batch = ({"r": ragged, "s": sparse, "d": tf.constant([1, 2, 3])}, None, tf.constant(0.5))
    x, y, weight = resize_batch(batch, 5)
    assert x["r"].to_list() == [[1], [2, 3], [4, 5, 6], [1], [2, 3]]
    expected = [[0, 1], [2, 0], [3, 4], [0, 1], [2, 0]]
    np.testing.assert_array_equal(tf.sparse.to_dense(x["s"]), expected)
    np.testing.assert_array_equal(x["d"], [1, 2, 3, 1, 2])
    assert (y, float(weight)) == (None, 0.5)
    np.testing.assert_array_equal(resize_batch(batch, 2)[0]["d"], [1, 2])


def test_leaves_of_other_lengths_keep_their_ratio():
    """Of 2 labelled and 5 unlabelled rows 4 and 10, or 1 and 3; one row for all stays one."""
    x = {"labelled": tf.range(2), "unlabelled": tf.range(5), "shared": tf.constant([7])}
    for size, rows in ((4, [4, 10, 1]), (1, [1, 3, 1])):
        resized, y, _ = resize_batch((x, tf.range(2), None), size)
        assert [int(resized[name].shape[0]) for name in x] == rows
        assert int(y.shape[0]) == size
    assert resize_batch((tf.constant([7]), None, None), 3)[0].numpy().tolist() == [7, 7, 7]


@pytest.mark.usefixtures("python_sees_rows")
def test_a_model_that_does_not_fit_at_all_is_an_error():
    """The model is unchanged, and the error says what to do."""
    model = network(1, Hungry(lambda rows: True))
    before = model.get_weights()
    with pytest.raises(MemoryError, match="with 1 examples on each .*Received: minimum=1, repl"):
        search_for_real(model, BatchSizeFinder())
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_errors_other_than_memory_are_raised():
    """A step that fails does so as in training."""
    model = network()
    model.train_step = lambda data: tf.debugging.check_numerics(1.0 / tf.zeros(()), "it is broken")
    with pytest.raises(tf.errors.InvalidArgumentError, match="it is broken"):
        search(BatchSizeFinder(verbose=0), model=model)


class Count(Probe):
    def build(self, strategy):
        self.steps = tf.Variable(0)

    def collect(self, measured, allowed):
        self.steps.assign_add(1)


def test_probes_of_other_callbacks_see_no_trial():
    """They would count examples that are not trained on."""
    probe = Count()

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.watch(probe)

    callbacks = [BatchSizeFinder(None, maximum=8, verbose=0), Watch()]
    network(1).fit(X, Y, batch_size=6, verbose=0, callbacks=callbacks)
    assert probe.steps.numpy() == 15


@pytest.mark.parametrize("order", [1, -1])
def test_the_rate_is_scaled_with_the_size_that_is_found(order, monkeypatch):
    """9 examples on two replicas instead of a base of 6 in all: three times the rate."""
    monkeypatch.setattr("keras_multigpu.callbacks.batch_size_finder.MARGIN", 0.0)
    callbacks = [
        BatchSizeFinder(verbose=0),
        kmg.callbacks.BatchSizeScaling(base_batch_size=6, rule="linear"),
    ]
    history = search(*callbacks[::order], memory=9, epochs=1)
    assert history["global_batch_size"] == [18]
    assert history["learning_rate"] == pytest.approx([0.3])


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (tf.errors.ResourceExhaustedError(None, None, "OOM"), True),
        (tf.errors.InternalError(None, None, "Dst tensor is not initialized."), True),
        (tf.errors.UnknownError(None, None, "CUDA_ERROR_OUT_OF_MEMORY: out"), True),
        (MemoryError(), True),
        (tf.errors.InvalidArgumentError(None, None, "Incompatible shapes"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_for_lack_of_memory_are_known(error, is_known):
    assert is_out_of_memory(error) == is_known


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
