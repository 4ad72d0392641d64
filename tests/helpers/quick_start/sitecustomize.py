"""Python imports this first in each process that a test starts."""

import fast_keras  # noqa: F401
