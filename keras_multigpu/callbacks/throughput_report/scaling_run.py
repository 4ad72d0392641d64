"""Measures what more replicas bring: a copy of the model on one device against one on all.

Both copies train on batches that are in memory already, in turn, round after round. The copy on
one device gets one replica's share, so it does the work that each replica does (weak scaling).
"""

import itertools
import statistics
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.throughput_report.report import Scaling
from keras_multigpu.callbacks.trials import same_draws
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.keras_internals.compile_internals import compile_arguments
from keras_multigpu.replicas import obtained
from keras_multigpu.training.distribute import distribute
from keras_multigpu.training.shares import batch_size_of
from keras_multigpu.training.variables.model_state import ModelState

ROUNDS = 5
BATCHES = 4
"""How many different batches a copy trains on, over and over."""


def scaling_of(model: Any, run: Any, steps: int) -> Scaling:
    """Measure how much faster all replicas are than one; the model stays as it is."""
    replicas = run.replicas
    devices = run.devices
    batches = list(itertools.islice(run.first_batches(), BATCHES))
    share = -(-int(batch_size_of(batches[0]) or 0) // replicas)
    shares = [keras.tree.map_structure(lambda leaf: first(leaf, share), one) for one in batches]
    state = ModelState.of(model)
    try:
        with same_draws():
            alone = copy_of(model, obtained("one_device", devices=[devices[0]]))
            together = copy_of(model, model.distribute_strategy)
            sides = [(alone, shares), (together, batches)]
            for side, data in sides:
                speed_of(side, data, 2)  # The first step compiles.
            rounds = [[speed_of(side, data, steps) for side, data in sides] for _ in range(ROUNDS)]
    finally:
        state.restore(model)
    # Both sides of a round meet the same load of the machine, so their ratio is steadier than they.
    one, ratio = (statistics.median(r[0] for r in rounds), [r[1] / r[0] for r in rounds])
    shared = replicas > 1 and all("CPU" in device for device in devices)
    return Scaling(replicas, one, one * statistics.median(ratio), shared)


def first(leaf: Any, count: int) -> Any:
    return leaf if leaf is None or leaf.shape.rank == 0 else leaf[:count]


def speed_of(model: Any, batches: list[Any], steps: int) -> float:
    examples = 0
    start = time.perf_counter()
    for batch in itertools.islice(itertools.cycle(batches), steps):
        logs = model.train_on(batch)
        examples += int(batch_size_of(batch) or 0)
    # Only reading waits for the devices.
    np.asarray(tf.convert_to_tensor(logs["loss"]))
    return examples / (time.perf_counter() - start)


def copy_of(model: Any, copies_strategy: tf.distribute.Strategy) -> Any:
    """A model of the same layers, weights and loss, without metrics, under a strategy."""
    with graph_internals.single_device():
        try:
            copy = keras.models.clone_model(model)
            # In a Sequential model without an input, layers have no weights before they are built.
            weights = model.get_weights()
            if len(copy.weights) == len(weights):
                copy.set_weights(weights)
        except Exception as error:
            raise value_error(
                f"The model cannot be copied to measure how it scales: {error}",
                "Expected a model that `keras.models.clone_model` can copy: Sequential, "
                "functional, or subclassed with `get_config`.",
                "Leave out `scaling_steps`, or give the model a `get_config`.",
                model=type(model).__name__,
            ) from error
    copy = distribute(copy, copies_strategy)
    arguments = compile_arguments(model)
    optimizer = model.optimizer
    copy.compile(
        optimizer=type(optimizer).from_config(optimizer.get_config()),
        loss=arguments["loss"],
        loss_weights=arguments["loss_weights"],
        jit_compile=bool(model.jit_compile),
        run_eagerly=bool(model.run_eagerly),
        micro_batches=model.replication.micro_batches,
    )
    return copy
