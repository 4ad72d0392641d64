"""A training in which one worker misbehaves.

failing_worker.py WHAT INDEX_OF_THE_WORKER
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np

import keras_multigpu as kmg

WHAT, WHO = sys.argv[1], int(sys.argv[2])
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
ALONE = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == WHO


class Acts(keras.callbacks.Callback):
    """Misbehaves in the second step."""

    def on_train_batch_end(self, batch, logs=None):
        if not ALONE or batch != 1:
            return
        sys.stdout.write(f"acts at {time.time():.2f}\n")
        sys.stdout.flush()
        if WHAT == "stop":
            self.model.stop_training = True
        if WHAT == "raise":
            raise ZeroDivisionError("a bug in a callback")
        if WHAT in SIGNALS:
            os.kill(os.getpid(), SIGNALS[WHAT])
        if WHAT == "sleep":
            time.sleep(120)

    def on_epoch_begin(self, epoch, logs=None):
        if ALONE and WHAT == "other rate" and epoch == 1:
            self.model.optimizer.learning_rate = 0.5

    def on_predict_end(self, logs=None):
        if ALONE and WHAT == "predict, raise":
            raise ZeroDivisionError("a bug at the end")


class Code(keras.layers.Layer):
    """The version that the other workers have."""

    def call(self, x):
        return x


class OtherCode(Code):
    """Another version of the same layer."""

    def call(self, x):
        return 2 * x


# Its configuration consists of its name.
OtherCode.__name__ = OtherCode.__qualname__ = "Code"


class Asks(keras.callbacks.Callback):
    """Exchanges a value, which the other workers do not."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.training_run.group.any_worker(False)


def own_loop(model, x, y):
    """One worker leaves a custom loop early: it ends, or does something else."""
    for step in range(4):
        if ALONE and step == 2:
            sys.stdout.write(f"acts at {time.time():.2f}\n")
            sys.stdout.flush()
            if WHAT == "loop, sleep":
                time.sleep(120)
            break
        model.train_on_batch(x[:4], y[:4])


def main():
    keras.utils.set_random_seed(1)
    x, y = np.arange(64.0, dtype="float32").reshape(16, 4), np.ones((16, 1), "float32")
    code = OtherCode if ALONE and WHAT == "other code" else Code
    layers = [keras.Input((4,)), code(), keras.layers.Dense(2), keras.layers.Dense(1)]
    model = kmg.distribute(keras.Sequential(layers))
    model.compile("sgd" if WHAT != "other optimizer" or not ALONE else "adam", "mse")
    data = {"x": x, "y": y, "batch_size": 4}
    if WHAT == "short generator":
        batches = 2 if ALONE else 4
        data = {"x": (pair for pair in [(x[:4], y[:4])] * batches)}
    callbacks = [Acts()]
    if ALONE and WHAT == "other exchange":
        callbacks.append(Asks())
    if WHAT == "other data" and ALONE:
        data["x"] = x + 1
    try:
        if WHAT.startswith("loop"):
            own_loop(model, x, y)
            return
        if WHAT == "predict, raise":
            model.predict(x, verbose=0, callbacks=[Acts()])
        if WHAT == "other method" and ALONE:
            model.evaluate(x, y, verbose=0)
        if WHAT == "no validation" and not ALONE:
            data["validation_data"] = x, y
        history = model.fit(**data, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        steps = int(model.optimizer.iterations)
        sys.stdout.write(f"ended after epochs: {len(history['loss'])}, steps: {steps}\n")
        if WHAT == "stop":
            model.fit(**data, epochs=1, verbose=0)
            sys.stdout.write(f"and after {int(model.optimizer.iterations)}\n")
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\nends at {time.time():.2f}\n")
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
