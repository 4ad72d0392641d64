"""Sums and gathers of each type by itself, and of several types in one exchange.

They travel as in a step. Their results are known without computing them on one device: replica r
sends (r + 1) times the same values, and r rows that hold its number.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.emission.exchange import arrived, travelling
from keras_multigpu.scoreboard.machine import Checks, Row, strategy
from keras_multigpu.training.replica_group import ReplicaGroup

VALUES = {  # One that a coarser type would round, so that a detour through one is seen.
    "float16": 1.5,
    "bfloat16": 1.5,
    "float32": 2**18 + 1,
    "float64": 2**40 + 1,
    "int32": 2**25 + 1,
    "int64": 2**57 + 1,
    "complex64": 2 + 3j,
}
GATHERED = (*VALUES, "bool", "int8", "uint16")
LENGTH = 5


def checks() -> Checks:
    group = ReplicaGroup(strategy())
    sums = {f"sum of {kind}": partial(summed, group, [kind]) for kind in VALUES}
    gathers = {f"gather of {kind}": partial(gathered, group, [kind]) for kind in GATHERED}
    together = {
        "sum of all types at once": partial(summed, group, [*VALUES]),
        "gather of all types at once": partial(gathered, group, [*VALUES]),
    }
    found = {**sums, **gathers, **together}
    return {name: partial(named, name, check) for name, check in found.items()}


def named(name: str, check: Any) -> list[Row]:
    expected, got = check()
    values = [[each.numpy() for each in of_replica] for of_replica in got]
    ok = all(same(expected, each) for each in values)
    return [Row(name, firsts(values[0]), firsts(expected), ok)]


def summed(group: ReplicaGroup, kinds: Sequence[str]) -> tuple[list[Any], Any]:
    """(r + 1) times a value of replica r, whose sum is N (N + 1) / 2 times the value."""

    @tf.function(autograph=False)
    def step() -> list[list[tf.Tensor]]:
        def summands(replica: Any) -> list[tf.Tensor]:
            own = [tf.constant(VALUES[k], k) * tf.cast(replica.id + 1, k) for k in kinds]
            return [travelling(tf.fill([LENGTH], value)) for value in own]

        sums = group.exchange.sum(group.run(summands))
        return group.exchange.on_each(
            lambda own: [arrived(t, tf.as_dtype(k)) for t, k in zip(own, kinds, strict=True)], sums
        )

    def as_type(value: Any, kind: str) -> Any:
        return tf.as_dtype(kind).as_numpy_dtype(value)

    times = group.count * (group.count + 1) // 2
    return [np.full(LENGTH, as_type(VALUES[k], k) * as_type(times, k)) for k in kinds], step()


def gathered(group: ReplicaGroup, kinds: Sequence[str]) -> tuple[list[Any], Any]:
    """The number r in r rows of replica r; the first one has none."""

    @tf.function(autograph=False)
    def step() -> list[list[tf.Tensor]]:
        def rows(replica: Any) -> list[tf.Tensor]:
            return [tf.cast(tf.fill([replica.id, 2], replica.id), kind) for kind in kinds]

        return group.exchange.gather(group.run(rows))

    rows = np.concatenate([np.full([r, 2], r) for r in range(group.count)])
    return [rows.astype(tf.as_dtype(kind).as_numpy_dtype) for kind in kinds], step()


def same(expected: list[Any], got: list[Any]) -> bool:
    pairs = zip(expected, got, strict=True)
    return all(e.dtype == g.dtype and np.array_equal(e, g) for e, g in pairs)


def firsts(values: list[Any]) -> str:
    """The first entry of each, with all digits."""
    return ", ".join(str(np.ravel(value)[0]) for value in values)
