"""Whether every training runs on every number of replicas; this imports nothing, as plain Keras."""

import os

ALL_REPLICAS = os.environ.get("KMG_ALL_REPLICAS") == "1"
"""Set by `make test-all`."""


def in_test_all(*rows):
    """Rows for `parametrize` that only `make test-all` runs; what proves the same stands beside."""
    return rows if ALL_REPLICAS else ()
