"""`ReplicaMetrics` in a training that was killed and resumed."""

import keras
import numpy as np
import pytest
from replica_metrics_models import fit

from keras_multigpu.callbacks import ReplicaMetrics, ResumableCheckpoint


class StopAt(keras.callbacks.Callback):
    """Takes the states after a step and ends training, as a kill after a checkpoint would."""

    def __init__(self, callback, epoch, step):
        super().__init__()
        self.callback, self.at, self.taken = callback, (epoch, step), None

    def on_train_batch_end(self, batch, logs=None):
        run = self.model.training_run
        if (run.epoch, run.step) == self.at:
            self.taken = run.state, self.callback.state if self.callback else None
        elif self.taken is not None:
            raise KeyboardInterrupt


class GoOn(keras.callbacks.Callback):
    def __init__(self, callback, taken):
        super().__init__()
        self.callback, self.taken = callback, taken

    def on_train_begin(self, logs=None):
        def restore():
            self.model.training_run.restore(self.taken[0])
            self.callback.state = self.taken[1]

        self.model.training_run.after_begin(restore)


def test_a_resumed_training_goes_on_with_sums_and_file(measured, tmp_path):
    """Killed a step after the checkpoint: the lines since then go, no half line is kept."""
    path, whole_path = tmp_path / "replicas.csv", tmp_path / "whole.csv"
    callback = ReplicaMetrics(["mae"], path=whole_path, every_steps=1)
    whole = fit(measured(callback), callback, epochs=2)

    callback = ReplicaMetrics(["mae"], path=path, every_steps=1)
    stop = StopAt(callback, 1, 1)
    with pytest.raises(KeyboardInterrupt):
        fit(measured(callback), callback, stop, epochs=2)
    with path.open("a") as file:
        file.write("half a li")

    resumed = ReplicaMetrics(["mae"], path=path, every_steps=1)
    history = fit(measured(resumed), GoOn(resumed, stop.taken), resumed, epochs=2)
    for name in ("loss", "mae", "examples", "gradient_norm"):
        np.testing.assert_allclose(
            history[f"replica_1/{name}"], whole[f"replica_1/{name}"][1:], rtol=1e-6
        )
    lines, expected = path.read_text().splitlines(), whole_path.read_text().splitlines()
    assert len(lines) == len(expected)
    for one, other in zip(lines, expected, strict=True):
        assert one.split("examples")[0][:20] == other.split("examples")[0][:20]


def test_a_state_of_other_replicas_begins_the_epoch_anew(measured):
    callback = ReplicaMetrics(["mae"])
    stop = StopAt(callback, 0, 1)
    with pytest.raises(KeyboardInterrupt):
        fit(measured(callback), callback, stop)
    resumed = ReplicaMetrics(["mae"])
    history = fit(measured(resumed, 4), GoOn(resumed, stop.taken), resumed)
    np.testing.assert_allclose(history["replica_0/loss"], [(25 + 81) / 2], rtol=1e-6)


def test_a_checkpoint_brings_no_measurement_of_its_own(measured, tmp_path):
    """Also where it asks for the state before the first step: the file is that of one training."""

    def trained(folder, *others):
        measures = ReplicaMetrics(path=tmp_path / f"{folder}.csv", every_steps=1)
        saves = ResumableCheckpoint(tmp_path / folder, every_steps=1)
        fit(measured(measures), measures, *others, saves, epochs=2)
        return measures

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("parts", StopAt(None, 1, 1))
    resumed = trained("parts")
    expected, found = (
        [line.split(",")[:3] for line in (tmp_path / f"{name}.csv").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert found == expected
    steps = [(one.epoch, one.step) for one in whole.windows]
    assert [(one.epoch, one.step) for one in resumed.windows] == steps[-len(resumed.windows) :]
    assert len(resumed.windows) < len(steps) / 2
