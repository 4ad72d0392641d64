"""Without TensorFlow as backend, every public name raises an error that says how to fix it."""

import os
import subprocess
import sys

import keras
import pytest

from keras_multigpu.keras_internals.backend import require_tensorflow

EACH_NAME = """
import keras_multigpu as kmg

for name in "strategy distribute DistributedModel verify data augmentation callbacks".split():
    try:
        getattr(kmg, name)
    except RuntimeError as error:
        print(name, error)
"""


def test_a_backend_other_than_tensorflow_is_refused(monkeypatch):
    require_tensorflow()
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"runs on 'jax'\. Expected TensorFlow.*KERAS_BACKEND="):
        require_tensorflow()


@pytest.mark.slow
def test_every_public_name_refuses_another_backend():
    """Even if that backend is not installed, so that Keras cannot be imported."""
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", EACH_NAME],
        capture_output=True,
        env=environment,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    for line in lines:
        assert "'torch'" in line and "Set KERAS_BACKEND=tensorflow before Python starts" in line
