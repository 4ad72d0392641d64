"""`EvaluationAveraging`: one set of BatchNorm statistics for all replicas, in Keras's own `fit`."""

import logging
from typing import Any

import keras

from keras_multigpu.callbacks.evaluation_averaging.mean import StatisticsMean
from keras_multigpu.callbacks.evaluation_averaging.mean import copied_statistics
from keras_multigpu.checks import problem
from keras_multigpu.checks import warn
from keras_multigpu.keras_internals.callback_internals import callbacks_beside
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replica_group import home_device
from keras_multigpu.training.replica_group import require_one_process

logger = logging.getLogger("keras_multigpu")


class EvaluationAveraging(keras.callbacks.Callback):
    """Averages BatchNorm statistics over replicas before they are used or saved.

    In Keras's own `fit` under a `MirroredStrategy` each replica keeps its own moving mean and
    variance. Validation then uses as many different models as there are replicas, and only
    the first one is saved. This callback gives every replica the mean of all: when `evaluate`, the
    validation inside `fit` and `predict` begin, and when an epoch ends. Training itself is not
    changed, because it does not use moving statistics.

    The same is done with everything else that forward passes change in layers that are not
    frozen and that is a float. Values that are not finite are left out, with a warning.

    A model from `keras_multigpu.distribute` averages in every step and does not need this; the
    callback then does nothing, and says so once. It must stand before callbacks that save, such as
    `ModelCheckpoint`, which is checked.

    Args:
        before_saving: Whether to average at the end of each epoch too, so that whatever is saved
            then has the mean.
    """

    def __init__(self, before_saving: bool = True) -> None:
        super().__init__()
        if not isinstance(before_saving, bool):
            raise ValueError(
                problem(
                    "`before_saving` is neither True nor False.",
                    "Expected a boolean.",
                    "Leave it out to average at the end of each epoch too.",
                    before_saving=before_saving,
                )
            )
        self.before_saving = before_saving
        self._mean: StatisticsMean | None = None
        self._told = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """See that callbacks which save come later."""
        if self._is_needed() and self.before_saving:
            check_order(self, callbacks_beside(self))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average before an evaluation, also the one inside `fit`."""
        self._average()

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average before predictions."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average before others save."""
        if self.before_saving:
            self._average()

    def _average(self) -> None:
        if not self._is_needed():
            return
        statistics = copied_statistics(self.model)
        if not statistics:
            return
        if self._mean is None or not self._mean.fits(statistics):
            self._mean = StatisticsMean(statistics)
        if bad := self._mean.run():
            warn(
                problem(
                    "A replica's BatchNorm statistics are not finite, and were left out of the "
                    "mean.",
                    "Expected numbers on every replica.",
                    "See that every replica gets examples in each step: a replica without any has "
                    "no mean. `keras_multigpu.distribute` handles such batches.",
                    devices=bad,
                ),
                stacklevel=2,
            )

    def _is_needed(self) -> bool:
        strategy = self.model.distribute_strategy
        if isinstance(self.model, DistributedModel):
            self._tell(
                "it is not needed: a model from `keras_multigpu.distribute` averages its "
                "statistics in every step."
            )
            return False
        if strategy.num_replicas_in_sync == 1 or home_device(strategy) is not None:
            self._tell("there is one copy of the statistics, and so nothing to average.")
            return False
        require_one_process(strategy)
        return True

    def _tell(self, what: str) -> None:
        if not self._told:
            logger.warning("EvaluationAveraging: %s", what)
        self._told = True


def check_order(
    callback: keras.callbacks.Callback, callbacks: list[keras.callbacks.Callback]
) -> None:
    """Raise where a callback would save too early; warn where one saves in between."""
    for index, other in enumerate(callbacks):
        if not saves(other):
            continue
        if index < callbacks.index(callback):
            raise ValueError(
                problem(
                    f"{type(other).__name__} stands before EvaluationAveraging and would save the "
                    "statistics of the first replica.",
                    "Expected EvaluationAveraging before all callbacks that save weights.",
                    "Move it to the front of `callbacks`.",
                    callbacks=[type(each).__name__ for each in callbacks],
                )
            )
        if getattr(other, "save_freq", "epoch") != "epoch":
            warn(
                problem(
                    f"{type(other).__name__} saves between epochs, when BatchNorm statistics are "
                    "those of the first replica.",
                    "Expected saving at the end of epochs, where they are averaged.",
                    'Leave `save_freq="epoch"`, or train with `keras_multigpu.distribute`.',
                    save_freq=vars(other)["save_freq"],
                ),
                stacklevel=2,
            )


def saves(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback of Keras keeps the weights of an epoch."""
    if isinstance(callback, keras.callbacks.EarlyStopping):
        return bool(callback.restore_best_weights)
    return isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore))
