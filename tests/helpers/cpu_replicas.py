"""Strategies over logical CPU devices, and the numbers of replicas that tests run on."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras_multigpu as kmg
from helpers.all_replicas import ALL_REPLICAS


def replicas_of(count):
    if count == 1:
        return kmg.strategy("one_device", devices=["CPU:0"])
    return kmg.strategy("mirrored", devices=[f"CPU:{index}" for index in range(count)])


def on_replicas(model, count):
    """The model on `count` CPU devices, without the self-check.

    The self-check has its own tests, and takes a tenth of the time of a small training.
    """
    return kmg.distribute(model, replicas_of(count), self_check=False)


def covering(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows for `parametrize` with each value of each parameter at least once.

    The first row has the first value of each, the second the second, and so on; values that run
    out start over. With `KMG_ALL_REPLICAS=1` the rows are all combinations.
    """
    if ALL_REPLICAS:
        return list(itertools.product(*values))
    rows = range(max(map(len, values)))
    return [tuple(one[row % len(one)] for one in values) for row in rows]
