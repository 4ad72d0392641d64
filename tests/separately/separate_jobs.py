"""Jobs for the tests of `train_separately`; most need no TensorFlow."""

import os
import sys
import time


def square(number):
    sys.stdout.write(f"the square of {number}\n")
    return number * number


def span(seconds):
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic()


def place():
    names = ("CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    return sorted(os.sched_getaffinity(0)), [os.environ.get(name) for name in names]


def fail(text):
    raise LookupError(text)


def die():
    os.kill(os.getpid(), 9)


def not_picklable():
    return lambda: None


def train():
    import keras
    import numpy as np

    import keras_multigpu as kmg

    keras.utils.set_random_seed(3)
    model = kmg.distribute(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile("adam", "mse")
    x = np.arange(16.0).reshape(8, 2)
    history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    return {"model": model, "history": history, "prediction": model.predict(x, verbose=0)}
