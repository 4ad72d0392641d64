"""Generators lose no batch, and may end early."""

import numpy as np
import pytest

from contract.pairs import BATCHES, X, Y, assert_close, dataset


@pytest.mark.slow
def test_a_generator_loses_no_batch(pairs):
    """After two epochs of two batches the fifth is next."""
    left = iter([(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)])
    _, model = pairs()
    model.fit(left, steps_per_epoch=2, epochs=2, verbose=0)
    np.testing.assert_array_equal(next(left)[0], X[16:20])


@pytest.mark.slow
def test_a_finite_generator_is_one_epoch(pairs):
    """Without `steps_per_epoch` it is read to its end."""
    one, two = pairs()
    expected = one.fit(dataset(), shuffle=False, verbose=0).history
    assert_close(expected, two.fit((batch for batch in BATCHES), verbose=0).history)
    assert_close(one.get_weights(), two.get_weights())


@pytest.mark.slow
def test_a_generator_that_ends_early_ends_training(pairs):
    one, two = pairs()
    expected = one.fit(dataset(), shuffle=False, verbose=0).history
    with pytest.warns(UserWarning, match="ran out of data"):
        history = two.fit((batch for batch in BATCHES), steps_per_epoch=4, epochs=3, verbose=0)
    assert history.epoch == [0]
    assert_close(expected, history.history)
    validation = (batch for batch in BATCHES)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = two.fit(X, Y, epochs=3, validation_data=validation, validation_steps=3, verbose=0)
    assert [len(history.history[name]) for name in ("loss", "val_loss")] == [3, 2]
