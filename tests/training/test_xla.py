"""What `jit_compile` becomes on several replicas, and how many programs XLA then compiles."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import as_on_gpus, on_replicas
from helpers.one_device import assert_close, seeded

import keras_multigpu as kmg
from keras_multigpu.training.announcing import announce
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import specs_of
from keras_multigpu.verification.participants import Recipe

X = np.random.default_rng(0).normal(size=(8, 6, 6, 1)).astype("float32")
Y = np.arange(8) % 3


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Keras asks TensorFlow for the devices, and is told of a GPU."""
    devices = tf.config.list_physical_devices

    def with_a_gpu(device_type=None):
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        return [*devices(device_type), *([gpu] if device_type in (None, "GPU") else [])]

    monkeypatch.setattr(tf.config, "list_physical_devices", with_a_gpu)


def network():
    return keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("replicas", "compiled", "expected"),
    [
        (1, {}, True),
        (2, {}, False),
        (2, {"jit_compile": "auto"}, False),
        (2, {"jit_compile": True}, True),
        (1, {"jit_compile": False}, False),
        (1, {"micro_batches": 2}, False),
        (1, {"micro_batches": "auto"}, False),
        (1, {"micro_batches": 2, "jit_compile": True}, True),
        (1, {"run_eagerly": True}, False),
    ],
)
def test_xla_is_left_to_keras_only_where_a_step_is_one_program(
    replicas, compiled, expected, pretended_gpu
):
    model = on_replicas(network(), replicas)
    model.compile("sgd", "mse", **compiled)
    assert model.jit_compile is expected


def test_auto_is_judged_anew_where_a_model_moves_or_was_never_compiled(pretended_gpu):
    model = on_replicas(network(), 2)
    assert not model.jit_compile
    assert on_replicas(model, 1).jit_compile
    model.compile("sgd", "mse")
    assert model.jit_compile
    assert not on_replicas(model, 2).jit_compile
    model.jit_compile = True
    assert model.jit_compile
    model.compile("sgd", "mse", jit_compile=False)
    assert not on_replicas(model, 1).jit_compile


@pytest.mark.parametrize("compiled", [{}, {"jit_compile": True}])
def test_what_was_compiled_before_distribute_counts_as_keras_choice(compiled, pretended_gpu):
    """Keras keeps the same for both, and a model that is loaded has it from its file."""
    model = network()
    model.compile("sgd", "mse", **compiled)
    model = on_replicas(model, 2)
    assert not model.jit_compile
    assert on_replicas(model, 1).jit_compile


@pytest.mark.parametrize("ours", [False, True])
def test_verify_compares_without_xla_what_replicas_run_without(ours, pretended_gpu):
    def build():
        model = on_replicas(network(), 1) if ours else network()
        model.compile("sgd", "mse")
        assert model.jit_compile
        return model

    recipe = Recipe(build, (X, np.zeros((8, 3)), None), "CPU:0")
    assert not recipe.on_one_device().model.jit_compile


def test_without_a_gpu_xla_is_what_the_user_asked_for():
    model = network()
    model.compile("sgd", "mse", jit_compile=True)
    assert on_replicas(model, 2).jit_compile


@pytest.mark.parametrize(
    ("replicas", "compiled", "said"),
    [
        (1, {}, ["XLA: on. It compiles the step for each batch size."]),
        (2, {}, ['XLA: off. On one device Keras\'s jit_compile="auto" would turn it on']),
        (2, {"jit_compile": True}, ["XLA: on, as asked for. It compiles a program for each stage"]),
        (2, {"jit_compile": False}, []),
    ],
)
def test_the_first_fit_says_whether_xla_is_on(replicas, compiled, said, pretended_gpu, caplog):
    caplog.set_level("INFO", "keras_multigpu")
    model = on_replicas(network(), replicas)
    model.compile("sgd", "mse", **compiled)
    for _ in range(2):
        announce(replication_of(model), model)
    found = [text for text in caplog.messages if text.startswith("XLA")]
    assert [text[: len(start)] for text, start in zip(found, said, strict=True)] == said


def programs(model, mode):
    """How many functions that XLA compiles the graph of a step calls; the graph does not run."""
    steps = replication_of(model).step_functions(model, mode)
    spec = specs_of((X, None, None) if mode == "predict" else (X, Y, None))
    step = steps._step(spec, all_here=True)
    assert not step.runner.unsplit_because
    functions = step.graph.graph.as_graph_def().library.function
    return sum(function.attr["_XlaMustCompile"].b for function in functions)


def convnet():
    layers = [keras.Input((6, 6, 1))]
    for _ in range(2):
        layers += [keras.layers.Conv2D(2, 3), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3)])


def test_xla_compiles_a_program_for_each_stage():
    """In training, evaluation and prediction; each is compiled for each replica."""
    model = on_replicas(convnet(), 2)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    # A sum for each BatchNormalization on the way there and back, and one of gradients.
    assert [programs(model, mode) for mode in ("train", "test", "predict")] == [6, 2, 1]


@pytest.mark.slow
def test_stages_that_xla_compiles_and_collectives_alternate_in_a_loop():
    """As on GPUs. Stock Keras crashes with either, whatever the devices."""

    def trained(place, **options):
        layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = place(keras.Sequential([keras.Input((6, 6, 1)), *layers]))
        options |= {"jit_compile": True, "steps_per_execution": 2}
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
        data = tf.data.Dataset.from_tensors((X, Y)).repeat(3)
        losses = model.fit(data, shuffle=False, verbose=0).history["loss"]
        return [*losses, *model.get_weights(), model.evaluate(data, verbose=0)]

    found = seeded(trained, lambda model: kmg.distribute(model, as_on_gpus(2), self_check=False))
    assert_close(found, seeded(trained, lambda model: model), atol=1e-6)
