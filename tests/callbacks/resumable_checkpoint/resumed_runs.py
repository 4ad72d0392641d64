"""A training with or without stops, and its results, for the tests of resuming."""

import numpy as np
import pytest
from helpers.stopped_runs import StopAt, Stopped
from interrupted_runs import (
    Remembering,
    assert_same_values,
    batches,
    checkpoint_in,
    close_files,
    fit,
    keras_callbacks,
    network,
    values_of,
)


def run(folder, stops, *, replicas=(2,), data=batches, last=False, extra=None, **arguments):
    """Train with or without stops; returns the values, history, CSV file and a callback's state."""
    folder.mkdir()
    network_settings = arguments.pop("network", {})
    checkpoint_settings = arguments.pop("checkpoint", {})
    for number, stop in enumerate([*stops, None]):
        model = network(replicas[min(number, len(replicas) - 1)], **network_settings)
        memory = Remembering()
        callbacks = [memory, *keras_callbacks(folder), *(extra() if extra else [])]
        callbacks += [StopAt(*stop)] if stop else []
        checkpoint = checkpoint_in(folder / "run", **checkpoint_settings)
        if stop is None:
            history = fit(model, data(), callbacks, checkpoint, last, **arguments)
            text = (folder / "log.csv").read_text()
            return values_of(model), history, text, memory.state
        with pytest.raises(Stopped):
            fit(model, data(), callbacks, checkpoint, last, **arguments)
        close_files(callbacks)
    raise AssertionError


def assert_same(one, other):
    """Values, history, CSV file and a callback's own state are equal, bit for bit."""
    assert_same_values(one[0], other[0])
    assert one[1].history == other[1].history
    assert one[1].epoch == other[1].epoch
    assert one[2] == other[2]
    assert one[3]["losses"] == other[3]["losses"]
    np.testing.assert_array_equal(one[3]["total"], other[3]["total"])
