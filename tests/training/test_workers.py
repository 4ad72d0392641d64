"""What several processes must agree on."""

import keras
import pytest

import keras_multigpu as kmg
from keras_multigpu.training.workers import LISTENERS, may_stop_alone, steering


class OfTheUser(keras.callbacks.Callback):
    """A user's callback, which may do anything."""


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (OfTheUser(), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (keras.callbacks.TerminateOnNaN(), False),
        (kmg.callbacks.NaNGuard(), False),
    ],
)
def test_a_custom_callback_may_stop_one_worker_alone(callback, expected):
    assert may_stop_alone(callback) == expected


def test_every_keras_callback_is_classified():
    steer = {
        "BackupAndRestore",
        "EarlyStopping",
        "LearningRateScheduler",
        "ReduceLROnPlateau",
        "SwapEMAWeights",
        "TerminateOnNaN",
    }
    known = steer | {each.__name__ for each in LISTENERS} | {"Callback", "CallbackList"}
    assert {name for name in dir(keras.callbacks) if name[0].isupper()} <= known


class OwnMetrics(kmg.callbacks.ReplicaMetrics):
    """A user's subclass of a callback of this package."""


def test_callbacks_that_steer_or_exchange_must_be_on_every_worker():
    heard = [
        OfTheUser(),
        keras.callbacks.ModelCheckpoint("a.keras"),
        keras.callbacks.LambdaCallback(on_epoch_end=print),
    ]
    of_chief = [*heard, OwnMetrics(path="a.csv"), keras.callbacks.EarlyStopping(patience=3)]
    of_other = [OwnMetrics(path="b.csv"), [keras.callbacks.EarlyStopping(patience=3), None]]
    assert steering(of_chief) == steering(of_other)
    assert [each["class"] for each in steering(of_chief)] == ["OwnMetrics", "EarlyStopping"]
    assert steering([OwnMetrics(every_steps=2)]) != steering([OwnMetrics(every_steps=3)])
    assert steering(keras.callbacks.CallbackList(heard, add_history=True)) == steering(None) == []


class OwnStopping(keras.callbacks.EarlyStopping):
    """A user's callback that stops and writes."""

    def __init__(self, file, **kwargs):
        super().__init__(**kwargs)
        self.file = file


def test_a_subclass_of_a_keras_callback_is_compared_by_its_keras_arguments():
    assert steering(OwnStopping("a", patience=1)) == steering(OwnStopping("b", patience=1))
    assert steering(OwnStopping("a", patience=1)) != steering(OwnStopping("a", patience=2))
