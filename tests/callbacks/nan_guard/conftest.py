"""A network for guards whose part in its step is compiled already."""

import pytest
from nan_guard_models import network

from keras_multigpu.callbacks.nan_guard.probe import FiniteProbe


@pytest.fixture(scope="package")
def guarded():
    """A function that returns a network for a guard, compiled as for a second `fit` with it.

    Guards that skip and others have networks of their own: a step is kept for one part only.
    """
    probes = {}

    def guarded(guard, replicas=2, **settings):
        model = network(replicas, skips=guard.action == "skip", **settings)
        guard._probe = probes.setdefault(model, FiniteProbe(model, skips=guard.action == "skip"))
        return model

    return guarded
