"""A model whose step is already compiled with the callback's probe."""

import pytest
from replica_metrics_models import line


@pytest.fixture(scope="package")
def measured():
    """A function that returns a model for a callback, compiled as in a second `fit`."""

    def measured(callback, replicas=2):
        assert callback.metrics in ([], ["mae"])
        return line(replicas, measures=len(callback.metrics))

    return measured
