"""`BatchSizeFinder` finds the size where memory runs out, and leaves no trace of its search."""

import json
import random
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.callbacks import out_of_memory
from keras_multigpu.callbacks.batch_size_finder import BatchSizeFinder
from keras_multigpu.callbacks.largest_size import largest_size
from keras_multigpu.callbacks.out_of_memory import HostMemory
from keras_multigpu.callbacks.out_of_memory import is_out_of_memory
from keras_multigpu.callbacks.trial_batches import of_size
from keras_multigpu.training.model_state import ModelState
from keras_multigpu.training.probes import Probe

pytestmark = pytest.mark.usefixtures("unoptimized_graphs")


def replicas_of(count):
    """A strategy of so many CPU devices."""
    if count == 1:
        return kmg.strategy("one_device", devices=["CPU:0"])
    return kmg.strategy("mirrored", devices=[f"CPU:{index}" for index in range(count)])


class Count(Probe):
    """Counts the steps that it sees."""

    def build(self, strategy):
        self.steps = tf.Variable(0)

    def collect(self, measured, allowed):
        self.steps.assign_add(1)


def fed(x, fails):
    """The same tensor, after memory has run out if `fails`."""

    def check(fails):
        if fails:
            raise MemoryError("not enough")
        return np.int32(0)

    with tf.control_dependencies([tf.numpy_function(check, [fails], tf.int32)]):
        return tf.identity(x)


class Hungry(keras.layers.Layer):
    """Runs out of memory when it is given more rows than fit; None for never."""

    def __init__(self, fitting, **options):
        super().__init__(**options)
        self.fitting = fitting

    def call(self, x):
        return x if self.fitting is None else fed(x, tf.shape(x)[0] > self.fitting)


def network(fitting, replicas=1, data=None, **compiled):
    """A small model with all kinds of state, on devices where `fitting` rows fit."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), Hungry(fitting), keras.layers.Dense(4)]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = kmg.distribute(
        keras.Sequential([*layers, keras.layers.Dense(2)]), replicas_of(replicas)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], **compiled)
    return model


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(90, 3)).astype("float32")
Y = RANDOM.integers(0, 2, 90)


def batches(**settings):
    """The examples in batches of six, shuffled."""
    return kmg.data.from_arrays(X, Y, **{"global_batch_size": 6, "seed": 7, **settings})


def search(model, finder, data=None, **arguments):
    """Only search."""
    model.fit(batches() if data is None else data, epochs=0, callbacks=[finder], **arguments)
    return finder


def sizes(finder):
    """What was tried, and how it went."""
    return [(one.replica_batch_size, one.fits) for one in finder.tries]


class Remember(keras.callbacks.Callback):
    """Keeps what training was like."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        run = self.model.training_run
        self.seen.append((run.global_batch_size, run.micro_batches, run.steps_per_epoch))


@pytest.mark.parametrize(
    ("largest", "minimum", "maximum", "found"),
    [
        (11, 1, None, (11, 12)),
        (11, 1, 8, (8, None)),
        (11, 1, 11, (11, None)),
        (11, 3, 100, (11, 12)),
        (1, 1, None, (1, 2)),
        (0, 1, None, (None, 1)),
        (64, 64, 64, (64, None)),
        (1000, 1, None, (1000, 1001)),
    ],
)
def test_the_largest_size_is_found_by_doubling_and_halving(largest, minimum, maximum, found):
    """In at most twice as many tries as the size has binary digits, and never above `maximum`."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    assert largest_size(fits, minimum, maximum) == found
    assert len(tried) == len(set(tried)) <= 2 * max(largest, 1).bit_length() + 2
    assert maximum is None or max(tried) <= maximum


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_limit_of_a_replica_is_found(replicas, capsys):
    """13 rows fit on each replica, so 13 are found, with any number of them."""
    finder = search(network(13, replicas), BatchSizeFinder(None, margin=0.0, steps=2))
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
    """A tenth of 13 is more than one example: 11 are used."""
    finder = search(network(13), BatchSizeFinder(None))
    assert (finder.largest_replica_batch_size, finder.best_replica_batch_size) == (13, 11)
    assert "13 examples fit on each replica and 14 do not, 11 with room" in capsys.readouterr().out


def test_the_search_is_no_finer_than_the_margin():
    """Each size that does not fit can take ten seconds, in which TensorFlow waits for memory."""
    assert largest_size(lambda size: size <= 1000, 1, None, 0.05) == (992, 1024)


def test_no_margin_where_maximum_or_the_data_are_the_limit(capsys):
    """90 examples on four replicas are 22 for each."""
    finder = search(network(99, 4), BatchSizeFinder(None))
    assert finder.best_replica_batch_size == 22
    assert "22 examples fit on each replica, the most that the number of ex" in (
        capsys.readouterr().out
    )
    finder = search(network(99, 4), BatchSizeFinder(None, maximum=7))
    assert finder.best_replica_batch_size == 7
    assert sizes(finder) == [(1, True), (2, True), (4, True), (7, True)]
    assert "the most that `maximum` allows" in capsys.readouterr().out


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("source", ["batches", "arrays"])
@pytest.mark.parametrize("compiled", [{}, {"steps_per_execution": 4}, {"micro_batches": 2}])
def test_training_is_the_same_as_without_the_search(replicas, source, compiled):
    """Weights, optimizer, seeds, metrics, history, order of the data and random numbers."""
    ends = []
    for callbacks in ([], [BatchSizeFinder(None, verbose=0)]):
        model = network(8, replicas, **compiled)
        random.seed(5)
        arguments = {} if source == "batches" else {"y": Y, "batch_size": 7}
        x = batches() if source == "batches" else X
        history = model.fit(x, epochs=2, verbose=0, callbacks=callbacks, **arguments).history
        draws = random.random(), np.random.random(), keras.random.uniform(()).numpy()
        ends.append((history, draws, ModelState.of(model).values))
    (history, draws, values), (other_history, other_draws, other_values) = ends
    assert (history, draws) == (other_history, other_draws)
    assert values.keys() == other_values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, other_values[name], name)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_size_becomes_every_replicas_share(replicas, capsys):
    """`apply="replica_batch_size"`: the global batch grows, without micro-batches."""
    seen = Remember()
    model = network(9, replicas, micro_batches=2)
    model.fit(batches(), epochs=1, verbose=0, callbacks=[BatchSizeFinder(margin=0.0), seen])
    steps = -(-90 // (9 * replicas))
    assert seen.seen == [(9 * replicas, 1, steps)] * steps
    assert f"global batches have {9 * replicas} examples from now on instead of 6.\n" in (
        capsys.readouterr().out
    )
    assert model.replication.pieces == 2


@pytest.mark.parametrize(("replicas", "pieces"), [(1, 5), (2, 3), (4, 2)])
def test_the_global_batch_is_kept_by_micro_batches(replicas, pieces, capsys):
    """Batches of 42 where 9 rows fit: the same numbers as on a device where all of them fit."""
    wide = network(1000, replicas)
    expected = wide.fit(batches(global_batch_size=42), epochs=2, verbose=0).history
    seen = Remember()
    model = network(9, replicas)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        network(9, replicas).fit(batches(global_batch_size=42), verbose=0)
    finder = BatchSizeFinder("micro_batches", margin=0.0)
    found = model.fit(
        batches(global_batch_size=42), epochs=2, verbose=0, callbacks=[finder, seen]
    ).history
    assert seen.seen == [(42, pieces, 3)] * 6
    assert f"its share of {-(-42 // replicas)} in {pieces} micro-batches.\n" in (
        capsys.readouterr().out
    )
    # Dropout and BatchNorm see pieces, so the numbers are close and not equal.
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.5)


def test_micro_batches_without_random_layers_give_the_same_numbers():
    """The promise of `apply="micro_batches"`: one update of the same global batch."""
    histories = []
    for fitting, callbacks in [(1000, []), (5, [BatchSizeFinder("micro_batches", verbose=0)])]:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((3,)), Hungry(fitting), keras.layers.Dense(1)]
        model = kmg.distribute(keras.Sequential(layers), replicas_of(2))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        data = batches(global_batch_size=40)
        histories.append(model.fit(data, epochs=3, verbose=0, callbacks=callbacks).history["loss"])
    assert histories[0] == pytest.approx(histories[1], rel=2e-5)


def test_pieces_are_tried_before_they_are_used():
    """Summing the gradients of pieces takes memory, too: here pieces of 8 fit alone only."""

    class OnlyAlone(Hungry):
        def call(self, x):
            return fed(x, tf.shape(x)[0] > most[0])

    most = [8]
    layers = [keras.Input((3,)), OnlyAlone(8), keras.layers.Dense(2)]
    model = kmg.distribute(keras.Sequential(layers), replicas_of(1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    train_in_pieces = model.replication.train_in_pieces

    def hungrier(model, batch, pieces):
        most[0] = 8 if pieces == 1 else 5
        return train_in_pieces(model, batch, pieces)

    model.replication.train_in_pieces = hungrier
    seen = Remember()
    finder = BatchSizeFinder("micro_batches", margin=0.0, verbose=0)
    model.fit(batches(global_batch_size=16), verbose=0, callbacks=[finder, seen])
    assert finder.largest_replica_batch_size == 8
    assert {pieces for _, pieces, _ in seen.seen} == {4}


def test_a_share_that_fits_needs_no_pieces(capsys):
    """With batches of five on four replicas, one of them without a second example."""
    seen = Remember()
    finder = BatchSizeFinder("micro_batches")
    network(9, 4).fit(
        batches(global_batch_size=5), verbose=0, callbacks=[finder, seen], steps_per_epoch=2
    )
    assert seen.seen == [(5, 1, 2)] * 2
    assert "global batches keep their 5 examples, and each replica takes its share of 2 in 1 " in (
        capsys.readouterr().out
    )


def test_one_replica_that_fails_is_enough():
    """Memory runs out on the second device only; nothing hangs."""

    class HungrySecond(Hungry):
        def call(self, x):
            return fed(x, (tf.shape(x)[0] > 3) & tf.reduce_any(x > 99.0))

    layers = [keras.Input((3,)), HungrySecond(3), keras.layers.Dense(1)]
    model = kmg.distribute(keras.Sequential(layers), replicas_of(2))
    model.compile("sgd", "mse")
    x = X[:40].copy()
    x[4:] = 100.0
    finder = BatchSizeFinder(None, margin=0.0, verbose=0)
    data = kmg.data.from_arrays(x, Y[:40], global_batch_size=8, shuffle=False)
    # The first batch is 4 small and 4 large rows: of 8 = 2 x 4, the second replica has the large.
    assert search(model, finder, data).largest_replica_batch_size == 3


def test_a_probe_of_another_callback_sees_no_trial():
    """Else it would count examples that nobody trains on."""
    probe = Count()

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.watch(probe)

    finder = BatchSizeFinder(None, verbose=0)
    network(6).fit(batches(), verbose=0, callbacks=[finder, Watch()])
    assert probe.steps.numpy() == 15


def test_the_same_object_searches_in_every_fit():
    """And the second `fit` has the batch size of its own data."""
    finder, seen = BatchSizeFinder(margin=0.0, verbose=0), Remember()
    model = network(30)
    model.fit(batches(), verbose=0, callbacks=[finder, seen])
    model.fit(batches().take(20), verbose=0, callbacks=[finder, seen])
    assert [size for size, _, _ in seen.seen] == [30, 30, 30, 20]


@pytest.mark.parametrize("order", [1, -1])
def test_the_rate_is_scaled_with_the_size_that_is_found(order):
    """9 examples on two replicas instead of a base of 6 in all: three times the rate."""
    finder = BatchSizeFinder(margin=0.0, verbose=0)
    callbacks = [finder, kmg.callbacks.BatchSizeScaling(base_batch_size=6, rule="linear")]
    history = network(9, 2).fit(batches(), verbose=0, callbacks=callbacks[::order]).history
    assert history["global_batch_size"] == [18]
    assert history["learning_rate"] == pytest.approx([0.3])


def test_a_run_that_goes_on_does_not_search():
    """`ResumableCheckpoint` gives a state; the run has its batch size by itself."""

    class Resume(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.after_begin(lambda: setattr(finder, "state", state))

    state = search(network(9), BatchSizeFinder(None, verbose=0)).state
    finder, seen = BatchSizeFinder(verbose=0), Remember()
    network(9).fit(batches(), verbose=0, callbacks=[Resume(), finder, seen])
    assert (finder.tries, finder.largest_replica_batch_size) == ([], 9)
    assert {size for size, _, _ in seen.seen} == {6}


def test_training_goes_on_if_xla_compiles_it():
    """Each size is compiled; the size that fits is bounded by `maximum` here."""
    finder = search(
        network(None, jit_compile=True), BatchSizeFinder(None, maximum=3, steps=1, verbose=0)
    )
    assert finder.best_replica_batch_size == 3


def test_eager_steps_are_tried_eagerly():
    """`run_eagerly=True` needs no graph."""
    finder = search(network(5, run_eagerly=True), BatchSizeFinder(None, margin=0.0, verbose=0))
    assert finder.best_replica_batch_size == 5


def test_ragged_and_sparse_rows_are_repeated():
    """Any kind of tensor makes a batch of any size, and scalars are shared."""
    ragged = tf.ragged.constant([[1], [2, 3], [4, 5, 6]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [3, 4]])
    batch = ({"r": ragged, "s": sparse, "d": tf.constant([1, 2, 3])}, None, tf.constant(0.5))
    x, y, weight = of_size(batch, 5)
    assert x["r"].to_list() == [[1], [2, 3], [4, 5, 6], [1], [2, 3]]
    expected = [[0, 1], [2, 0], [3, 4], [0, 1], [2, 0]]
    np.testing.assert_array_equal(tf.sparse.to_dense(x["s"]), expected)
    np.testing.assert_array_equal(x["d"], [1, 2, 3, 1, 2])
    assert (y, float(weight)) == (None, 0.5)
    np.testing.assert_array_equal(of_size(batch, 2)[0]["d"], [1, 2])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"apply": "global"}, "`apply` has an unknown value.*Received: apply='global'"),
        ({"minimum": 0}, "`minimum` is not a positive integer.*Received: minimum=0"),
        ({"maximum": 2.5}, "`maximum` is not a positive integer.*Received: maximum=2.5"),
        ({"minimum": 8, "maximum": 4}, "`maximum` is smaller.*Received: minimum=8, maximum=4"),
        ({"steps": 0}, "`steps` is not a positive integer.*Received: steps=0"),
        ({"margin": 1.0}, "`margin` is no part.*Received: margin=1.0"),
        ({"margin": "10%"}, "`margin` is no part.*Received: margin='10%'"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    """When the callback is made."""
    with pytest.raises(ValueError, match=text):
        BatchSizeFinder(**arguments)


def test_stock_models_are_refused():
    """Their state cannot be given back."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="kmg.distribute.*Received: model='Sequential'"):
        model.fit(X, Y, verbose=0, callbacks=[BatchSizeFinder()])


def test_a_model_that_does_not_fit_at_all():
    """Not even the smallest size: the model is as before and the error says what to do."""
    model = network(0)
    before = model.get_weights()
    with pytest.raises(MemoryError, match="with 1 examples on each .*Received: minimum=1, repl"):
        search(model, BatchSizeFinder())
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_data_that_cannot_be_cut_anew_are_refused_before_the_search():
    """Batches of their own: a `PyDataset`, a generator."""

    class Own(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return X[:4], Y[:4]

    finder = BatchSizeFinder()
    with pytest.raises(ValueError, match="in batches of their own.*Received: data='Own'"):
        network(9).fit(Own(), verbose=0, callbacks=[finder])
    assert finder.tries == []
    with pytest.raises(ValueError, match="in batches of their own.*'a generator'"):
        network(9).fit(iter([(X[:4], Y[:4])]), verbose=0, callbacks=[BatchSizeFinder(None)])
    search(network(9), BatchSizeFinder(None, maximum=4, verbose=0), Own())


def test_an_error_that_is_none_of_memory_is_not_swallowed():
    """A label that does not exist fails the search as it would fail training."""
    data = kmg.data.from_arrays(X, np.full(90, "a"), global_batch_size=4)
    with pytest.raises(Exception, match="string|str|cast") as caught:
        search(network(9), BatchSizeFinder(verbose=0), data)
    assert not is_out_of_memory(caught.value)


def test_what_running_out_of_memory_looks_like():
    """Several kinds of errors; not each error is one."""
    operation = tf.errors
    assert is_out_of_memory(operation.ResourceExhaustedError(None, None, "OOM"))
    assert is_out_of_memory(operation.InternalError(None, None, "Dst tensor is not initialized."))
    assert is_out_of_memory(operation.UnknownError(None, None, "CUDA_ERROR_OUT_OF_MEMORY: out"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(operation.InvalidArgumentError(None, None, "Incompatible shapes"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_long_searches_say_how_far_they_are(monkeypatch, capsys):
    """Short ones print one line only."""
    monkeypatch.setattr("keras_multigpu.callbacks.size_search.PATIENCE", 0.0)
    search(network(3), BatchSizeFinder(None, margin=0.0))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("BatchSizeFinder: trying 1 per replica: ")
    assert lines[0].endswith(" s a step")
    assert lines[2] == "BatchSizeFinder: trying 4 per replica: out of memory"


def test_the_need_of_larger_batches_is_foreseen_on_cpus(monkeypatch):
    """1000 bytes an example, and 90 % of 100 kB are left for them: 90 examples."""
    monkeypatch.setattr(out_of_memory, "resident_bytes", lambda: 5_000)
    monkeypatch.setattr(out_of_memory, "peak_bytes", lambda: 13_000)
    monkeypatch.setattr(out_of_memory, "available_bytes", lambda: 100_000)
    memory = HostMemory(["/device:CPU:0"])
    assert not memory.is_too_small(10**9)
    memory.learn(8)
    assert [memory.is_too_small(size) for size in (90, 91)] == [False, True]
    gpu = HostMemory(["/device:GPU:0"])
    gpu.learn(8)
    assert not gpu.is_too_small(10**9)


def test_the_system_says_what_memory_there_is():
    """On Linux; elsewhere nothing is foreseen."""
    now, most, left = (
        out_of_memory.resident_bytes(),
        out_of_memory.peak_bytes(),
        out_of_memory.available_bytes(),
    )
    assert 10**7 < now <= most * 1.01
    assert left > 10**6


def test_memory_that_really_runs_out():
    """A process that may have 1960 MB more, and rows of 64 MB: between 15 and 30 fit.

    Half, because on CPUs TensorFlow keeps what the smaller sizes have freed.
    """
    program = Path(__file__).with_name("limited_memory_process.py")
    ended = subprocess.run(
        [sys.executable, str(program), "1960"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert 15 <= found["largest"] <= 30, found
    assert found["unchanged"]
