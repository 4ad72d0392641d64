"""Published steps train on replicas as on one device, and gather no more than they must.

Each trains one epoch of three batches, of which the last is smaller. With the environment variable
`KMG_ALL_REPLICAS=1` each runs on 2 and on 3 replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import pytest
from exactness import models as made
from exactness.cases import Case
from exactness.runs import alone, differences, run
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import replicas_of
from published import (
    BATCH,
    ROWS_OF_SIX,
    AlongTheBatch,
    Collected,
    Gan,
    Moco,
    Physics,
    Places,
    Private,
    Queue,
    Ragged,
    Router,
    SimClr,
    Teacher,
    adversaries,
    autoencoder,
    classes,
    contrast,
    of_body,
    sentences,
    sequential,
)

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of


@dataclasses.dataclass(frozen=True)
class Published(Case):
    """A published step.

    Args:
        gathers: The types of operations for which rows are gathered.
        in_graph: Whether it needs a graph in plain Keras, too.
    """

    model: Callable[[], keras.Model] = made.mlp
    batch_size: int = BATCH
    fit: Callable[[Any], dict[str, Any]] = lambda directory: {"epochs": 1}
    after: tuple[str, ...] = ()
    gathers: frozenset[str] = frozenset()
    in_graph: bool = False


def own(name, model, data=ROWS_OF_SIX, gathers="", **more):
    """A row for a `train_step` of its own, with an optimizer alone."""
    compiled = more.pop("compile", lambda: {"optimizer": sgd(), "jit_compile": False})
    return Published(name, model, compiled, data, gathers=frozenset(gathers.split()), **more)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def usual(loss="mse", **options):
    return lambda: {"optimizer": sgd(), "loss": loss, "jit_compile": False, **options}


def layered(name, model, data=ROWS_OF_SIX, gathers="", loss="mse", **options):
    """A row for Keras's own step."""
    return own(name, model, data, gathers, compile=usual(loss, **options))


PUBLISHED = [
    own("SimCLR", contrast(SimClr), gathers="MatMul"),
    own("MoCo", Moco, gathers="ConcatV2"),
    own("GAN", Gan, compile=adversaries),
    layered("VAE", autoencoder),
    own("gradient accumulation", Collected, in_graph=True),
    own("gradients of each row", of_body(Private, 4, 1), gathers="Reshape Transpose"),
    own("second derivatives", of_body(Physics, 4, 1)),
    own("mean teacher", Teacher, classes()),
    own("places of rows", of_body(Places, 8, 1), gathers="Roll"),
    layered("experts with capacity", sequential(Router), gathers="Cumsum"),
    layered("ragged", Ragged, sentences, gathers="GatherV2"),
    own("slices of a queue", Queue, classes(), gathers="ResourceScatterNdAdd StridedSlice"),
    layered("along the batch", sequential(AlongTheBatch), gathers="Softmax"),
]

ROWS = [
    (case, replicas)
    for place, case in enumerate(PUBLISHED)
    for replicas in ((2, 3) if ALL_REPLICAS else ((2, 3)[place % 2],))
]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_graphs")
@pytest.mark.parametrize(
    ("case", "replicas"), ROWS, ids=lambda value: getattr(value, "name", value)
)
def test_a_published_step_is_that_of_one_device(case, replicas):
    expected = run(case, Published.compiled if case.in_graph else alone)
    found = run(case, lambda case: kmg.distribute(case.compiled(), replicas_of(replicas)))
    differing = {
        what: difference
        for what, difference in differences(expected, found).items()
        if difference > case.tolerance
    }
    assert not differing
    runners = replication_of(found.model).step_functions(found.model, "train").runners
    split = [runner.step for runner in runners if runner.step is not None]
    assert split and not any(step.unsplit_because for step in split)
    gathered = {
        moved.op.type if moved.op else "result"
        for step in split
        for moved in step.cost.moved
        if moved.kind == "gathered"
    }
    assert gathered == case.gathers
