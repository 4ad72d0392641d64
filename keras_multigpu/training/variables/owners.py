"""`shard_optimizer`: which replica keeps and updates the slots of a weight.

The replicas of a process divide the weights among them. The slots of a weight, such as Adam's two
averages of its gradient, live only on the replica that owns the weight. The traced step shows which
variables are slots: neither its results nor weights of other owners depend on them. So no list of
optimizers is needed, and a variable that all weights depend on stays on every replica.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.partition.program import Program
from keras_multigpu.partition.variables import variables_needed
from keras_multigpu.training.replica_group import Copies, copies_of
from keras_multigpu.training.variables.placement import (
    Placement,
    leaves_of,
    optimizers_of,
    own_optimizers,
    with_inner,
)
from keras_multigpu.writing import size_text

logger = logging.getLogger("keras_multigpu")


def owners_of(model: keras.Model, devices: Sequence[str]) -> dict[int, int]:
    """Which device owns each weight, by the weight's id.

    Weights are assigned by decreasing size, each to the device with the least so far.
    """
    known = [optimizer_internals.optimized_variables(each) for each in optimizers_of(model)]
    weights = {id(v): v for v in (*model.trainable_variables, *leaves_of(known))}
    loads, owners = [0] * len(devices), {}
    for weight in sorted(weights.values(), key=lambda weight: -math.prod(weight.shape)):
        owners[id(weight)] = loads.index(min(loads))
        loads[owners[id(weight)]] += math.prod(weight.shape)
    return owners


class Slots:
    """The optimizers' slots that one step uses.

    Args:
        owners: What `owners_of` returns.
        devices: The devices of the replicas of this process.
        copies: The variables of the step, by number.
    """

    def __init__(
        self,
        model: keras.Model,
        owners: Mapping[int, int],
        devices: Sequence[str],
        copies: Sequence[Copies],
        placement: Placement,
    ) -> None:
        self._model, self._devices, self._placement = model, devices, placement
        numbers = {id(own[0]): number for number, own in enumerate(copies)}
        optimizers = optimizers_of(model)
        known = [v for each in optimizers for v in optimizer_internals.optimized_variables(each)]
        self._weights = {
            numbers[id(first)]: owners[id(v)]
            for v in (*model.trainable_variables, *known)
            if id(v) in owners and id(first := copies_of(v)[0]) in numbers
        }
        self._slots = {
            number: v
            for v in (v for optimizer in optimizers for v in optimizer.variables)
            if (number := numbers.get(id(copies_of(v)[0]))) is not None
            and number not in self._weights
            and tf.as_dtype(v.dtype).is_floating
        }

    def find(self, program: Program) -> dict[int, int]:
        """The place of the replica that alone computes a new value, by the variable's number.

        Args:
            program: The one-device step.
        """
        results, needed = variables_needed(program)
        readers = {
            slot: {number for number, bits in needed.items() if bits >> slot & 1}
            for slot in self._slots
            if slot in needed and not results >> slot & 1
        }
        owners: dict[int, int | None] = {}
        for slot, found in readers.items():
            needed_by = {self._weights[number] for number in found & self._weights.keys()}
            if len(needed_by) < 2 and found <= self._weights.keys() | self._slots.keys():
                owners[slot] = next(iter(needed_by), None)
        # A slot that feeds only other slots lives with them.
        while fed := {
            reader: owners[slot]
            for slot, place in owners.items()
            if place is not None
            for reader in readers[slot]
            if reader in owners and owners[reader] is None
        }:
            owners |= fed
        owners = {slot: place for slot, place in owners.items() if self._may_be(slot, place)}
        # A replica that computes a slot needs all the slots that it is computed from.
        while apart := {
            slot
            for slot, place in owners.items()
            if any(owners.get(reader) != place for reader in readers[slot] & self._slots.keys())
        }:
            owners = {slot: place for slot, place in owners.items() if slot not in apart}
        of_weights = {n for slot in owners for n in readers[slot]} & self._weights.keys()
        places = {slot: place for slot, place in owners.items() if place is not None}
        return places | {number: self._weights[number] for number in of_weights}

    def _may_be(self, slot: int, place: int | None) -> bool:
        """Whether a slot is on that replica, or can move there."""
        if place is None:
            return False
        variable = self._slots[slot]
        (first, *others) = copies_of(variable)
        is_there = not others and first.device == self._devices[place]
        return is_there or id(variable) not in self._placement.unmovable

    def hand_out(self, places: Mapping[int, int], warn: Callable[[str], None]) -> bool:
        """Move slots to their owners, and give all replicas the others; whether any has moved."""
        new = {n: v for n, v in self._slots.items() if id(v) not in self._placement.unmovable}
        moved = new.keys() & places.keys()
        for number in moved:
            self._placement.place_one(new[number], self._devices[places[number]])
        if new:
            self._report(places, warn)
        self._placement.unmovable.update({id(variable): variable for variable in new.values()})
        return self._placement.release() or bool(moved)

    def _report(self, places: Mapping[int, int], warn: Callable[[str], None]) -> None:
        """Report how much each replica keeps, or that an optimizer cannot be divided."""
        sizes = {n: math.prod(v.shape) * tf.as_dtype(v.dtype).size for n, v in self._slots.items()}
        numbers = {id(variable): number for number, variable in self._slots.items()}
        for optimizer in own_optimizers(self._model):
            parts = [v for each in with_inner(optimizer) for v in each.variables]
            own = {numbers[id(v)] for v in parts if id(v) in numbers}
            loads = [
                size_text(sum(sizes[n] for n in own if places.get(n, place) == place))
                for place in range(len(self._devices))
            ]
            if own & places.keys():
                total, each = size_text(sum(sizes[n] for n in own)), ", ".join(loads)
                logger.info("Of %s of `%s` the replicas keep %s.", total, optimizer.name, each)
            elif any(math.prod(self._slots[n].shape) > 1 for n in own):
                warn(
                    f"`shard_optimizer`: every replica keeps all of `{optimizer.name}`, because no "
                    "variable of it belongs to the weights of one replica alone."
                )
