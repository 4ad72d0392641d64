"""Tests in which something takes its time, on a machine that may take its time as well."""

import functools
import inspect
import time

import keras

from helpers.rows_in_python import zeros_after

NAPS = (0.1, 0.5, 2.5)


def with_naps(test):
    """A test that is given naps so long that what else the machine does is little beside them.

    What holds for short ones on an idle machine holds for longer ones on a busy one; what is wrong
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
    """Sleeps in the forward pass; on the replicas whose examples have a large mean, longer."""

    def __init__(self, seconds, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def call(self, x):
        def nap(values):
            time.sleep(self.seconds * (3 if values.size and values.max() > 50 else 1))

        return x + zeros_after(nap, x)

    def get_config(self):
        return {**super().get_config(), "seconds": self.seconds}
