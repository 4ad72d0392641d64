"""What a walk through plans finds held is what a walk through the graph made by them finds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_multigpu as kmg
from keras_multigpu.explanation.liveness import Liveness
from keras_multigpu.explanation.planning import expected_batches, planned
from keras_multigpu.partition.facts.finding import find_facts
from keras_multigpu.partition.planning.part import OWN, Part, planned_whole
from keras_multigpu.partition.program import Program
from keras_multigpu.partition.sizes import Size
from keras_multigpu.training.exchange.sums import Cuts
from keras_multigpu.training.steps.batches import BATCH
from keras_multigpu.training.steps.partitioned_step import PartitionedStep

SIZE, REPLICAS = 64, 2


class Marks(Cuts):
    """Cuts whose results are as large as what replicas exchange, in one graph."""

    def gather(self, tensor, axis):
        pads = [[0, 0]] * tensor.shape.rank
        pads[axis.axis] = [0, axis.length - axis.bounds(0, self.places)[1]]
        return tf.pad(tensor, pads)

    def scatter(self, tensor, axis):
        size = [-1] * tensor.shape.rank
        size[axis.axis] = axis.bounds(0, self.places)[1]
        return tf.slice(tensor, [0] * tensor.shape.rank, size)


def dense():
    return [keras.Input((300,)), layers.Dense(500, "tanh"), layers.Dense(400), layers.Dense(5)]


def convolutions():
    parts = [layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization()]
    parts += [layers.MaxPooling2D(), layers.Conv2D(16, 3), layers.Flatten(), layers.Dense(5)]
    return [keras.Input((32, 32, 3)), *parts]


def recurrent():
    parts = [layers.LSTM(64, return_sequences=True), layers.LSTM(64), layers.Dropout(0.3)]
    return [keras.Input((50, 32)), *parts, layers.Dense(5)]


def words():
    parts = [layers.Embedding(500, 64), layers.LayerNormalization(), layers.Flatten()]
    return [keras.Input((16,), dtype="int32"), *parts, layers.Dense(5)]


def emitted(step):
    """The part that replicas run, from its graph, where each has half of the batch."""
    step.emit()
    graph, own = step.local.graph, Size.of(OWN + BATCH)
    known = {
        n: np.array(each, object) for n, each in enumerate([0, [own, 0], Size.of(BATCH), 0, 0])
    }
    dims = [[*value.shape] for value in known.values()]
    dims += [[own, *leaf.dims[1:]] for leaf in step.inputs.leaves]
    dims += [copies[0].shape.as_list() for copies in step.copies]
    dims += [None] * (len(graph.inputs) - len(dims))
    facts = find_facts(Program(graph), dims, {BATCH: Size.of(BATCH)}, known)
    whole = planned_whole(facts.program, facts)
    part = Part(whole, 1, whole.outs, {})
    part.actions = [each._replace(after=after(each.op)) for each in part.actions]
    return part


def after(op):
    """What else an operation waits for in its graph."""
    waits = [] if op is None else op.after
    return next((out for each in waits for out in each.outputs), None)


@pytest.mark.parametrize(
    ("make", "shard"),
    [
        (dense, None),
        (dense, "weights"),
        (dense, "optimizer"),
        *(
            pytest.param(make, None, marks=pytest.mark.slow)
            for make in (convolutions, recurrent, words)
        ),
    ],
)
def test_plans_hold_what_their_graph_holds(make, shard):
    model = kmg.distribute(keras.Sequential(make()), devices=REPLICAS, shard=shard)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    spec, _ = expected_batches(model, None, None, None, SIZE, "")
    traced = planned(model, spec, SIZE, REPLICAS).traced
    # As on GPUs: where kernels need rows, what is padded in case there are none is of open length.
    step = PartitionedStep(traced, Marks(REPLICAS, on_cpu=False))
    local = step.local_step
    part = Part(local.planned, REPLICAS, local.layouts(), dict(enumerate(step.variables)))
    peaks = []
    for each in (part, emitted(step)):
        walk = Liveness({BATCH: SIZE, OWN + BATCH: SIZE // REPLICAS}, {BATCH, OWN + BATCH})
        peaks.append(walk.peaks(each))
        assert walk.unknown == set()
    for plan, graph in zip(*peaks, strict=True):
        assert plan.total == pytest.approx(graph.total, rel=0.02)
        assert plan.of_batch == pytest.approx(graph.of_batch, rel=0.02)
