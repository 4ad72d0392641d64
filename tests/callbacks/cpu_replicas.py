"""Strategies of so many logical CPU devices, for the tests of callbacks."""

import keras_multigpu as kmg


def replicas_of(count):
    """A strategy of so many CPU devices."""
    if count == 1:
        return kmg.strategy("one_device", devices=["CPU:0"])
    return kmg.strategy("mirrored", devices=[f"CPU:{index}" for index in range(count)])
