"""A network for guards whose part in its step is compiled already."""

import pytest
from nan_guard_models import network


@pytest.fixture(scope="package")
def guarded():
    """A function that returns a network for a guard, compiled as for a second `fit` with it.

    Guards that skip and others have networks of their own: a step is kept for one part only.
    """

    def guarded(guard, replicas=2, **settings):
        return network(replicas, skips=guard.action == "skip", **settings)

    return guarded
