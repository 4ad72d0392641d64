"""Counts the bytes that the replicas of a group exchange in each step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.replica_group import HOST, ReplicaGroup


class MovedBytes:
    """How many bytes steps have moved, by the sizes of results: a sum counts once."""

    KINDS = ("summed", "gathered")

    def __init__(self) -> None:
        self._known = dict.fromkeys(self.KINDS, 0)
        with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
            self._in_graphs = {
                kind: tf.Variable(0, dtype=tf.int64, trainable=False) for kind in self.KINDS
            }

    def __call__(self) -> dict[str, int]:
        return {kind: self._known[kind] + int(self._in_graphs[kind]) for kind in self.KINDS}

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

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def exchanged(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            # Every replica gets the same results.
            if group.count > 1:
                moved.add(kind, found[0])
            return found

        return exchanged

    def on_first(parts: Any) -> list[tf.Tensor]:
        found = gather_on_first(parts)
        if not group.is_spread:
            moved.add("gathered", found)
        return found

    gather_on_first = group.gather_on_first
    vars(exchange).update(
        sum=counted("summed", exchange.sum), gather=counted("gathered", exchange.gather)
    )
    vars(group)["gather_on_first"] = on_first
    try:
        yield moved
    finally:
        del vars(exchange)["sum"], vars(exchange)["gather"], vars(group)["gather_on_first"]
