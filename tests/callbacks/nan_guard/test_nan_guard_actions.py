"""`NaNGuard` stops, skips and rolls back; expected values are written by hand."""

import numpy as np
import pytest
from nan_guard_models import assert_same, data, fit, guarded, state_of

from keras_multigpu.callbacks import NaNGuard


@pytest.mark.slow
def test_training_with_a_skipped_step_is_training_without_its_batch():
    """Even in the middle of three steps in one graph."""
    x, y = data(13)
    guard = NaNGuard("skip")
    compiled = {"steps_per_execution": 3, "normalized": True}
    model = guarded(guard, **compiled)
    said = r"step 2: the loss is.*replica 1 \(CPU:1\).*example 5 of"
    with pytest.warns(UserWarning, match=said):
        history = fit(model, x, y, guard, epochs=2)
    found = state_of(model)
    kept = [*range(8), *range(16, 24)]
    other = NaNGuard("skip")
    good = guarded(other, **compiled)
    good_history = fit(good, x[kept], y[kept], other, epochs=2).history
    assert_same(found, state_of(good))
    assert good_history.pop("skipped_steps") == [0, 0]
    assert history.history.pop("skipped_steps") == [1, 1]
    assert history.history == good_history
    assert guard.skipped_steps == 2
    assert [(f.epoch, f.step, f.position) for f in guard.findings] == [(0, 1, 5), (1, 1, 5)]


def test_a_later_check_finds_the_same_epoch_and_step():
    x, y = data(24 + 13, examples=64)
    guard = NaNGuard(every_steps=100)
    model = guarded(guard)
    fit(model, x, y, guard)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.position) == (0, 4, 5)
    assert int(model.optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("every_steps", [1, 10])
def test_too_many_skipped_steps_in_a_row_end_training(every_steps):
    """A good batch in between starts the count again."""
    x, y = data(13, examples=64)
    x[29] = np.nan
    guard = NaNGuard("skip", patience=2, every_steps=every_steps)
    model = guarded(guard)
    with pytest.warns(UserWarning):
        fit(model, x, y, guard)
    assert guard.skipped_steps == 2
    x[17] = np.nan
    with (
        pytest.warns(UserWarning),
        pytest.raises(FloatingPointError, match="3 steps in a row were.*Received: patience=2")
        if every_steps == 10
        else pytest.raises(FloatingPointError, match="2 steps in a row were.*Received: patience=2"),
    ):
        fit(model, x, y, guard)


def test_an_epoch_of_skipped_steps_has_no_loss():
    """Metrics of zero would look like a perfect model, to `ModelCheckpoint` for example."""
    x, y = data()
    x[::4] = np.nan
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning):
        history = fit(guarded(guard), x, y, guard, validation_data=data())
    assert np.isnan(history.history["loss"]) and np.isnan(history.history["mae"])
    assert np.isfinite(history.history["val_loss"])
    assert history.history["skipped_steps"] == [3]
