"""Runs Keras's own tests on distributed models.

    python tests/keras_suite                                         # all that run a model
    python tests/keras_suite --replicas=1 trainers/trainer_test.py -k fit

Files are named as in `keras/src`; a folder stands for all its files that run a model. Everything
else goes to pytest.
"""

import sys
from pathlib import Path

import pytest
from files import KERAS, test_files

HERE = Path(__file__).parent


def arguments(given: list[str]) -> list[str]:
    """The arguments for pytest."""
    found, others = [], []
    for argument in given:
        path = KERAS / argument.partition("::")[0]
        if argument.startswith("-") or not path.exists():
            others.append(argument)
        elif path.is_dir():
            found += test_files(argument)
        else:
            found.append(str(KERAS / argument))
    files = found or test_files()
    return ["-c", str(HERE / "pytest.ini"), f"--rootdir={KERAS.parents[1]}", *others, *files]


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    sys.exit(pytest.main(arguments(sys.argv[1:])))
