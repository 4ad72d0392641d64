"""`ResumableCheckpoint`: interrupted anywhere, a run resumes and ends as if it had not been."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import covering
from interrupted_runs import (
    Remembering,
    Sequence,
    X,
    Y,
    batches,
    checkpoint_in,
    fit,
    generated,
    keras_callbacks,
    network,
    values_of,
)
from resumed_runs import assert_same, run

pytestmark = [
    # Keras itself, where its callbacks read the learning rate on replicas.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    result = run(tmp_path_factory.mktemp("whole") / "a", [], network={"normalized": True})
    assert result[1].history["uneven"] == [0, 0, 0]
    assert result[1].history["learning_rate"][-1] < 0.02 * 0.9**2
    return result


@pytest.mark.parametrize(
    ("stops", "last"),
    [
        ([(0, 1), (1, 2), (1, 2)], False),
        ([(0, 6), (1, None, "on_epoch_end"), (2, 6)], True),
        ([(0, None, "on_epoch_end"), (2, None, "on_epoch_begin")], False),
    ],
)
@pytest.mark.slow
def test_it_resumes_as_if_nothing_had_happened(tmp_path, whole, stops, last):
    """Weights, optimizer, seeds, metrics, history, rates and files, in any order."""
    assert_same(whole, run(tmp_path / "b", stops, last=last, network={"normalized": True}))


SETTINGS = [
    # Settings that do not depend on each other are combined.
    {"network": {"run_eagerly": True, "optimizer": "loss scale"}, "steps_per_epoch": 4},
    {"network": {"steps_per_execution": 4}, "checkpoint": {"background": True, "every_steps": 2}},
    {"network": {"micro_batches": 2, "optimizer": "accumulation"}, "replicas": (3,)},
    # `test_resumed_state.py` trains the same network.
    {"network": {"optimizer": "ema"}, "replicas": (1,), "validation_data": True},
]
# And each alone. A checkpoint does not depend on how a step is compiled.
ALONE = [{name: value} for one in SETTINGS for name, value in one.items()]
ALONE += [{"network": {"jit_compile": True}}]
STOPS = [[(1, None)], [(0, 4), (1, None)]]


@pytest.mark.parametrize("settings", [*SETTINGS, *(ALONE if ALL_REPLICAS else [])], ids=str)
@pytest.mark.parametrize("stops", STOPS if ALL_REPLICAS else STOPS[:1])
@pytest.mark.slow
def test_it_resumes_under_every_setting(tmp_path, settings, stops):
    """Several steps per graph, micro-batches, threads, empty replicas, other optimizers."""

    def arguments():
        prepared = {
            name: dict(value) for name, value in settings.items() if isinstance(value, dict)
        }
        chosen = {"epochs": 3 if ALL_REPLICAS else 2, **settings, **prepared}
        if "validation_data" in chosen:
            chosen["validation_data"] = batches()
        return chosen

    one = run(tmp_path / "a", [], **arguments())
    other = run(tmp_path / "b", stops, **arguments())
    assert_same(one, other)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_replicas(tmp_path):
    """From one to two and back: equal to an uninterrupted run up to the rounding of sums."""
    settings = {"network": {"dropout": 0.0}}
    whole = run(tmp_path / "a", [], replicas=(1,), **settings)
    moved = run(tmp_path / "b", [(0, 3), (1, 2)], replicas=(1, 2, 1), **settings)
    assert whole[0].keys() == moved[0].keys()
    for name, value in whole[0].items():
        np.testing.assert_allclose(moved[0][name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    for name, values in whole[1].history.items():
        np.testing.assert_allclose(moved[1].history[name], values, rtol=2e-5, err_msg=name)
    assert moved[1].history["uneven"] == [0, 0, 0]


SOURCES = ["shuffled", "arrays", "sequence", "repeated dataset", "generator", "dataset"]


@pytest.mark.parametrize(("source", "replicas"), covering(SOURCES, [(1,), (2,)]))
@pytest.mark.in_test_all("all of these are skipped in one way", after=1)
@pytest.mark.slow
def test_data_without_random_access_are_read_from_the_start(tmp_path, caplog, source, replicas):
    steps = 5 if source in ("repeated dataset", "generator") else None

    def data():
        if source == "sequence":
            return Sequence()
        if source == "generator":
            return generated()
        made = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=5).batch(4)
        return made.repeat() if steps else made

    arguments = {"replicas": replicas, "epochs": 2}
    if source in ("arrays", "shuffled"):
        data = lambda: X  # noqa: E731
        arguments |= {"y": Y, "batch_size": 4, "shuffle": source == "shuffled"}
    arguments["steps_per_epoch"] = steps
    one = run(tmp_path / "a", [], data=data, **arguments)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        other = run(tmp_path / "b", [(1, 1)], data=data, **arguments)
    assert_same(one, other)
    assert "To resume in epoch 2, after step 0, the batches before it are read again" in caplog.text


@pytest.mark.parametrize("source", ["batches", "generator"])
def test_a_finished_run_trains_no_further(tmp_path, caplog, source):
    """It restores model and history, even where early stopping has restored weights."""
    data, arguments = batches, {"epochs": 9}
    if source == "generator":
        data, arguments = generated, {"epochs": 9, "steps_per_epoch": 5}
    first = run(tmp_path / "a", [], replicas=(1,), data=data, **arguments)
    assert 3 < len(first[1].epoch) < 9, "EarlyStopping has acted."
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").mkdir()
    (tmp_path / "moved" / "run").rename(tmp_path / "a" / "run")
    (tmp_path / "a").rename(tmp_path / "b")
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    model = network(1)
    callbacks = [memory := Remembering(), *keras_callbacks(tmp_path / "b"), count]
    history = fit(model, data(), callbacks, checkpoint_in(tmp_path / "b" / "run"), **arguments)
    text = (tmp_path / "b" / "log.csv").read_text()
    assert_same(first, (values_of(model), history, text, memory.state))
    assert steps == []
    assert "is of a run that has ended, so no epoch is trained" in caplog.text
