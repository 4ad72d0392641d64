"""N replicas train exactly as one device: the rows of `cases.py`, on 2 to 8 replicas.

`make quick` runs one row of each group. With the environment variable `KMG_ALL_REPLICAS=1` every
row runs on 2, 3, 4 and 8.
"""

import functools
import random
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.all_replicas import ALL_REPLICAS

import keras_multigpu as kmg
from exactness import models as made
from exactness.cases import CASES, QUICK, REPLICAS, Case, kinds
from exactness.elsewhere import ELSEWHERE
from exactness.runs import alone, difference, require_same, run

pytestmark = [
    # Keras 3.15.1 writes weights through an `__array__` that NumPy 2 finds outdated.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]

BY_NAME = {case.name: case for case in CASES}
QUICK_ROWS = [(name, BY_NAME[name].replicas[0]) for name in QUICK]
ROWS = [
    pytest.param(*row, marks=() if row in QUICK_ROWS else pytest.mark.slow)
    for row in ((case.name, count) for case in CASES for count in case.replicas)
]


@functools.lru_cache(maxsize=1)
def on_one_device(name):
    """Plain Keras's outcome. Only the last is kept, because tests of one case follow each other."""
    return run(BY_NAME[name], alone)


def on_replicas(name, strategy):
    return run(
        BY_NAME[name], lambda case: kmg.distribute(case.compiled(), strategy, shard=case.shard)
    )


def copies_that_differ(model, strategy):
    """The names of variables that are not bit-identical on all replicas."""
    different = []
    for variable in [*model.variables, *model.optimizer.variables]:
        first, *others = strategy.experimental_local_results(variable.value)
        if not all(np.array_equal(first, other, equal_nan=True) for other in others):
            different.append(variable.path)
    return different


# Keras says so of the output without a loss.
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.usefixtures("optimized_graphs")
@pytest.mark.parametrize(("name", "replicas"), ROWS)
def test_n_replicas_end_where_one_device_does(name, replicas):
    strategy = kmg.strategy(BY_NAME[name].kind, devices=replicas)
    outcome = on_replicas(name, strategy)
    require_same(BY_NAME[name], on_one_device(name), outcome)
    assert not copies_that_differ(outcome.model, strategy)


def test_rows_left_out_are_proven_elsewhere():
    """By another row that runs, or by a test that exists."""
    run_here = {case.name for case in CASES if case.replicas}
    tests = {path.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    tests.add(test_a_last_batch_may_have_any_size.__name__)
    assert ALL_REPLICAS or set(ELSEWHERE.values()) <= run_here | tests
    # Of newer versions of Keras.
    assert ELSEWHERE.keys() - BY_NAME.keys() <= {"Muon", "MultiOptimizer"}


GLOBAL_BATCH = 12
SWEEPS = {
    "dense": Case("dense"),
    "convolution and BatchNorm": Case(
        "convolution and BatchNorm", made.bn_convnet, kinds, made.images
    ),
}
# More than the two and three of the rows above, so that some replicas often have no example.
SWEPT = {"dense": (8,), "convolution and BatchNorm": (4,)}
if ALL_REPLICAS:
    SWEPT = dict.fromkeys(SWEPT, REPLICAS)


def swept(case, model):
    """The weights after a full batch and a last one of 1, 2, ... 11 examples, in turn.

    `make test` takes an example for one replica, for all but one, and for some two.
    """
    x, y, _ = case.data(2 * GLOBAL_BATCH)
    weights = {}
    for size in range(1, GLOBAL_BATCH) if ALL_REPLICAS else (1, 7, 11):
        end = GLOBAL_BATCH + size
        model.fit(x[:end], y[:end], batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
        weights |= {(size, weight.path): weight.numpy() for weight in model.weights}
    return weights


@functools.lru_cache(maxsize=1)
def swept_on_one_device(name):
    keras.utils.clear_session(free_memory=False)
    return swept(SWEEPS[name], SWEEPS[name].compiled())


@pytest.mark.parametrize(
    ("name", "replicas"),
    [(name, count) for name, counts in SWEPT.items() for count in counts],
)
@pytest.mark.slow
@pytest.mark.usefixtures("optimized_graphs")
def test_a_last_batch_may_have_any_size(name, replicas):
    expected = swept_on_one_device(name)
    keras.utils.clear_session(free_memory=False)
    case, strategy = SWEEPS[name], kmg.strategy("mirrored", devices=replicas)
    model = kmg.distribute(case.compiled(), strategy)
    found = swept(case, model)
    assert expected.keys() == found.keys()
    assert max(difference(expected[key], found[key]) for key in expected) < case.tolerance
    assert not copies_that_differ(model, strategy)


@pytest.mark.parametrize("replicas", REPLICAS if ALL_REPLICAS else (8,))
@pytest.mark.slow
def test_an_overflow_on_one_replica_makes_all_skip_the_step(replicas):
    """The weights stay, and the loss scale is halved once, not once for each replica."""
    strategy = kmg.strategy("mirrored", devices=replicas)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 512.0)
    model = kmg.distribute(made.in_precision("mixed_float16", made.mlp), strategy)
    model.compile(optimizer, "mse")
    x, y, _ = made.one_overflow(16)
    before = model.get_weights()
    model.train_on_batch(x, y)
    assert all(map(np.array_equal, before, model.get_weights()))
    assert optimizer.dynamic_scale.numpy() == 256.0
    model.train_on_batch(x[:8], y[:8])
    assert not any(map(np.array_equal, before, model.get_weights()))
    assert optimizer.dynamic_scale.numpy() == 256.0
    assert not copies_that_differ(model, strategy)


class DrawnByPython(keras.layers.Layer):
    def call(self, x):
        return x * (1.0 + random.random() + np.random.random())


@pytest.mark.slow
def test_what_python_draws_is_a_constant_of_the_step():
    """It is drawn once, when the step is traced, as in Keras."""

    def losses(replicas):
        model = Case("", lambda: made.mlp_with(DrawnByPython())).compiled()
        model = kmg.distribute(model, devices=replicas) if replicas else model
        x, y, _ = made.regression()
        return model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]

    expected = losses(0)
    for replicas in (1, 3) if ALL_REPLICAS else (3,):
        np.testing.assert_allclose(losses(replicas), expected, rtol=2e-5)


@pytest.mark.slow
def test_callbacks_see_the_true_indices_of_grouped_steps():
    """Four batches in groups of three: the last group is batch 3 alone."""
    seen = []
    model = kmg.distribute(made.mlp(), kmg.strategy("mirrored", devices=2))
    model.compile("sgd", "mse", steps_per_execution=3)
    x, y, _ = made.regression(29)
    recording = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(("begin", batch)),
        on_train_batch_end=lambda batch, logs: seen.append(("end", batch)),
    )
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[recording])
    assert seen == [("begin", 0), ("end", 2), ("begin", 3), ("end", 3)]
