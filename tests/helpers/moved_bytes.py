"""Counts the bytes that the replicas of a group exchange in each step.

As rings or an all-to-all move them, each of n replicas sends (n - 1) / n of a whole for a gather or
a scatter, and twice as much for a sum, which is a scatter and a gather.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.replica_group import HOST, ReplicaGroup


class MovedBytes:
    """How many bytes steps have moved, by the sizes of wholes: a sum counts once."""

    KINDS = {"summed": 2, "gathered": 1, "rows gathered": 1, "rows scattered": 1}
    """How often a whole passes through a replica's link, but for the part that it has."""

    def __init__(self) -> None:
        self._known = Counter[str]()
        with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
            self._in_graphs = {
                kind: tf.Variable(0, dtype=tf.int64, trainable=False) for kind in self.KINDS
            }

    def __call__(self) -> Counter[str]:
        return self._known + Counter({k: int(size) for k, size in self._in_graphs.items()})

    def total(self) -> int:
        """The bytes that pass through each replica's link, times n / (n - 1)."""
        return sum(self.KINDS[kind] * size for kind, size in self().items())

    def add(self, kind: str, tensors: Any) -> None:
        """Count these tensors now, or in a graph whenever it runs."""
        leaves = tf.nest.flatten(tensors, expand_composites=True)
        leaves = [leaf for leaf in leaves if leaf is not None]
        if tf.executing_eagerly():
            self._known[kind] += sum(leaf.dtype.size * int(tf.size(leaf)) for leaf in leaves)
            return
        with tf.device(HOST):
            sizes = [leaf.dtype.size * tf.size(leaf, tf.int64) for leaf in leaves]
            self._in_graphs[kind].assign_add(tf.add_n([tf.zeros((), tf.int64), *sizes]))


@contextlib.contextmanager
def counting(group: ReplicaGroup) -> Iterator[MovedBytes]:
    """Count the bytes moved by steps that are made in this context."""
    moved, exchange = MovedBytes(), group.exchange

    def counted(verb: str, kind: str, takes_wholes: bool = False) -> None:
        function = getattr(exchange, verb)

        def exchanged(parts: Any, *args: Any, **options: Any) -> Any:
            found = function(parts, *args, **options)
            # Every replica has, or gets, the same wholes.
            if group.count > 1:
                moved.add(kind, (parts if takes_wholes else found)[0])
            return found

        vars(exchange)[verb] = exchanged

    def on_first(parts: Any) -> list[tf.Tensor]:
        found = gather_on_first(parts)
        if not group.is_spread:
            moved.add("gathered", found)
        return found

    gather_on_first = group.gather_on_first
    vars(group)["gather_on_first"] = on_first
    counted("sum", "summed")
    counted("gather", "gathered")
    counted("gather_rows", "rows gathered")
    if not group.is_spread:
        # Between processes it is a sum.
        counted("scatter_rows", "rows scattered", takes_wholes=True)
    try:
        yield moved
    finally:
        del vars(group)["gather_on_first"]
        for verb in {"sum", "gather", "gather_rows", "scatter_rows"} & vars(exchange).keys():
            del vars(exchange)[verb]
