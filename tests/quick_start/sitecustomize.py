"""Python imports this first in each process that a test starts: they start, and train, faster.

Keras imports scikit-learn, Matplotlib and pandas where they are installed, for wrappers and inputs
of theirs. That is two of the five seconds that a process takes to start. Once Keras is there,
whoever needs one of them gets it. `conftest.py` says more about garbage.
"""

import gc
import sys

gc.set_threshold(100_000, 10, 2)


class NotForKeras:
    """Finds no optional package while Keras is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        keras = sys.modules.get("keras")
        if name in ("matplotlib", "pandas", "sklearn") and keras and not hasattr(keras, "version"):
            raise ModuleNotFoundError(f"Keras does without {name} here.", name=name)


sys.meta_path.insert(0, NotForKeras)
