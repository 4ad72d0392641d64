"""Callbacks are called as Keras calls them, and can stop a run."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from contract.pairs import X, Y, assert_close

HOOKS = [
    f"on_{mode}{part}_{edge}"
    for mode, part, edge in itertools.product(
        ("train", "test", "predict"), ("", "_batch"), ("begin", "end")
    )
] + ["on_epoch_begin", "on_epoch_end"]


class Recording(keras.callbacks.Callback):
    """Records every call of a hook with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def set_params(self, params):
        super().set_params(params)
        self.calls.append(("params", dict(params)))


def recording(hook):
    """A hook that records its call."""

    def method(self, *args, **kwargs):
        *index, logs = [*args, *kwargs.values()] or [None]
        outputs = {} if logs is None else {k: np.array(v) for k, v in logs.items()}
        self.calls.append((hook, index, outputs))

    return method


for hook in HOOKS:
    setattr(Recording, hook, recording(hook))


@pytest.mark.slow
def test_callbacks_are_called_in_the_same_order_with_the_same_arguments(pairs):
    """In `fit` with validation, `evaluate` and `predict`."""
    calls = []
    for model in pairs():
        callback = Recording()
        options = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
        validation = {"validation_data": (X[:9], Y[:9]), "validation_batch_size": 4}
        model.fit(X, Y, epochs=2, shuffle=False, **validation, **options)
        model.evaluate(X, Y, **options)
        model.predict(X, **options)
        calls.append(callback.calls)
    expected, found = calls
    assert [call[:2] for call in found] == [call[:2] for call in expected]
    for one, two in zip(expected, found, strict=True):
        assert_close(one[2:], two[2:])


class OldNames(keras.callbacks.Callback):
    """A callback with Keras's old names of hooks, one of which stops training."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, sorted(logs)))
        self.model.stop_training = batch == 2


@pytest.mark.slow
def test_hooks_are_called_by_their_old_names_too(pairs):
    """`on_batch_begin` and `on_batch_end`, in training only."""
    calls = []
    for model in pairs():
        callback = OldNames()
        options = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
        model.fit(X, Y, shuffle=False, **options)
        model.evaluate(X, Y, **options)
        calls.append(callback.calls)
    assert calls[0] == calls[1] and len(calls[1]) == 6


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.slow
def test_training_stops_when_a_callback_says_so(pairs, hook):
    """`stop_training` ends the epoch after the batch, or training after the epoch."""

    def arguments():
        stop = keras.callbacks.Callback()

        def stop_at_one(index, logs=None):
            stop.model.stop_training = index == 1

        setattr(stop, hook, stop_at_one)
        return {"x": X, "y": Y, "batch_size": 8, "epochs": 4, "callbacks": [stop]}

    pairs.assert_same_fit(arguments)


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
@pytest.mark.slow
def test_evaluation_and_prediction_stop_when_a_callback_says_so(pairs, mode):
    """`stop_evaluating` and `stop_predicting` end the loop after the batch."""
    hook = {"evaluate": "on_test_batch_end", "predict": "on_predict_batch_end"}[mode]
    flag = {"evaluate": "stop_evaluating", "predict": "stop_predicting"}[mode]
    results = []
    for model in pairs():
        stop = keras.callbacks.Callback()
        setattr(stop, hook, lambda index, logs=None, m=model: setattr(m, flag, index == 1))
        data = (X, Y) if mode == "evaluate" else (X,)
        results.append(getattr(model, mode)(*data, batch_size=8, verbose=0, callbacks=[stop]))
    assert_close(*results)


def test_a_line_for_each_epoch_is_printed_though_its_length_is_unknown(pairs, capsys):
    """With `verbose=2`, Keras's logger counts the batches itself, and prints nothing of none."""
    _, model = pairs()
    unknown = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).filter(lambda x, y: True)
    steps = -(-len(X) // 8)
    model.fit(unknown, epochs=2, verbose=2)
    model.evaluate(unknown, verbose=2)
    model.predict(unknown, verbose=2)
    lines = re.sub(r" - [^a-z\n].*step", "", capsys.readouterr().out).splitlines()
    lines = [line.partition(": ")[0] for line in lines if "replicas" not in line]
    counted = f"{steps}/{steps}"
    trained = ["Epoch 1/2", f"{counted} - loss", "Epoch 2/2", f"{counted} - loss"]
    assert lines == [*trained, f"{counted} - loss", counted]
