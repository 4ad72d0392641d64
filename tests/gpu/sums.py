"""Sums and gathers of each type by itself, and of several types in one exchange.

They travel as in a step. Their results are known without computing them on one device: replica r
sends (r + 1) times the same values, and r rows that hold its number.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from machine import Check, Row, devices, strategy

from keras_multigpu.partition.emission.exchange import arrived, travelling
from keras_multigpu.training.replica_group import ReplicaGroup

VALUES = {  # One that a coarser type would round, so that a detour through one is seen.
    "float16": 1.5,
    "bfloat16": 1.5,
    "float32": 2**18 + 1,
    "float64": 2**40 + 1,
    "int32": 2**25 + 1,
    "int64": 2**57 + 1,
    "uint8": 3,
    "complex64": 2 + 3j,
}
GATHERED = (*VALUES, "bool", "int8", "int16", "uint16", "uint32", "uint64", "complex128")
TOGETHER = {
    "float32, float16, int64": ("float32", "float16", "int64"),
    "float32, bfloat16, int64": ("float32", "bfloat16", "int64"),
    "all of them": tuple(VALUES),
}
LENGTH = 5


def checks() -> dict[str, Check]:
    group = ReplicaGroup(strategy(devices()))
    sets = {**{name: (name,) for name in VALUES}, **TOGETHER}
    gathers = {**{name: (name,) for name in GATHERED}, **TOGETHER}
    return {
        **{f"sum of {name}": functools.partial(summed, group, name, sets[name]) for name in sets},
        **{
            f"gather of {name}": functools.partial(gathered, group, name, gathers[name])
            for name in gathers
        },
        "gather of labels beside sums": functools.partial(in_turn, group),
    }


def summed(group: ReplicaGroup, name: str, kinds: Sequence[str]) -> Row:
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

    times = group.count * (group.count + 1) // 2
    expected = [np.full(LENGTH, as_type(VALUES[k], k) * as_type(times, k)) for k in kinds]
    return judged(f"sum of {name}", expected, step())


def gathered(group: ReplicaGroup, name: str, kinds: Sequence[str]) -> Row:
    """The number r in r rows of replica r; the first one has none."""

    @tf.function(autograph=False)
    def step() -> list[list[tf.Tensor]]:
        def rows(replica: Any) -> list[tf.Tensor]:
            return [tf.cast(tf.fill([replica.id, 2], replica.id), kind) for kind in kinds]

        return group.exchange.gather(group.run(rows))

    rows = np.concatenate([np.full([r, 2], r) for r in range(group.count)])
    expected = [rows.astype(tf.as_dtype(kind).as_numpy_dtype) for kind in kinds]
    return judged(f"gather of {name}", expected, step())


def in_turn(group: ReplicaGroup) -> Row:
    """A contrastive step's: rows and labels, then sums that need them, on each replica."""

    @tf.function(autograph=False)
    def step() -> list[list[tf.Tensor]]:
        def own(replica: Any) -> list[tf.Tensor]:
            rows = tf.fill([replica.id + 1], replica.id)
            return [tf.cast(rows, tf.float32), tf.cast(rows, tf.int64)]

        def summands(replica: Any, gathered: list[tf.Tensor]) -> list[tf.Tensor]:
            rows, labels = gathered
            alike = tf.cast(tf.equal(labels, replica.id), tf.float32)
            return [tf.reduce_sum(rows * alike), tf.reduce_sum(labels)]

        exchange = group.exchange
        wholes = exchange.gather(group.run(own))
        return exchange.sum(exchange.on_each(summands, group.replicas, wholes))

    count = group.count
    total = sum(r * (r + 1) for r in range(count))
    expected = [np.float32(total), np.int64(total * count)]
    return judged("gather of labels beside sums", expected, step())


def as_type(value: Any, kind: str) -> Any:
    return tf.as_dtype(kind).as_numpy_dtype(value)


def judged(name: str, expected: list[Any], found: list[list[tf.Tensor]]) -> Row:
    """Whether all replicas have exactly these values, of these types."""
    got = [[each.numpy() for each in of_replica] for of_replica in found]
    wrong = [each for each in got if not same(expected, each)]
    return Row(name, firsts(expected), firsts((wrong or got)[0]), not wrong)


def same(expected: list[Any], got: list[Any]) -> bool:
    pairs = zip(expected, got, strict=True)
    return all(e.dtype == g.dtype and np.array_equal(e, g) for e, g in pairs)


def firsts(values: list[Any]) -> list[Any]:
    """The first entry of each."""
    return [np.ravel(value)[0].tolist() for value in values]
