"""Whether every training runs on every number of replicas; this imports nothing, as plain Keras."""

import os

ALL_REPLICAS = os.environ.get("KMG_ALL_REPLICAS") == "1"
"""Set by `make test-all`."""
