"""Newer versions than the tested ones."""

from keras_multigpu.keras_internals.versions import newer_than_tested


def test_newer_versions_than_tested_are_told():
    """A version is compared by its first two numbers, as numbers."""
    assert newer_than_tested({"Keras": "3.9.2", "TensorFlow": "2.21.7"}) == ""
    text = newer_than_tested({"Keras": "3.100.0", "TensorFlow": "2.21.0"})
    assert text.startswith("Keras 3.100.0 (tested up to 3.15): newer than this package knows.")
    assert "TensorFlow" in newer_than_tested({"Keras": "3.15.1", "TensorFlow": "3.0.0rc1"})
