"""`OpenSums`: the variables that hold open sums between two steps of an epoch.

The value of such a variable is the sum of what all replicas have. Nobody but the next step may see
that, so before anyone else can look, the sums are closed.
"""

import logging
from collections.abc import Sequence

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.exchange.sums import Sums
from keras_multigpu.training.replica_group import HOST, Copies, ReplicaGroup

logger = logging.getLogger("keras_multigpu")


class OpenSums:
    """The open sums of one model.

    Args:
        group: Its replicas.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._may_wait = False
        self._held: Sequence[Copies] = ()
        self._flags: list[tf.Variable] = []

    def read(self) -> list[tf.Tensor]:
        """Whether sums may wait in the next step, and whether some wait, on the host."""
        if not self._flags:
            with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
                kind = {"dtype": tf.bool, "trainable": False}
                self._flags = [tf.Variable(self._may_wait, **kind), tf.Variable(False, **kind)]
        return [each.read_value() for each in self._flags]

    def note(self, are_open: tf.Tensor) -> None:
        """A step has assigned its variables."""
        self._flags[1].assign(are_open, read_value=False)

    @property
    def are_open(self) -> bool:
        """Whether a variable holds an open sum now."""
        return bool(self._held) and bool(self._flags[1].numpy())

    def allow(self, may_wait: bool) -> None:
        """Let sums wait from the next step on, or no longer."""
        self._may_wait = may_wait
        for flag in self._flags[:1]:
            flag.assign(may_wait)

    def before_step(self, waiting: Sequence[Copies]) -> None:
        """A step is about to run that may leave open sums in these variables."""
        if self._held is not waiting:
            if [id(copies[0]) for copies in self._held] != [id(copies[0]) for copies in waiting]:
                self.close()
            self._held = waiting

    def close(self) -> None:
        """Give all replicas the sums. All workers call this."""
        if self.are_open:
            if self._group.is_spread:
                self._exchange()
            else:
                # Without collectives, which an error may have ended.
                for copies in self._held:
                    with tf.device(copies[0].device):
                        total = tf.add_n([copy.read_value() for copy in copies])
                    for copy in copies:
                        copy.assign(total)
            self._flags[1].assign(False)
        self._held = ()

    def _exchange(self) -> None:
        group, held = self._group, self._held

        def exchange() -> None:
            sums = Sums(group.exchange)(group.run(lambda replica: group.read(held, replica)))
            group.run(lambda replica: group.assign(held, sums[replica.place], replica))

        tf.function(exchange, autograph=False)()

    def rescue(self) -> None:
        """Close the sums after an error, if no other worker is needed for that."""
        if not self._group.is_spread:
            self.close()

    def end(self) -> None:
        """`fit` is over. If sums are still open, there was an error."""
        self.allow(False)
        self.rescue()
        if self.are_open:
            # The other workers may have died.
            for copy in (copy for copies in self._held for copy in copies):
                copy.assign(tf.zeros_like(copy))
            self._flags[1].assign(False)
            logger.error(
                "Training ended between two updates: the gradients that were accumulated for the "
                "next one are lost, as each worker had a part of them."
            )
        self._held = ()
