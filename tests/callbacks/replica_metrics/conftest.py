"""A model whose step is already compiled with the callback's probe."""

import pytest
from replica_metrics_models import line

from keras_multigpu.callbacks.replica_metrics.scores import ScoreProbe


@pytest.fixture(scope="package")
def measured():
    """A function that returns a model for a callback, compiled as in a second `fit`."""
    probes = {}

    def measured(callback, replicas=2):
        assert callback.metrics in ([], ["mae"])
        model = line(replicas, measures=len(callback.metrics))
        callback._probe = probes.setdefault(model, ScoreProbe(callback.metrics))
        return model

    return measured
