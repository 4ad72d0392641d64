"""What the tests of the contract share."""

import pytest

from contract.pairs import Pairs


@pytest.fixture(scope="package")
def pairs():
    """Models that all tests share, because their steps take longest to make."""
    return Pairs()
