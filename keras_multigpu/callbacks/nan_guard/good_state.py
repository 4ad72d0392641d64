"""The state of a model to go back to, in the memory of the host."""

from typing import Any, Self

import keras

from keras_multigpu.training.variables.model_state import ModelState
from keras_multigpu.training.variables.placement import optimizers_of


class GoodState:
    """A model's weights, optimizer, seeds and, for the rest of the epoch, metrics at some step."""

    def __init__(self, state: ModelState, epoch: int) -> None:
        self._state = state
        self._epoch = epoch

    @classmethod
    def of(cls, model: keras.Model, epoch: int) -> Self | None:
        """The present state; None while the optimizer has no variables yet."""
        if not all(optimizer.built for optimizer in optimizers_of(model)):
            return None
        return cls(ModelState.of(model), epoch)

    def restore(self, model: keras.Model, epoch: int) -> None:
        """Give the values back. Metrics that were not there, or of another epoch, begin anew."""
        present = ModelState.of(model).values
        known = epoch == self._epoch and present.keys() == self._state.values.keys()
        ModelState({**present, **self._state.values}).restore(model)
        if not known:
            model.reset_metrics()

    @property
    def saved(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "values": dict(self._state.values)}

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> Self:
        return cls(ModelState(dict(saved["values"])), saved["epoch"])
