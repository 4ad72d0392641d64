"""`kmg.memory`: states to the byte, activations by hand."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.all_replicas import ALL_REPLICAS, first_rows
from helpers.processes_left import PATIENCE

import keras_multigpu as kmg
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.partition.planning import gathering
from keras_multigpu.training.replica_group import copies_of, parts_or_copies


def distributed(model, devices=1, optimizer="adam", loss="mse", shard=None, **compiled):
    model = kmg.distribute(model, devices=devices, shard=shard)
    model.compile(optimizer, loss, jit_compile=False, **compiled)
    return model


def dense(*units, inputs=4, **settings):
    layers = [keras.layers.Dense(each, "tanh", **settings) for each in units]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def test_states_take_the_bytes_of_the_variables():
    """15 weights and, for Adam, 30 averages, a rate and a counter of 8 bytes, on each replica."""
    model = distributed(dense(3), 2)
    found = kmg.memory(model, batch_size=8)
    assert [each.device for each in found.devices] == ["CPU:0", "CPU:1"]
    assert [each.weights for each in found.devices] == [4 * 15] * 2
    assert [each.optimizer for each in found.devices] == [4 * 30 + 4 + 8] * 2
    own = [copies_of(v)[1] for v in (*model.weights, *model.optimizer.variables)]
    one = found.devices[1]
    assert one.weights + one.optimizer == sum(each.numpy().nbytes for each in own)


def test_a_sharded_optimizer_is_counted_where_training_puts_it():
    """Each replica keeps half of the averages of two weights of 65,536 numbers."""
    found = {}
    for shard in (None, "optimizer"):
        model = distributed(dense(256, 256, inputs=256, use_bias=False), 2, shard=shard)
        found[shard] = kmg.memory(model, batch_size=1)
    whole, half = (each.devices[0] for each in found.values())
    assert [each.optimizer for each in found["optimizer"].devices] == [8 * 65536 + 4 + 8] * 2
    assert whole.optimizer == 16 * 65536 + 4 + 8
    # The others' averages are not here, nor new ones, nor what leads to them.
    assert 'shard="optimizer" costs nothing' in found[None].text
    about = found[None].helps['shard="optimizer", about']
    assert about == whole.total - 2 * 8 * 65536
    assert 0.85 * about < half.total <= about
    parts = [parts_or_copies(variable_storage(v)) for v in model.optimizer.variables]
    held = [[c.numpy().nbytes for own in parts for c in own if c.device[-1] == d] for d in "01"]
    assert [sum(each) for each in held] == [each.optimizer for each in found["optimizer"].devices]


def test_activations_are_those_that_the_backward_pass_needs():
    """3 layers have 1,000 outputs for each example, which the gradient of `tanh` needs.

    Besides there are the errors, their squares and the gradient of the mean.
    """
    model = distributed(dense(1000, 1000, 1000, inputs=2, use_bias=False), optimizer="sgd")
    small, large = (kmg.memory(model, batch_size=size).devices[0] for size in (10_000, 20_000))
    own = (large.activations - small.activations) / 10_000
    assert 5 * 4000 <= own <= 6 * 4000 + 8
    # The batch in use and two that wait, of 2 and 1,000 numbers.
    assert large.waiting == 3 * 20_000 * 4 * 1002


@pytest.mark.parametrize(("micro_batches", "least", "most"), [("auto", 3, 4.1), (1, 2, 3)])
def test_the_update_holds_what_may_not_replace_old_values_yet(micro_batches, least, most):
    """With few rows the peak is where gradients become weights and averages."""
    layers = dense(500, 500, inputs=500, use_bias=False)
    found = kmg.memory(distributed(layers, micro_batches=micro_batches), batch_size=1)
    assert found.in_update
    weights = 2 * 4 * 500 * 500
    assert found.devices[0].weights == weights
    # If it may run again, three new values for each, beside gradients that are not yet used up.
    assert least * weights <= found.devices[0].update <= most * weights


def test_replicas_and_pieces_share_the_rows():
    """A batch of 4,096 is 2,048 rows on each of two replicas, or in two pieces."""
    rows = {}
    for devices, pieces in ((1, 2), (2, 1)):
        model = distributed(dense(256, 1), devices, "sgd", micro_batches=pieces)
        found = kmg.memory(model, batch_size=4096)
        rows[devices, pieces] = found.devices[0].activations / (4 * 257)
        more = found.helps[f"micro_batches={2 * pieces}"]
        assert more < found.devices[0].total
    assert all(each == pytest.approx(2 * 2048, rel=0.05) for each in rows.values())


def test_micro_batches_that_wait_for_sums_save_nothing():
    layers = [keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(64)]
    model = distributed(keras.Sequential([keras.Input((8,)), *layers]), 2)
    assert not any("micro_batches" in name for name in kmg.memory(model, batch_size=1024).helps)


@pytest.mark.slow
def test_a_loop_keeps_what_each_step_needs():
    """Ten times as many steps keep ten times as much."""
    activations = []
    for steps in (10, 100):
        layers = [keras.Input((steps, 8)), keras.layers.LSTM(32), keras.layers.Dense(1)]
        found = kmg.memory(distributed(keras.Sequential(layers)), batch_size=64)
        activations.append(found.devices[0].activations)
    assert 8 < activations[1] / activations[0] < 12


@pytest.mark.skipif(not ALL_REPLICAS, reason="Twelve trainings: `make test-all` runs them.")
def test_activations_are_those_of_real_trainings():
    script = Path(__file__).parents[1] / "benchmarks" / "bench_memory.py"
    ended = subprocess.run(
        [sys.executable, script, "estimate"],
        capture_output=True,
        text=True,
        check=True,
        timeout=10 * PATIENCE,
    )
    rows = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("| ")]
    ratios = {row[0]: float(row[-1].rstrip(" |")) for row in rows[1:]}
    assert len(ratios) == 6
    assert all(0.8 <= ratio <= 1.2 for ratio in ratios.values()), ratios


@pytest.mark.slow
def test_a_training_needs_no_more_memory_than_stock(monkeypatch):
    """The peaks of whole processes, first step and self-check included."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import bench_memory

    sides = first_rows(bench_memory.SIDES, 2)
    stock, *ours = (bench_memory.peak(side, "small dense") for side in sides)
    assert max(ours) <= stock


@pytest.mark.slow
def test_a_decoder_larger_than_a_device_fits_two_in_parts(monkeypatch):
    """24 layers, whose weights and states are 1.7 times what a device has."""
    # A bucket of 25 MiB is for kernels of as much.
    monkeypatch.setattr(gathering, "BUCKET", 2**20)
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(256, 256)(tokens)
    for _ in range(24):
        x += keras.layers.Dense(256)(keras.ops.cumsum(keras.layers.Dense(256)(x), axis=1))
        inner = keras.layers.Dense(1024, "relu")(keras.layers.LayerNormalization()(x))
        x += keras.layers.Dense(256)(inner)
    model = keras.Model(tokens, keras.layers.Dense(256)(x))
    model = kmg.distribute(model, devices=2, shard="weights")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = kmg.memory(model, batch_size=4)
    # The weights and two slots of each, in float32.
    states = 3 * 4 * model.count_params()
    assert all(device.total <= states / 1.7 for device in found.devices)
    assert all(device.weights + device.optimizer < 0.51 * states for device in found.devices)


def test_an_unknown_length_needs_a_batch():
    layers = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(10, 8)]
    layers += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = distributed(keras.Sequential(layers))
    with pytest.raises(ValueError, match="leave a length open.*Expected.*longest batch"):
        kmg.memory(model, batch_size=64)
    found = kmg.memory(model, np.zeros((2, 100), "int32"), np.zeros((2, 1)), batch_size=64)
    assert found.global_batch_size == 64
    # 8 numbers for each word, and then their gradients.
    assert 1 <= found.devices[0].activations / (64 * 100 * 8 * 4) <= 2.1


def test_a_model_without_a_graph_is_refused():
    model = distributed(dense(3))
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="not known.*run_eagerly=True"):
        kmg.memory(model, batch_size=8)
    with pytest.raises(ValueError, match="batch_size"):
        kmg.memory(distributed(dense(3)), batch_size=0)


def test_the_text_adds_up(capsys):
    found = kmg.memory(distributed(dense(64, 64), 2), batch_size=1024)
    text = found.text
    assert capsys.readouterr().out == f"{text}\n"
    assert str(found).startswith("<MemoryEstimate ") and "\n" not in str(found)
    assert text.startswith("Peak memory of each of 2 devices with 512 of 1024 examples, reached in")
    assert "fits" in text and "What would help: micro_batches=2: " in text
    assert found.fits
