"""`RunCallback`: what a callback declares is checked before the first step, and saved."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.own_step import UnseenStep
from helpers.stopped_runs import StopAt, Stopped

from keras_multigpu import callbacks

X, Y = np.zeros((12, 3), "float32"), np.zeros((12, 1), "float32")

NEED_A_RUN = [
    callbacks.NaNGuard("skip"),
    callbacks.ReplicaDriftCheck(),
    callbacks.ReplicaMetrics(),
    callbacks.BatchSizeFinder(),
    callbacks.BatchSizeScaling(4),
    callbacks.LearningRateFinder(),
    callbacks.ResumableCheckpoint("never_written"),
    callbacks.ThroughputReport(),
]


def name_of(callback):
    """The name of its class, which the error has to contain."""
    return type(callback).__name__


def network(distributed=True):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return on_replicas(model, 1) if distributed else model


def fit(model, *given, epochs=1, batch_size=4, run_eagerly=True):
    """The history of a training, without a graph, which takes longer to make."""
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    return model.fit(X, Y, batch_size, epochs=epochs, verbose=0, callbacks=list(given)).history


def refusal(model, *given):
    """The text of the error that `fit` raises."""
    with pytest.raises(ValueError, match="Expected") as caught:
        fit(model, *given, run_eagerly=False)
    return str(caught.value)


@pytest.mark.parametrize("callback", NEED_A_RUN, ids=name_of)
def test_a_model_of_stock_keras_is_refused(callback):
    text = refusal(network(distributed=False), callback)
    name = name_of(callback)
    assert text.startswith(f"`{name}` needs a running `fit` of a distributed model. Expected ")
    assert "Write `model = kmg.distribute(model)` before `compile`" in text
    assert text.endswith("Received: model='Sequential'")


def test_a_train_step_with_a_loss_of_its_own_is_refused():
    text = refusal(on_replicas(UnseenStep(), 2), callbacks.ReplicaMetrics())
    assert text.startswith("`ReplicaMetrics` cannot look inside this `train_step`")
    assert "Leave out the callback, or take the loss from `compute_loss`." in text
    assert text.endswith("Received: callback='ReplicaMetrics'")


class Counter(callbacks.RunCallback):
    """Counts and logs the steps of all epochs, and notes every second one."""

    writes = ("count",)
    kept = ("count",)
    single = True

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.count, self.seconds = 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.every(2, batch):
            self.seconds.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        logs["count"] = self.count


class Later(callbacks.RunCallback):
    """Needs what `Counter` counts."""

    after = (Counter,)


@pytest.mark.parametrize("distributed", [True, False])
def test_every_counts_the_steps_of_an_epoch(distributed):
    """Of three steps in an epoch the second; of a single step none."""
    counter, model = Counter(), network(distributed)
    assert fit(model, counter, epochs=2)["count"] == [3, 6]
    assert counter.seconds == [1, 1]
    fit(model, counter, epochs=3, batch_size=12)
    assert counter.seconds == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([Later(), Counter()], "Later comes before Counter, whose result it needs.*Swap"),
        ([Counter(), Counter()], "more than one `Counter`.*Received: callbacks="),
        (
            [keras.callbacks.EarlyStopping("count", mode="min"), Counter()],
            "EarlyStopping comes before Counter and would miss `count`.*Move Counter to the front",
        ),
    ],
)
def test_a_wrong_order_is_refused(given, text):
    """The error names both callbacks. In the other order `fit` works."""
    model = network()
    with pytest.raises(ValueError, match=text):
        fit(model, *given)
    fit(model, *(given[::-1] if type(given[0]) is not type(given[1]) else given[:1]))


@pytest.mark.slow
def test_a_resumed_training_continues_with_kept_attributes(tmp_path):
    """The count, and which steps of epoch 1 are every second one."""

    def checkpoint():
        return callbacks.ResumableCheckpoint(tmp_path, every_steps=1)

    with pytest.raises(Stopped):
        fit(network(), Counter(), checkpoint(), StopAt(1, 3), epochs=3)
    counter = Counter()
    assert fit(network(), counter, checkpoint(), epochs=3)["count"] == [3, 6, 9]
    assert counter.seconds == [1], "The second step of epoch 1 was before the interruption."


def test_a_callback_prints_unless_it_is_silent(capsys):
    Counter().say("done")
    Counter(verbose=0).say("not asked for")
    assert capsys.readouterr().out == "Counter: done\n"
