"""`RayReport`: reports each epoch to Ray Train, with the model."""

import tempfile
from pathlib import Path
from typing import Any

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import runtime_error
from keras_multigpu.cluster.ray import installed_ray_train


class RayReport(RunCallback):
    """Reports the logs of each epoch to Ray Train, and the model as a checkpoint.

    For functions that `keras_multigpu.cluster.ray.train` runs. All workers report, as Ray expects;
    the first one saves the model.

    Args:
        checkpoint: Whether to add `model.keras` to each report. Ray keeps the logs of the last
            report only if it has a checkpoint.

    Example:

    ```python
    model.fit(train, epochs=10, callbacks=[kmg.callbacks.RayReport()])
    ```
    """

    def __init__(self, checkpoint: bool = True) -> None:
        super().__init__()
        self.checkpoint = checkpoint

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        try:
            installed_ray_train().get_context()
        except RuntimeError as error:
            raise runtime_error(
                "`RayReport` cannot report: Ray Train has not started this `fit`.",
                "Expected a function that Ray Train runs on its workers.",
                "Start the training with `kmg.cluster.ray.train`, or leave the callback out.",
                model=type(self.model).__name__,
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        ray_train = installed_ray_train()
        metrics = {**(logs or {}), "epoch": epoch}
        if not self.checkpoint or ray_train.get_context().get_world_rank():
            ray_train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder, "model.keras"))
            ray_train.report(metrics, checkpoint=ray_train.Checkpoint.from_directory(folder))
