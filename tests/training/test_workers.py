"""What several processes have to agree on."""

import keras
import pytest

from keras_multigpu.training.workers import may_stop_alone


class OfTheUser(keras.callbacks.Callback):
    """Who knows what it does."""


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (OfTheUser(), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (keras.callbacks.TerminateOnNaN(), False),
    ],
)
def test_code_of_the_user_may_stop_one_worker_alone(callback, expected):
    """Callbacks of Keras see what is the same on all workers."""
    assert may_stop_alone(callback) == expected
