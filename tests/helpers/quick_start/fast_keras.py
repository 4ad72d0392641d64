"""Lets Keras start, train and end faster; to be imported before it.

Keras imports scikit-learn, Matplotlib and pandas where they are installed, for wrappers and inputs
of theirs. That is two of the five seconds that a process takes to start. Once Keras is there,
whoever needs one of them gets it.
"""

import atexit
import functools
import gc
import sys
import typing

# Graphs are made of millions of Python objects, among which Python looks for garbage all the time:
# a third of all that the tests did, and more with every graph.
gc.set_threshold(600_000, 4, 2)

# A process that ends looks through all modules once more: a quarter of what it took to start.
atexit.register(gc.freeze)

# TensorFlow's annotations name the same few types 18,000 times, and each is compiled.
typing.compile = functools.cache(compile)
# Whatever becomes a tensor is compared with protocols, whose names are listed each time.
typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)


class NotForKeras:
    """Finds no optional package while Keras is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        keras = sys.modules.get("keras")
        if name in ("matplotlib", "pandas", "sklearn") and keras and not hasattr(keras, "version"):
            raise ModuleNotFoundError(f"Keras does without {name} here.", name=name)


sys.meta_path.insert(0, NotForKeras)
