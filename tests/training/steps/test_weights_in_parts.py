"""`shard="weights"`: each replica has its rows of the weights, and no number changes."""

import functools

import keras
import numpy as np
import pytest
from exactness.cases import CASES
from exactness.runs import alone, require_numbers, run
from helpers.all_replicas import ALL_REPLICAS, first_rows
from helpers.cpu_replicas import replicas_of
from helpers.everything_in_parts import divide_everything
from helpers.one_device import assert_close, assert_equal

import keras_multigpu as kmg
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.partition.planning import gathering
from keras_multigpu.training.replica_group import is_in_parts
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps import trial

SIZE = 300
X = np.random.default_rng(0).normal(size=(11, SIZE)).astype("float32")
BY_NAME = {case.name: case for case in CASES}
# A frozen layer, an embedding with a recurrent network, conditions around the update, two models.
QUICK = ["frozen layer", "masked words, LSTM", "gradient accumulation, clipnorm, EMA", "GAN"]
ROWS = [(name, 2) for name in QUICK]
if ALL_REPLICAS:
    ROWS = [(name, count) for name in BY_NAME for count in (2, 3, 4, 8)]


@pytest.fixture
def everything_in_parts(monkeypatch):
    divide_everything(monkeypatch)


# Keras says so of the output without a loss.
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.usefixtures("everything_in_parts", "optimized_graphs")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), ROWS)
def test_weights_in_parts_end_where_one_device_does(name, count):
    """The trainings of the exactness table."""
    keras.utils.clear_session(free_memory=False)
    case = BY_NAME[name]
    expected = run(case, alone)
    found = run(
        case, lambda case: kmg.distribute(case.compiled(), replicas_of(count), shard="weights")
    )
    weights = found.model.weights
    divided = any(is_in_parts(variable_storage(weight)) for weight in weights)
    # A few models are narrower than 8.
    assert divided or count > max(max(weight.shape, default=0) for weight in weights)
    require_numbers(case, expected, found)


def made(is_built=True):
    keras.utils.set_random_seed(1)
    parts = [keras.layers.Dense(SIZE, "tanh") for _ in range(6)] + [keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((SIZE,)), *parts] if is_built else parts)


def trained(shard, is_built=True, count=2, optimizer="adam"):
    model = kmg.distribute(made(is_built), replicas_of(count), shard=shard)
    model.compile(optimizer, "mse")
    data = X, X[:, :1]
    model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=data)
    return model


def numbers_of(model):
    evaluated = model.evaluate(X, X[:, :1], verbose=0)
    return [*model.get_weights(), model.predict(X, verbose=0), evaluated]


@functools.cache
def numbers_of_whole_weights():
    return numbers_of(trained(None))


@pytest.mark.parametrize("is_built", [True, False])
def test_weights_in_parts_change_no_bit(is_built, tmp_path):
    """Trained, validated, saved, loaded and whole again; built before, or by `fit`."""
    model = trained("weights", is_built)
    divided = [
        is_in_parts(variable_storage(v)) for v in (*model.weights, *model.optimizer.variables)
    ]
    # Six kernels, with two slots each.
    assert sum(divided) == 6 * 3
    expected = numbers_of_whole_weights()
    assert_equal(numbers_of(model), expected)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    whole = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(whole.predict(X, verbose=0), expected[-2], rtol=1e-5, atol=1e-6)
    again = kmg.distribute(made(), replicas_of(3), shard="weights")
    again.load_weights(tmp_path / "model.weights.h5")
    assert_equal(again.get_weights(), expected[:-2])
    model = kmg.distribute(model, replicas_of(2))
    assert not any(is_in_parts(variable_storage(v)) for v in model.weights)
    assert_equal(model.get_weights(), expected[:-2])


def test_two_buckets_are_gathered_at_a_time(monkeypatch):
    """Forward and backward: before a third one begins, the first has been used."""
    monkeypatch.setattr(gathering, "BUCKET", SIZE * SIZE)
    model = trained("weights", optimizer="sgd")
    (runner,) = replication_of(model).steps_of("train")[0].runners
    stages = runner.step.local
    gathered = [
        sum(cut.name in stages._gathers for cuts in exchanged for cut in cuts)
        for exchanged in stages._exchanges
    ]
    # Six on the way forward and four on the way back: the last one is still there, and nothing
    # needs the gradient of the data.
    assert sum(gathered) == 10
    assert max(gathered) == 2


def test_a_step_that_needs_whole_weights_says_so_before_it_runs(caplog):
    model = kmg.distribute(made(), replicas_of(2), shard="weights")
    # Six kernels of 300 by 300, in float32.
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="shape"):
        model.train_on_batch(X[:, 1:], X[:, :1])
    assert "It needs all of what replicas divide at a time: 2.1 MiB." in caplog.text


# The optimizer's state resumes so in test_shard_optimizer.py.
@pytest.mark.parametrize("counts", first_rows([(1, 2), (2, 4), (4, 1)]))
def test_a_checkpoint_resumes_with_other_parts(counts, tmp_path):
    def fit(count, epochs, callbacks):
        model = kmg.distribute(made(), replicas_of(count), shard="weights" if count > 1 else None)
        model.compile("adam", "mse")
        model.fit(X, X[:, :1], 4, epochs, verbose=0, shuffle=False, callbacks=callbacks)
        return model

    for count, epochs in zip(counts, (1, 2), strict=True):
        resumed = fit(count, epochs, [kmg.callbacks.ResumableCheckpoint(tmp_path)])
    expected = fit(1, 2, [])
    assert_close(resumed.get_weights(), expected.get_weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shard", [None, "optimizer", "weights"])
def test_the_self_check_compares_a_sample_of_large_values(shard, monkeypatch, caplog):
    sizes, sample = [], trial.sample

    def noted(value):
        sizes.append(value.value.size)
        return sample(value)

    monkeypatch.setattr(trial, "MOST", 1000)
    monkeypatch.setattr(trial, "sample", noted)
    trained(shard)
    # Not a word: what one device and the parts of replicas make is alike.
    assert not caplog.records
    # Two slots of six kernels on both sides, in two parts if they are sharded.
    large = [size for size in sizes if size > 1000]
    assert len(large) == 2 * 12 * (1 if shard is None else 2)
    numbers = np.arange(SIZE * SIZE)
    assert sample(trial.Tried(numbers)).value.size <= 1000
