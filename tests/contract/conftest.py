"""What the tests of the contract share."""

import pytest

from contract.pairs import Pairs


@pytest.fixture(scope="module")
def pairs():
    """Models that the tests of one module share; no damage reaches another."""
    return Pairs()
