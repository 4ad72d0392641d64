"""Switches TensorFlow's graph optimizer off in processes of tests where `conftest.py` does."""

import os


def unoptimized_if_quick():
    """With `KMG_QUICK=1`, run graphs as they are: optimizing them takes longer than running."""
    if os.environ.get("KMG_QUICK") == "1":
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
