"""`ReplicaMetrics` in a training that was killed and resumed."""

import numpy as np
import pytest
from helpers.stopped_runs import StopAt, Stopped
from replica_metrics_models import fit

from keras_multigpu.callbacks import ReplicaMetrics, ResumableCheckpoint


@pytest.mark.slow
def test_a_resumed_training_continues_its_sums_and_file(measured, tmp_path):
    """Killed a step after the checkpoint: later lines and half lines are dropped."""

    def trained(name, *others):
        callback = ReplicaMetrics(["mae"], path=tmp_path / f"{name}.csv", every_steps=1)
        saves = ResumableCheckpoint(tmp_path / name, every_steps=4, every_epochs=None)
        history = fit(measured(callback), callback, *others, saves, epochs=2)
        return callback, history

    whole, expected = trained("whole")
    with pytest.raises(Stopped):
        trained("parts", StopAt(1, 2))
    with (tmp_path / "parts.csv").open("a") as file:
        file.write("half a li")
    resumed, history = trained("parts")
    for name in ("loss", "mae", "examples", "gradient_norm"):
        key = f"replica_1/{name}"
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-6)
    one, other = (
        [line.split(",")[:3] for line in (tmp_path / f"{name}.csv").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert one == other
    # A checkpoint adds no measurement, even one before the first step.
    assert [(each.epoch, each.step) for each in whole.windows[-2:]] == [
        (each.epoch, each.step) for each in resumed.windows
    ]


def test_another_number_of_replicas_restarts_the_sums(measured, tmp_path):
    """The second and third batch remain, with the numbers from 5 to 10."""

    def trained(replicas, *others):
        callback = ReplicaMetrics(["mae"])
        saves = ResumableCheckpoint(tmp_path, every_steps=1)
        return fit(measured(callback, replicas), callback, *others, saves)

    with pytest.raises(Stopped):
        trained(2, StopAt(0, 2))
    squares = np.arange(5.0, 11.0) ** 2
    np.testing.assert_allclose(trained(1)["replica_0/loss"], [squares.mean()], rtol=1e-6)
