"""A schedule whose rate is scaled and shifted while training runs: rates by hand."""

import keras
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.variables.adjusted_schedule import (
    AdjustedSchedule,
    adjustments,
    state_of,
)

STEPS = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.5, 0.25])


def adjusted(schedule):
    return AdjustedSchedule(schedule, kmg.strategy("one_device"))


@pytest.mark.parametrize(
    ("factor", "offset", "step", "expected"),
    [(1, 0, 3, 0.5), (1, 0, 11, 0.25), (4, 0, 3, 2.0), (0, 0.125, 11, 0.125), (2, 1, 11, 1.5)],
)
def test_the_rate_of_a_step(factor, offset, step, expected):
    """`factor * schedule(step) + offset`, in graphs that are already traced, too."""
    schedule = adjusted(STEPS)
    rate = tf.function(lambda step: schedule(step))
    assert float(rate(tf.constant(3))) == 0.5
    schedule.factor.assign(factor)
    schedule.offset.assign(offset)
    assert float(rate(tf.constant(step))) == expected
    assert float(schedule.unadjusted(step)) == (0.5 if step == 3 else 0.25)


def test_an_adjusted_schedule_is_saved_as_the_original():
    schedule = adjusted(STEPS)
    schedule.factor.assign(3)
    saved = keras.optimizers.schedules.serialize(schedule)
    assert saved == keras.optimizers.schedules.serialize(STEPS)
    again = keras.optimizers.schedules.deserialize(saved)
    assert type(again) is type(STEPS) and float(again(0)) == 0.5


def test_an_updates_state_includes_the_adjustments():
    weight = keras.Variable([1.0])
    plain = keras.optimizers.SGD(0.1)
    plain.build([weight])
    assert state_of(plain) == plain.variables and adjustments(plain) == []
    assert state_of(None) == adjustments(None) == []

    schedule = adjusted(STEPS)
    inner = keras.optimizers.SGD(schedule)
    assert optimizer_internals.compiled_rate(inner) is schedule
    outer = keras.optimizers.LossScaleOptimizer(inner)
    outer.build([weight])
    names = [variable.name for variable in adjustments(outer)]
    assert names == ["factor", "offset"]
    assert state_of(outer) == [*outer.variables, schedule.factor, schedule.offset]
