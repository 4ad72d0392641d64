"""Whether every training runs on every number of replicas; known without importing Keras."""

import os

ALL_REPLICAS = os.environ.get("KMG_ALL_REPLICAS") == "1"
"""Set by `make test-all`."""


def in_test_all(*rows):
    """Rows for `parametrize` that only `make test-all` runs, beside others that prove the same."""
    return rows if ALL_REPLICAS else ()
