"""`ResumableCheckpoint`: interrupted anywhere, a run resumes and ends as if it had not been."""

import logging

import keras
import numpy as np
import pytest
from helpers.interrupted_runs import (
    Remembering,
    X,
    Y,
    assert_same_runs,
    batches,
    checkpoint_in,
    fit,
    generated,
    keras_callbacks,
    network,
    run,
    values_of,
)


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
    assert_same_runs(whole, run(tmp_path / "b", stops, last=last, network={"normalized": True}))


SETTINGS = [
    # Settings that do not depend on each other are combined.
    {"network": {"run_eagerly": True, "optimizer": "loss scale"}, "steps_per_epoch": 4},
    {"network": {"steps_per_execution": 4}, "checkpoint": {"every_steps": 2}},
    {"network": {"micro_batches": 2, "optimizer": "accumulation"}, "replicas": (3,)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.slow
def test_it_resumes_under_every_setting(tmp_path, settings):
    """Several steps per graph, micro-batches, threads, empty replicas, other optimizers."""

    def arguments():
        prepared = {
            name: dict(value) for name, value in settings.items() if isinstance(value, dict)
        }
        return {"epochs": 2, **settings, **prepared}

    one = run(tmp_path / "a", [], **arguments())
    other = run(tmp_path / "b", [(1, None)], **arguments())
    assert_same_runs(one, other)


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


SOURCES = {
    "shuffled": (lambda: X, {"y": Y, "batch_size": 4, "shuffle": True}),
    "generator": (generated, {"steps_per_epoch": 5}),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.slow
def test_data_without_random_access_are_read_from_the_start(tmp_path, caplog, source):
    data, arguments = SOURCES[source]
    arguments = {"replicas": (1,), "epochs": 2, **arguments}
    one = run(tmp_path / "a", [], data=data, **arguments)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        other = run(tmp_path / "b", [(1, 1)], data=data, **arguments)
    assert_same_runs(one, other)
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
    assert_same_runs(first, (values_of(model), history, text, memory.state))
    assert steps == []
    assert "is complete: no epoch is left to train" in caplog.text
