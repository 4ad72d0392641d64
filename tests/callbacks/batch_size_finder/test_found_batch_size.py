"""How `BatchSizeFinder` applies the size, alone and with other callbacks."""

import keras
import pytest
import tensorflow as tf
from hungry_models import Remember, batches, network, search

import keras_multigpu as kmg
from keras_multigpu.callbacks.batch_size_finder import BatchSizeFinder
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.watching.probe import Probe

pytestmark = pytest.mark.usefixtures("python_sees_rows")


class Count(Probe):
    def build(self, strategy):
        self.steps = tf.Variable(0)

    def collect(self, measured, allowed):
        self.steps.assign_add(1)


@pytest.mark.in_test_all("the rate is scaled with the found size below")
def test_the_size_becomes_every_replicas_share(capsys):
    """`apply="replica_batch_size"`: the global batch grows, without micro-batches."""
    seen = Remember()
    model = network(9, 2, micro_batches=2)
    model.fit(batches(), epochs=1, verbose=0, callbacks=[BatchSizeFinder(margin=0.0), seen])
    assert seen.seen == [(18, 1, 5)] * 5
    assert "global batches have 18 examples from now on instead of 6.\n" in capsys.readouterr().out
    assert replication_of(model).pieces == 2


def test_probes_of_other_callbacks_see_no_trial():
    """They would count examples that are not trained on."""
    probe = Count()

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.watch(probe)

    finder = BatchSizeFinder(None, verbose=0)
    network(6).fit(batches(), verbose=0, callbacks=[finder, Watch()])
    assert probe.steps.numpy() == 15


@pytest.mark.in_test_all("one search shows it")
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


def test_a_resumed_run_does_not_search():
    """`ResumableCheckpoint` restores the state and the batch size."""

    class Resume(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.after_begin(lambda: setattr(finder, "state", state))

    state = search(network(9), BatchSizeFinder(None, verbose=0)).state
    finder, seen = BatchSizeFinder(verbose=0), Remember()
    network(9).fit(batches(), verbose=0, callbacks=[Resume(), finder, seen])
    assert (finder.tries, finder.largest_replica_batch_size) == ([], 9)
    assert {size for size, _, _ in seen.seen} == {6}
