"""Whether every training runs on every number of replicas; known without importing Keras."""

import os

ALL_REPLICAS = os.environ.get("KMG_ALL_REPLICAS") == "1"
"""Set by `make test-all`."""


def first_rows(table, count=0):
    """The rows of a table that `make test` runs; `make test-all` runs all."""
    return list(table) if ALL_REPLICAS else list(table)[:count]
