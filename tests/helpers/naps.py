"""Tests in which something is slow, on a machine that may be slow as well."""

import functools
import inspect
import time

import keras

from helpers.rows_in_python import zeros_after

NAPS = (0.1, 0.5, 2.5)


def with_naps(test):
    """Run a test with longer and longer naps until they outweigh whatever else the machine does.

    What holds with short naps on an idle machine holds with long ones on a busy one; what is wrong
    fails with all of them.
    """

    @functools.wraps(test)
    def patient(*arguments, **more):
        for nap in NAPS[:-1]:
            try:
                return test(*arguments, nap=nap, **more)
            except AssertionError:
                pass
        return test(*arguments, nap=NAPS[-1], **more)

    signature = inspect.signature(test)
    others = [one for one in signature.parameters.values() if one.name != "nap"]
    patient.__signature__ = signature.replace(parameters=others)
    return patient


@keras.saving.register_keras_serializable("tests")
class Nap(keras.layers.Layer):
    """Sleeps in the forward pass, and three times as long on replicas with an example above 50."""

    def __init__(self, seconds, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def call(self, x):
        def nap(values):
            time.sleep(self.seconds * (3 if values.size and values.max() > 50 else 1))

        return x + zeros_after(nap, x)

    def get_config(self):
        return {**super().get_config(), "seconds": self.seconds}
