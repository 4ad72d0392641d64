"""What the tests of the contract share."""

import pytest

from contract.pairs import Pairs


@pytest.fixture(autouse=True)
def as_users_run(optimized_graphs):
    """Users notice whatever is tested here, so TensorFlow optimizes graphs as it does for them."""


@pytest.fixture(scope="package")
def pairs():
    """Models that all tests share, because their steps take longest to make."""
    return Pairs()
