"""Measures a batch's path through the package: how much code a reader has to follow.

    python tests/benchmarks/road.py            the figures
    python tests/benchmarks/road.py --files    also each file that is entered, and who calls whom

The path is that of one batch in a model's first `fit`, with BatchNorm and Adam on two replicas. A
crossing is a call from a function of one file of the package to a function of another.
"""

import argparse
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_multigpu as kmg

PACKAGE = f"{Path(kmg.__file__).parent}/"


class Walk:
    """Records every call of a function of the package while it is active."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.crossings = Counter[tuple[str, str]]()

    def __enter__(self) -> "Walk":
        # Each replica is traced on its own thread.
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python at each call of a function."""
        code, caller = frame.f_code, frame.f_back
        if event != "call" or code.co_name == "<module>" or not in_package(frame):
            return
        self.calls[code.co_filename] += 1
        if caller is not None and in_package(caller):
            pair = caller.f_code.co_filename, code.co_filename
            if pair[0] != pair[1]:
                self.crossings[pair] += 1

    @property
    def both_ways(self) -> list[tuple[str, str]]:
        """The pairs of files that call each other."""
        return sorted((a, b) for a, b in self.crossings if a < b and (b, a) in self.crossings)


def in_package(frame: FrameType) -> bool:
    """Whether a function of the package runs in this frame."""
    return frame.f_code.co_filename.startswith(PACKAGE)


def walked() -> Walk:
    """Record the first `fit`."""
    strategy = kmg.strategy(devices=["CPU:0", "CPU:1"])
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = kmg.distribute(keras.Sequential(layers), strategy)
    model.compile("adam", "mse")
    x = np.ones((8, 4), "float32")
    with Walk() as walk:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return walk


def short(path: str) -> str:
    """A file as seen from the package."""
    return path.removeprefix(PACKAGE)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true")
    show_files = parser.parse_args().files
    walk = walked()
    print("| files entered | calls | crossings | pairs that call each other |")
    print("| --- | --- | --- | --- |")
    figures = len(walk.calls), walk.calls.total(), walk.crossings.total(), len(walk.both_ways)
    print("| " + " | ".join(map(str, figures)) + " |")
    for one, other in walk.both_ways:
        print(f"  {short(one)} <-> {short(other)}")
    if show_files:
        for path, count in walk.calls.most_common():
            print(f"{count:5} {short(path)}")
        for (caller, called), count in walk.crossings.most_common():
            print(f"{count:5} {short(caller)} -> {short(called)}")


if __name__ == "__main__":
    main()
