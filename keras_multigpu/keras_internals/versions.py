"""The versions of Keras and TensorFlow that the tests have run on."""

import re

import keras
import tensorflow as tf

NEWEST_TESTED = {"Keras": "3.15", "TensorFlow": "2.21"}
"""The newest versions that the tests have run on; the oldest are those of `pyproject.toml`."""


def newer_than_tested(installed: dict[str, str] | None = None) -> str:
    """A sentence for the log if an installed version is newer than the tested ones."""
    installed = installed or {"Keras": keras.version(), "TensorFlow": tf.__version__}
    newer = [
        f"{name} {version} (tested up to {NEWEST_TESTED[name]})"
        for name, version in installed.items()
        if minor(version) > minor(NEWEST_TESTED[name])
    ]
    if not newer:
        return ""
    return (
        f"{' and '.join(newer)}: newer than the tests have run on. `keras_multigpu.verify` "
        "checks whether the numbers are still those of one device."
    )


def minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
