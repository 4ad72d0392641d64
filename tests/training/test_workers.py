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
    of_chief = [*heard, OwnMetrics(), keras.callbacks.EarlyStopping(patience=3)]
    of_other = [OwnMetrics(), [keras.callbacks.EarlyStopping(patience=3), None]]
    assert steering(of_chief) == steering(of_other) == ["ReplicaMetrics", "EarlyStopping"]
    assert steering(keras.callbacks.CallbackList(heard, add_history=True)) == steering(None) == []
