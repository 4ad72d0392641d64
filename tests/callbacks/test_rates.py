"""Warm-up and scaling: the rate of each step, alone and together, against rates computed here."""

import keras
import numpy as np
import pytest
from slope_models import Rates, eager_slope, slope

from keras_multigpu.callbacks import BatchSizeScaling, LearningRateWarmup

ONES, ZEROS = np.ones((22, 1), "float32"), np.zeros((22, 1), "float32")


def decay():
    return keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.9)


def constant():
    """A function instead of a schedule."""
    return 0.8


# Of each row the rate that is compiled and what differs from one replica, batches of four, a plain
# SGD and two epochs. `sizes` are those of later epochs, `fits` the epochs of each `fit`.
ROWS = {
    "warm-up": {"warm": {"steps": 7}},
    "in epochs": {"warm": {"epochs": 0.6}, "replicas": 2},
    "from an initial rate": {"warm": {"steps": 4, "initial_rate": 0.1}, "per_execution": 3},
    "empty replicas, in pieces": {"warm": {"steps": 2}, "size": 21, "pieces": 2, "replicas": 2},
    "warm-up of a schedule": {"rate": decay(), "warm": {"steps": 7}},
    "of a function": {"rate": constant, "warm": {"steps": 3}, "replicas": 2},
    "inside a loss scale": {"rate": decay(), "warm": {"steps": 3}, "scaled": True, "replicas": 2},
    "with momentum": {"warm": {"steps": 7}, "momentum": 0.9, "replicas": 2},
    "with Nesterov's": {"warm": {"steps": 7}, "momentum": 0.9, "nesterov": True},
    "in two fits": {"warm": {"steps": 9}, "fits": [1, 1], "momentum": 0.9},
    "a schedule in two fits": {"warm": {"steps": 9}, "fits": [1, 1], "rate": decay()},
    "none": {"scale": (1, "none")},
    "sqrt": {"scale": (1, "sqrt")},
    "linear, in two fits": {"scale": (1, "linear"), "fits": [1, 1]},
    "growing": {"scale": (4, "linear"), "sizes": {1: 8}, "replicas": 2, "momentum": 0.9},
    "growing, eager": {"scale": (4, "linear"), "sizes": {1: 8}, "momentum": 0.9, "eager": True},
    "a growing schedule": {
        "rate": decay(),
        "scale": (1, "linear"),
        "sizes": {1: 8},
        "scaled": True,
    },
    # The last batch has one example, so one of two replicas has none.
    "uneven": {"scale": (3, "linear"), "sizes": {1: 7}, "size": 3, "replicas": 2},
    # Goyal et al. 2017: from the base rate to the scaled one; then the batch grows again.
    "both": {"scale": (1, "linear"), "sizes": {1: 8}, "warm": {"steps": 4}, "replicas": 2},
    "growing in the warm-up": {
        **{"scale": (1, "linear"), "sizes": {1: 8}, "warm": {"steps": 8}},
        **{"momentum": 0.9, "eager": True},
    },
    "and of a schedule": {
        **{"scale": (1, "linear"), "sizes": {1: 8}, "warm": {"steps": 8}},
        **{"rate": decay(), "eager": True},
    },
}
POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def by_hand(row):
    """The rates of the steps of each epoch."""
    size, (base, rule) = row.get("size", 4), row.get("scale", (1, "none"))
    warm, first_factor = row.get("warm"), (size / base) ** POWERS[rule]
    step, epochs = 0, []
    for epochs_of_fit in row.get("fits", [2]):
        for epoch in range(epochs_of_fit):
            now = row.get("sizes", {}).get(epoch, size)
            steps = -(-22 // now)
            found = []
            for _ in range(steps):
                rate = row.get("rate", 0.8)
                rate = 0.8 * 0.9**step if hasattr(rate, "decay_rate") else 0.8
                rate *= (now / base) ** POWERS[rule]
                if warm:
                    length = warm.get("steps") or round(warm["epochs"] * steps)
                    first = warm.get("initial_rate", 0.0) / 0.8 or 1 / (length + 1)
                    first = 1 / first_factor if "scale" in row else first
                    rate *= first + (1 - first) * min(step / length, 1)
                found.append(rate)
                step += 1
            epochs.append(found)
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_step_has_its_rate(name):
    """By the weight, which falls by the rate, by the log, and by what the optimizer has later."""
    row = ROWS[name]
    rate, momentum = row.get("rate", 0.8), row.get("momentum", 0.0)
    inner = keras.optimizers.SGD(rate, momentum, row.get("nesterov", False))
    outer = keras.optimizers.LossScaleOptimizer(inner, 2.0) if row.get("scaled") else inner
    compiled = {"steps_per_execution": row.get("per_execution", 1)}
    compiled |= {"micro_batches": row["pieces"]} if "pieces" in row else {}
    replicas = row.get("replicas", 1)
    model = eager_slope(replicas, outer) if row.get("eager") else slope(replicas, outer, **compiled)
    callbacks = [] if "per_execution" in row else [rates := Rates()]
    if "scale" in row:
        base, rule = row["scale"]
        callbacks.append(BatchSizeScaling(base, rule=rule, schedule=row.get("sizes")))
    if "warm" in row:
        callbacks.append(LearningRateWarmup(**row["warm"]))
    logged, used = [], []
    for epochs in row.get("fits", [2]):
        given = {"batch_size": row.get("size", 4), "epochs": epochs, "callbacks": callbacks}
        history = model.fit(ONES, ZEROS, verbose=0, **given).history
        logged += history["learning_rate"]
        used += rates.used.tolist() if "per_execution" not in row else []
        if callable(rate):
            assert inner._learning_rate is rate
        else:
            np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.8, rtol=1e-6)
    expected = by_hand(row)
    np.testing.assert_allclose(logged, [each[-1] for each in expected], rtol=1e-5)
    weight, velocity = 0.0, 0.0
    for each in np.concatenate(expected):
        velocity = momentum * velocity + 1.0
        weight -= each * (momentum * velocity + 1.0 if row.get("nesterov") else velocity)
    np.testing.assert_allclose(model.get_weights()[0].item(), weight, rtol=1e-5)
    if used and not momentum:
        np.testing.assert_allclose(used, np.concatenate(expected), rtol=1e-4)
