"""`kmg.function`: a custom loop gives on N replicas what it gives on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.partition.rules import RULES
from keras_multigpu.partition.rules.plan import Plan

SIZES = (7, 7, 5, 1, 2)


def decorated(replicas):
    """Our decorator, or none: Python then runs the step on one device."""
    return kmg.function(devices=replicas) if replicas else lambda step: step


def batches(*widths):
    draws = np.random.default_rng(0)
    return [
        [draws.normal(size=(size, width)).astype("float32") for width in widths] for size in SIZES
    ]


def classifier(replicas):
    """The loop of the guide "Writing a training loop from scratch", unbuilt, with two metrics."""
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4),
        ]
    )
    optimizer = keras.optimizers.Adam(0.02, clipnorm=1.0)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.MeanAbsoluteError()
    loss_of = keras.losses.MeanSquaredError()

    @decorated(replicas)
    def step(x, y, scale):
        if tf.reduce_sum(x) > 0:  # Converted by AutoGraph.
            scale = scale + 0.5
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = scale * loss_of(y, outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean.update_state(loss)
        accuracy.update_state(y, outputs)
        return {"loss": loss, "outputs": outputs, "norm": tf.linalg.global_norm(gradients)}

    results = [step(x, y, np.float32(0.5)) for x, y in batches(5, 4)]
    return results, [model, optimizer, mean, accuracy]


def as_method(replicas):
    """A method of an object with a variable, a table that is not a batch, and a constant."""

    class Trainer:
        def __init__(self):
            self.layer = keras.layers.Dense(3)
            self.optimizer = keras.optimizers.SGD(0.1)
            self.count = tf.Variable(0)

        @decorated(replicas)
        def step(self, rows, weights, power=2):
            self.count.assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_max(tf.abs(self.layer(rows["x"]) * weights[:3]) ** power)
            gradients = tape.gradient(loss, self.layer.trainable_variables)
            self.optimizer.apply(gradients, self.layer.trainable_variables)
            return loss, self.count + 0

    trainer = Trainer()
    weights = np.arange(4, dtype="float32")
    results = [trainer.step({"x": x}, weights, power=3) for (x,) in batches(5)]
    return [*results, trainer.count.read_value()], [trainer.layer, trainer.optimizer]


@pytest.mark.parametrize("loop", [classifier, as_method])
@pytest.mark.slow
def test_a_step_gives_what_one_device_gives(loop):
    found = []
    for count in (0, 3):
        keras.utils.set_random_seed(3)
        results, parts = loop(count)
        states = [[v.numpy() for v in part.variables] for part in parts]
        found.append(tf.nest.flatten([tf.nest.map_structure(np.array, results), states]))
    for expected, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)


def costs_of(step):
    return [each.step.cost for made in step._functions.values() for each in made.runners]


def test_a_step_that_begins_with_noise_is_split():
    generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])

    @kmg.function(devices=2)
    def step(images):
        noise = tf.random.normal([8, 3])
        return tf.reduce_mean(generator(noise)) - tf.reduce_mean(images)

    step(np.ones((8, 6), "float32"))
    (cost,) = costs_of(step)
    assert cost.shared({}) == 1.0


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:1"], ["CPU:2", "CPU:1"]])
def test_functions_that_a_step_calls_train_the_variables(devices):
    """TensorFlow traces them once, before there are any variables."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)

    @tf.function
    def learn(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x))
        weights = layer.trainable_weights
        optimizer.apply(tape.gradient(loss, weights), weights)

    @kmg.function(devices=devices)
    def step(x):
        learn(x)

    for _ in range(2):
        step(np.array([[1.0], [2.0], [6.0]], "float32"))
    np.testing.assert_allclose(layer.kernel[0, 0], 1 - 3 - 4.5)
    assert optimizer.iterations == 2


@pytest.mark.parametrize("inside", [lambda step: step, tf.function])
@pytest.mark.slow
def test_a_step_follows_a_model_to_other_devices(inside):
    """Even if a `tf.function` inside it has kept the first copies of the variables."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)

    @inside
    def learn(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        weights = model.trainable_weights
        optimizer.apply(tape.gradient(loss, weights), weights)

    @kmg.function(self_check=False)
    def step(x):
        learn(x)

    model(np.ones((1, 1)))
    # Momentum makes steps of 3, 4.5, 5.25, ...
    for devices, left in ((2, -2), (3, -6.5), (["CPU:2", "CPU:1"], -11.75), (2, -17.375)):
        kmg.distribute(model, devices=devices)
        step(np.array([[1.0], [2.0], [6.0]], "float32"))
        np.testing.assert_allclose(model.get_weights()[0], [[left]])


@pytest.mark.slow
def test_a_step_whose_models_part_is_refused():
    first, second = (keras.Sequential([keras.layers.Dense(1)]) for _ in range(2))
    step = kmg.function(lambda x: first(x) + second(x))
    for model in (first, second):
        kmg.distribute(model, devices=2)
    x = np.ones((3, 1), "float32")
    step(x)
    kmg.distribute(second, devices=3)
    with pytest.raises(ValueError, match="distributed over different devices"):
        step(x)
    kmg.distribute(first, devices=3)
    step(x)


def test_without_a_graph_python_runs_in_each_step():
    """`tf.config.run_functions_eagerly`: every replica gets the values of one device."""
    weight, seen = keras.Variable([1.0, 2.0]), []
    layer = keras.layers.Dense(2)

    @kmg.function(devices=2)
    def step(x):
        seen.append(x.shape[0])
        weight.assign(weight + tf.reduce_sum(layer(x), axis=0) * 0 + tf.reduce_sum(x))
        return weight * 1.0

    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(2):
            found = step(np.ones((3, 1), "float32"))
    finally:
        tf.config.run_functions_eagerly(False)
    assert seen == [3, 3]
    np.testing.assert_array_equal(found, [7.0, 8.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_range_of_floats_is_added_up_from_its_start(dtype):
    """So its rows are not `start + n * delta`, which rounds differently."""
    numbers = tf.range(0.0, 29.99, 0.1, dtype=dtype)
    step = kmg.function(lambda x: x + tf.range(0.0, 29.99, 0.1, dtype=dtype), devices=2)
    np.testing.assert_array_equal(step(tf.zeros_like(numbers)), numbers)


def test_a_step_may_return_strings():
    step = kmg.function(lambda x: (tf.strings.as_string(x), tf.constant("all")), devices=2)
    each, all_ = step(np.array([1, 2, 3]))
    assert each.numpy().tolist() == [b"1", b"2", b"3"] and all_.numpy() == b"all"


def test_a_third_length_is_traced_for_any_length():
    traced = []

    @kmg.function(devices=2)
    def step(x):
        traced.append(tuple(x.shape))
        return tf.reduce_sum(x)

    for length in (3, 4, 5, 6, 7):
        assert float(step(np.ones((2, length), "float32"))) == 2.0 * length
    assert traced == [(2, 3), (2, 4), (2, None)]


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="`step` is not a function"):
        kmg.function(3)
    with pytest.raises(ValueError, match="Both `strategy` and `devices` were given"):
        kmg.function(devices=2, strategy=kmg.strategy(devices=2))
    with pytest.raises(ValueError, match="`strategy` is not a strategy"):
        kmg.function(strategy="mirrored")


def test_the_self_check_finds_a_false_rule_in_a_custom_step(monkeypatch, caplog):
    monkeypatch.setitem(RULES, "Cumsum", lambda op, ins, facts: Plan(ins, ins[:1]))
    x = np.arange(20, dtype="float32").reshape(10, 2)
    expected = np.cumsum(x, axis=0).sum()
    results = []
    for self_check in (True, False):

        @kmg.function(devices=2, self_check=self_check)
        def step(x):
            return tf.reduce_sum(tf.cumsum(x, axis=0))

        results.append(float(step(x)))
    assert results[0] == expected != results[1]
    assert "split, it would not give the numbers of one device" in caplog.text
