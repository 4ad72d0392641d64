"""What the tests of this folder share."""

import pytest
import tensorflow as tf


@pytest.fixture
def graphs_that_run_twice():
    """To optimise them takes half the time."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})
