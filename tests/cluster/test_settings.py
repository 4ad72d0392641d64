"""What the environment says of a cluster besides its workers."""

import pytest

from keras_multigpu.cluster.settings import Settings, settings


def test_the_environment_changes_what_is_usual(monkeypatch):
    """Each setting has a variable of its own."""
    assert settings() == Settings(10, 600, 1)
    monkeypatch.setenv("KERAS_MULTIGPU_EXCHANGE_TIMEOUT", "30")
    assert settings() == Settings(10, 30, 1)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "soon", "9" * 5000])
def test_a_wrong_number_is_named(monkeypatch, text):
    """By the name of its variable."""
    monkeypatch.setenv("KERAS_MULTIGPU_HEARTBEAT_TIMEOUT", text)
    with pytest.raises(ValueError, match="KERAS_MULTIGPU_HEARTBEAT_TIMEOUT is not a positive"):
        settings()
