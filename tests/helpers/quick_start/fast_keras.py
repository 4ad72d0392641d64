"""Makes Keras start, train and exit faster; import this before Keras.

Keras imports scikit-learn, Matplotlib and pandas where they are installed, for its wrappers of
them: two of the five seconds that a process takes to start. After Keras, they can be imported.
"""

import atexit
import functools
import gc
import sys
import typing

# Graphs are millions of Python objects, which the garbage collector scans again and again: a third
# of the tests' time, and more with every graph.
gc.set_threshold(600_000, 4, 2)

# On exit the collector scans all modules once more: a quarter of the time that the start took.
atexit.register(gc.freeze)

# TensorFlow's annotations name the same few types 18,000 times, and each is compiled.
typing.compile = functools.cache(compile)
# Each conversion to a tensor checks protocols, whose attributes are listed each time.
typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)


class NotForKeras:
    """Finds no optional package while Keras is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        keras = sys.modules.get("keras")
        if name in ("matplotlib", "pandas", "sklearn") and keras and not hasattr(keras, "version"):
            raise ModuleNotFoundError(f"Keras does without {name} here.", name=name)


sys.meta_path.insert(0, NotForKeras)
