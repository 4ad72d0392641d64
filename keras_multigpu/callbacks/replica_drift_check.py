"""`ReplicaDriftCheck`: whether all replicas hold the same weights, bit for bit."""

from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import problem, require_choice, warn
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.steps.same_on_workers import number_of
from keras_multigpu.training.variables.model_state import name_of, variables_of
from keras_multigpu.writing import writes_here

NAMED = 5
"""How many variables a message names."""


class Drift(NamedTuple):
    """A variable whose copies differ.

    Attributes:
        variable: Its path.
        devices: The devices whose copies differ from that of the most replicas.
        epoch: The epoch, from zero.
    """

    variable: str
    devices: list[str]
    epoch: int

    def __str__(self) -> str:
        return f"{self.variable} on {', '.join(self.devices)}"


class ReplicaDriftCheck(RunCallback):
    """Checks at the end of each epoch that all replicas hold the same weights, bit for bit.

    Copies drift apart if memory is faulty, if code assigns to one replica only, or if a kernel adds
    in a different order on one device. Weights, statistics of layers, seeds and the optimizer's
    variables are compared; processes exchange a hash of each.

    Args:
        action: `"raise"` stops training with an error, `"warn"` warns.

    Attributes:
        drifts: What was found in this `fit`: `variable`, `devices` and `epoch`.
    """

    def __init__(self, action: str = "raise") -> None:
        super().__init__()
        require_choice("action", action, ("raise", "warn"))
        self.action = action
        self.drifts: list[Drift] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.drifts = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        group = self.run.group
        names, own = [], []
        for variable in variables_of(self.model).values():
            copies = copies_of(variable)
            if len(copies) == 1:
                # Central storage has one copy in all, and each of several processes has one.
                copies *= len(group.replicas)
            names.append(name_of(variable))
            own.append([number_of(copy.numpy().tobytes()) for copy in copies])
        # Every process has the same table, so all of them raise, or none.
        everyones = group.exchange_numbers(np.transpose(own).ravel().tolist())
        table = np.reshape(everyones, [group.count, len(names)]).T.tolist()
        found = []
        for name, hashes in zip(names, table, strict=True):
            # Of groups of the same size, the one with the first replica is believed.
            believed = max(hashes, key=hashes.count)
            odd = [group.name_of(i) for i, each in enumerate(hashes) if each != believed]
            if odd:
                found.append(Drift(name, odd, epoch))
        if not found:
            return
        self.drifts += found
        more = f"; and {len(found) - NAMED} more variables" if len(found) > NAMED else ""
        text = problem(
            f"Copies differ from those of the other replicas: "
            f"{'; '.join(map(str, found[:NAMED]))}{more}.",
            "Expected every bit to be equal on all replicas.",
            "Resume from an earlier checkpoint and test the memory of the device; make sure that "
            "no code assigns to a single copy.",
            epoch=epoch,
            variables=len(found),
        )
        if self.action == "raise":
            raise RuntimeError(text)
        if writes_here():
            warn(text, stacklevel=2)
