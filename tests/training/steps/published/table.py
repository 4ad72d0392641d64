"""Steps that people publish, each in a few lines and with a handful of weights.

A row of `PUBLISHED` is a `Case` that trains one epoch of three batches, of which the last is
smaller; `gathers` names the operations for which replicas may gather rows, which is what a change
of the partition must not add to.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from exactness import models as made
from exactness.cases import Case

from published.contrastive import (
    Moco,
    SimClr,
)
from published.gradients import (
    Collected,
    Count,
    OneByOne,
    Physics,
    Places,
    Private,
    Sharpness,
    Teacher,
)
from published.learner import BATCH, ROWS_OF_SIX, classes
from published.of_layers import (
    AlongTheBatch,
    Ragged,
    Router,
    contrast,
    listener,
    of_body,
    sentences,
    sequential,
    sounds,
    text_reader,
    texts,
)
from published.of_state import Novelty, Process, Queue, Survival, lives
from published.random_draws import (
    Diffusion,
    Gan,
    adversaries,
    autoencoder,
)


@dataclasses.dataclass(frozen=True)
class Published(Case):
    """A published step.

    Args:
        gathers: The types of operations for which rows are gathered.
        alone: Whether one replica takes the whole batch.
        in_graph: Whether it needs a graph in plain Keras, too.
    """

    model: Callable[[], keras.Model] = made.mlp
    batch_size: int = BATCH
    fit: Callable[[Any], dict[str, Any]] = lambda directory: {"epochs": 1}
    after: tuple[str, ...] = ()
    gathers: frozenset[str] = frozenset()
    alone: bool = False
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
    alone = options.pop("alone", False)
    return own(name, model, data, gathers, compile=usual(loss, **options), alone=alone)


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
    layered("along the batch", sequential(AlongTheBatch), gathers="Softmax"),
]
"""The most telling ones."""

OTHERS = [
    own("DDIM", Diffusion),
    own("SAM", of_body(Sharpness, 8, 1)),
    own("number of rows", of_body(Count, 8, 1), gathers="StatelessWhile"),
    own("mapped functions", of_body(OneByOne, 4, 1), gathers="TensorListFromTensor"),
    own("slices of a queue", Queue, classes(), gathers="ResourceScatterNdAdd StridedSlice"),
    own("counts in a table", Novelty, classes(), gathers="UniqueWithCounts"),
    own("Gaussian process", Process, gathers="Cholesky MatrixTriangularSolve Sub"),
    own("Cox", of_body(Survival, 8, 1), lives, gathers="GatherV2 TopKV2"),
    layered("CTC by add_loss", listener, sounds),
    layered("texts", text_reader, texts, alone=True),
]
BY_NAME = {case.name: case for case in [*PUBLISHED, *OTHERS]}
