"""Versions of Keras and TensorFlow that are newer than those tested."""

from pathlib import Path

from keras_multigpu import keras_internals
from keras_multigpu.keras_internals.versions import NEWEST_TESTED, newer_than_tested

README = Path(__file__).parents[2] / "README.md"


def test_versions_newer_than_the_tested_ones_are_reported():
    """The first two parts of a version are compared, as numbers."""
    assert newer_than_tested({"Keras": "3.9.2", "TensorFlow": "2.21.7"}) == ""
    text = newer_than_tested({"Keras": "3.100.0", "TensorFlow": "2.21.0"})
    tested = NEWEST_TESTED["Keras"]
    assert text.startswith(
        f"Keras 3.100.0 (tested up to {tested}): newer than the tests have run on."
    )
    assert "TensorFlow" in newer_than_tested({"Keras": "3.15.1", "TensorFlow": "3.0.0rc1"})


def test_the_readme_names_the_newest_tested_versions():
    """The docstring of `keras_internals` names them, too."""
    keras, tensorflow = NEWEST_TESTED["Keras"], NEWEST_TESTED["TensorFlow"]
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"tested up to Keras {keras} and TensorFlow {tensorflow}." in text
    door = " ".join(keras_internals.__doc__.split())
    assert f"to {keras} with TensorFlow 2.19 to {tensorflow}." in door
