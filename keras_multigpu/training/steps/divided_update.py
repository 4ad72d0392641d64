"""`DividedUpdate`: new values of variables that one replica of this process computes for all."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_multigpu.training.replica_group import Copies, Replica, is_shared


class DividedUpdate:
    """Which replica alone computes which new values, where replicas divide the optimizer.

    Args:
        owners: The place of the replica that computes a variable's new value, by its number.
    """

    def __init__(self, owners: Mapping[int, int]) -> None:
        self.owners = owners
        self._places: list[int | None] = [None, *sorted(set(owners.values()))]

    def barriers(self, new: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        """Tensors that are there once new values are: one for what all compute, and each owner."""
        # One tensor to wait for, and not a thousand for each of a thousand assignments.
        found = []
        for place in self._places:
            own = [new[number] for number in sorted(new) if self.owners.get(number) == place]
            with tf.control_dependencies(own):
                found.append(tf.zeros(()))
        return found

    def owned(
        self, numbers: Sequence[int], new: Sequence[tf.Tensor], barriers: Sequence[tf.Tensor]
    ) -> dict[str, int]:
        """The names of the tensors that one replica computes alone, with its place."""
        places = [self.owners.get(number) for number in numbers]
        pairs = [*zip(new, places, strict=True), *zip(barriers, self._places, strict=True)]
        return {tensor.name: place for tensor, place in pairs if place is not None}

    def completed(
        self,
        replica: Replica,
        numbers: Sequence[int],
        new: Sequence[Sequence[tf.Tensor]],
        copies: Sequence[Copies],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """A replica's new values, with those that others computed; and a tensor to wait for.

        Args:
            numbers: The numbers of the variables.
            new: Their new values on each replica.
            copies: All variables of the step, by number.
        """
        values, copied = list(new[replica.place]), []
        for place, number in enumerate(numbers):
            owner = self.owners.get(number, replica.place)
            if owner != replica.place:
                values[place] = new[owner][place]
                if not is_shared(copies[number]):
                    with tf.device(replica.device):
                        values[place] = tf.identity(values[place])
                    copied.append(values[place])
        # If a copy fails to arrive, nothing may have been assigned.
        with tf.device(replica.device), tf.control_dependencies(copied):
            return values, tf.zeros(())
