"""What `train_separately` saves: four jobs on two places against one after another.

    python tests/benchmarks/bench_train_separately.py [--write]

Both sides run in turn in one process tree, with the same function in the same processes; "one after
another" is the same call with one place, which has one core as well. `--write` puts the result into
the README beside it.
"""

import os
import statistics
import sys
import time

import numpy as np
import report

import keras_multigpu as kmg

PAIRS, JOBS, PLACES = 5, 4, 2


def train():
    """A training of a few seconds, in a process whose start counts, too."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(32, 3, activation="relu") for _ in range(3)]
    model = keras.Sequential(
        [keras.Input((24, 24, 3)), *layers, keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.compile("adam", "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 24, 24, 3)).astype("float32")
    y = random.normal(size=(256, 10)).astype("float32")
    return model.fit(x, y, batch_size=32, verbose=0).history["loss"]


def seconds(places):
    """How long all jobs take."""
    cores = sorted(os.sched_getaffinity(0))
    # A single place has one core, as each of several has.
    os.sched_setaffinity(0, cores[:places])
    began = time.perf_counter()
    try:
        results = kmg.train_separately([train] * JOBS, devices=places)
    finally:
        os.sched_setaffinity(0, cores)
    took = time.perf_counter() - began
    losses = [result.value for result in results]
    assert losses == [losses[0]] * JOBS
    return took


def main():
    """Measure in turn and print."""
    pairs = []
    for _ in range(PAIRS):
        pairs.append((seconds(1), seconds(PLACES)))
        print("one after another {:.1f} s, two at once {:.1f} s".format(*pairs[-1]))
    one, several = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [several / one for one, several in pairs]
    lines = [
        f"| {JOBS} trainings, one after another | two at once | ratio (range) |",
        "|---|---|---|",
        f"| {one:.1f} s | {several:.1f} s | {report.spread(ratios)} |",
    ]
    print(report.machine(), *lines, sep="\n")
    if "--write" in sys.argv:
        report.write_section("train separately", lines)


if __name__ == "__main__":
    main()
