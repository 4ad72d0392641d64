"""Sums of a step: `Cuts` marks them while the step is traced, `Sums` makes them when it runs."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.emission.exchange import ShardedAxis
from keras_multigpu.training.exchange.exchange import Exchange, Parts
from keras_multigpu.training.exchange.packing import Packing, has_room


class Cuts:
    """What replicas exchange in a step that is being traced: its graph is cut there, see `stages`.

    Args:
        replicas: How many parts of the step there are.
        places: How many replicas divide variables; all by default.
        pieces: How many of the parts are pieces of one replica's share.

    Attributes:
        made: The operations that mark what is exchanged.
        gathers: The axis that a mark gathers, by its name; the others sum.
        scatters: The axis of which a mark needs a replica's rows of the sum.
        due: What says whether a sum that may wait is due, by the name of its mark.
    """

    has_equal_shares = False

    def __init__(
        self,
        replicas: int,
        on_cpu: bool = True,
        compiled: bool = False,
        places: int | None = None,
        pieces: int = 1,
    ) -> None:
        self.replicas, self.on_cpu, self.compiled = replicas, on_cpu, compiled
        self.places, self.pieces = places or replicas, pieces
        self.made: list[tf.Operation] = []
        self.gathers: dict[str, ShardedAxis] = {}
        self.scatters: dict[str, ShardedAxis] = {}
        self.due: dict[str, tf.Tensor] = {}

    def sum(self, tensor: tf.Tensor, due: tf.Tensor | None = None) -> tf.Tensor:
        if self.replicas == 1:
            return tensor
        if due is None:
            return self._mark(tensor)
        with tf.control_dependencies([due]):
            mark = self._mark(tensor)
        self.due[mark.op.name] = due
        return mark

    def gather(self, tensor: tf.Tensor, axis: ShardedAxis) -> tf.Tensor:
        mark = self._mark(with_open_axis(tensor, axis.axis))
        self.gathers[mark.op.name] = axis
        shape = mark.shape.as_list()
        shape[axis.axis] = axis.length
        mark.set_shape(shape)
        return mark

    def scatter(self, tensor: tf.Tensor, axis: ShardedAxis) -> tf.Tensor:
        mark = self._mark(with_open_axis(tensor, axis.axis))
        self.scatters[mark.op.name] = axis
        return mark

    def _mark(self, tensor: tf.Tensor) -> tf.Tensor:
        # TensorFlow walks back from a sum to look for variables, through the graphs of all
        # replicas, which takes minutes where there are many sums. It stops where nothing is
        # differentiated.
        cut = tf.stop_gradient(tensor)
        self.made.append(cut.op)
        return cut


def with_open_axis(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """A tensor, of which TensorFlow does not know how long it is along an axis."""
    shape = tensor.shape.as_list()
    shape[axis] = None
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


class Sums:
    """Sums tensors of all replicas in one step, packed.

    Args:
        exchange: Exchanges the packs.
        riders: A few float32 numbers of each replica, which travel in the first pack with room.
        watches: The replicas' stopwatches, if a probe measures times.
        may_wait: Whether sums that are not due wait; without it, none does.
        progress: Counts the exchanges.

    Attributes:
        packs: All packs that were summed, and rows of sums, by replica.
        of_riders: The sums of the riders, if a pack had room.
        due: Whether each of those that may wait was due.
    """

    def __init__(
        self,
        exchange: Exchange,
        riders: Sequence[tf.Tensor] | None = None,
        watches: Sequence[Any] | None = None,
        may_wait: tf.Tensor | None = None,
        progress: Any = None,
    ) -> None:
        self.exchange, self._riders, self._watches = exchange, riders, watches
        self._may_wait, self._progress = may_wait, progress
        self._before: Parts = [[] for _ in exchange.devices]
        self.due: list[tf.Tensor] = []
        self.packs: list[list[tf.Tensor]] = [[] for _ in exchange.devices]
        self.of_riders: list[tf.Tensor] | None = None

    def __call__(self, parts: Parts) -> list[list[tf.Tensor]]:
        """The sums of tensors over all replicas, on each of this process."""
        if not parts[0]:
            return [[] for _ in parts]
        if self._riders is None or not any(map(has_room, parts[0])):
            return self._packed(parts)
        riders, self._riders = self._riders, None
        parts = [[own, *others] for own, others in zip(riders, parts, strict=True)]
        summed = self._packed(parts)
        self.of_riders = [first for first, *_ in summed]
        return [rest for _, *rest in summed]

    def if_due(self, due: tf.Tensor, parts: Parts) -> list[list[tf.Tensor]]:
        """The sums, or the tensors themselves if they are not due and may wait."""
        if self._may_wait is None:
            return self(parts)
        self.due.append(due)
        self._come_to(parts)

        def summed() -> list[list[tf.Tensor]]:
            on_each = self.exchange.on_each
            packings = on_each(Packing, parts)
            packs = self._timed(on_each(Packing.pack, packings, parts))
            return on_each(Packing.unpack, packings, packs)

        def terms() -> list[list[tf.Tensor]]:
            return [[tf.identity(tensor) for tensor in own] for own in parts]

        found: list[list[tf.Tensor]] = tf.cond(due | ~self._may_wait, summed, terms)
        for known, own in zip(self.packs, found, strict=True):
            known += own
        self._before = found
        return found

    def gather(self, parts: Sequence[tf.Tensor], axis: ShardedAxis) -> list[tf.Tensor]:
        """The whole of a tensor of which replicas have their rows."""
        self._come_to([[part] for part in parts])
        found = self.exchange.gather_rows(parts, axis)
        self._before = [[whole] for whole in found]
        return found

    def scatter(self, parts: Sequence[tf.Tensor], axis: ShardedAxis) -> list[tf.Tensor]:
        """Each replica's rows of the sum of a tensor."""
        self._come_to([[part] for part in parts])
        found = self.exchange.scatter_rows(parts, axis)
        self._before = [[own] for own in found]
        for known, own in zip(self.packs, found, strict=True):
            known.append(own)
        return found

    def _packed(self, parts: Parts) -> list[list[tf.Tensor]]:
        on_each = self.exchange.on_each
        packings = on_each(Packing, parts)
        packs = on_each(Packing.pack, packings, parts)
        self._come_to(packs)
        self._before = packs = self._timed(packs)
        for known, own in zip(self.packs, packs, strict=True):
            known += own
        return on_each(Packing.unpack, packings, packs)

    def _come_to(self, parts: Parts) -> None:
        if self._progress is not None:
            self._progress.come_to(parts, self._before)

    def _timed(self, packs: Parts) -> list[list[tf.Tensor]]:
        """The sums of packs, with the times before and after if there are stopwatches."""
        if self._watches is None:
            return self.exchange.sum(packs)
        on_each, watches = self.exchange.on_each, self._watches
        ready = on_each(lambda watch, own: watch.ready(own), watches, packs)
        held = on_each(lambda watch, times, own: watch.held(times, own), watches, ready, packs)
        summed = self.exchange.sum(held)
        on_each(lambda watch, times, own: watch.summed(times, own), watches, ready, summed)
        return summed
